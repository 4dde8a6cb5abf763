"""One family of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.names import Names
from pdmesh.engine.models.reader import ConfigReader


@dataclass(frozen=True)
class Family:
    """Describe one family: how its config.json is read, and where its checkpoints differ from a Llama's names. `names_of` chooses
    the names by the config, for a family that has several."""

    read: Callable[[ConfigReader], ModelConfig]
    names: Names = field(default_factory=Names)
    names_of: Callable[[ModelConfig], Names] | None = None

    def names_for(self, config: ModelConfig) -> Names:
        """Return where checkpoints with this config store their tensors."""
        return self.names if self.names_of is None else self.names_of(config)
