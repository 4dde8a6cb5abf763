"""What the halves of the plugin share within one process: the connector's halves, the draw, and the engine around EngineCore.

vLLM makes the connector and the logits processor itself, from names in its configuration; they find their engine here. Only the
engine's thread uses a link.

    schedule()     ── asks ──► waits_for_kv; tells asked, granted, plan    (scheduler half)
    the forward    ── tells ─► layer_done                                  (worker half)
    the sampler    ── asks ──► the draws of the step's rows                (logits processor)
    the step's end ── asks ──► outcomes: received, sent                    (worker half)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

LINK = "pdmesh_link"
"""The key of `kv_connector_extra_config` under which the name of a link stands."""


@dataclass
class Outcomes:
    """Hold what the connector reports at the end of the next step, each once: vLLM keeps a request's blocks until then."""

    received: set[str] = field(default_factory=set)
    sent: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.received or self.sent)


class Draws(Protocol):
    """Draw the tokens of a step."""

    def draw(self, logits: Tensor, names: Sequence[str | None]) -> Sequence[int]:
        """Return a token for each row of `logits` [R, V] float32; `names` are the requests' ids in vLLM."""


class Link:
    """Connect one EngineCore with the engine around it. The functions are set before the first step."""

    def __init__(self) -> None:
        self.caches: Mapping[str, Tensor] = {}  # vLLM's KV tensors, by layer, in its order
        self.outcomes = Outcomes()
        self.waits_for_kv: set[str] = set()  # requests whose prompt is filled by a transfer
        self.holds_blocks: set[str] = set()  # requests whose blocks stay after their end, until they are in outcomes.sent
        self.on_granted: Callable[[str, Sequence[int], int], None] = lambda name, blocks, num_external: None
        self.on_asked: Callable[[str], None] = lambda name: None
        self.on_plan: Callable[[SchedulerOutput], None] = lambda plan: None
        self.layer_done: Callable[[int], None] = lambda index: None
        self.draws: Draws | None = None
        self._layers: dict[str, int] = {}

    def register(self, caches: Mapping[str, Tensor]) -> None:
        """Take vLLM's KV tensors."""
        self.caches = caches
        self._layers = {name: index for index, name in enumerate(caches)}

    def layer(self, name: str) -> int | None:
        """Return the index of a layer; None for one without KV of its own."""
        return self._layers.get(name)

    def take_outcomes(self) -> Outcomes:
        """Return what is to be reported, once."""
        outcomes, self.outcomes = self.outcomes, Outcomes()
        return outcomes


_LINKS: dict[str, Link] = {}


def open_link(name: str) -> Link:
    """Make the link of a new engine."""
    _LINKS[name] = link = Link()
    return link


def link_of(extra_config: Mapping[str, object]) -> Link:
    """Return the link that a configuration names. Raises ValueError: the plugin works in a pdmesh worker only."""
    link = _LINKS.get(str(extra_config.get(LINK)))
    if link is None:
        raise ValueError(
            f"kv_connector_extra_config.{LINK}: no engine of pdmesh in this process has that name; start vLLM by "
            "`python -m pdmesh.worker --engine vllm`, with one process for the model (tensor_parallel 1)"
        )
    return link


def close_link(name: str) -> None:
    """Forget a link; idempotent."""
    _LINKS.pop(name, None)
