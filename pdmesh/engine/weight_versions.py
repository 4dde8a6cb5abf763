"""Versions of a model's weights in one engine: new requests are computed with the latest, those that began before with theirs.

    update ──► current                     what comes from now on
               earlier ── its last request ends, and GRACE_S pass ──► dropped

A step that holds requests of two versions is two passes, one after the other, on the same threads and the same pool. KV of two
versions is never mixed: the roots of block hashes contain the hash of the weights (`EngineRequest.cache_root`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

from pdmesh.engine.errors import UnknownWeights, WeightsRefused

if TYPE_CHECKING:
    from torch import Tensor

    from pdmesh.engine.kv_cache.events import LayerReadiness
    from pdmesh.engine.models.config import ModelConfig
    from pdmesh.engine.runner.batch import StepBatch
    from pdmesh.engine.runner.prompt_outputs import Pooler
    from pdmesh.engine.scheduler.scheduler import ScheduledSequence

GRACE_S = 30.0
"""How long a version stays without requests: one that was checked against it may be on its way to the engine."""


class ForwardModel(Protocol):
    """The methods of a model that the runner needs."""

    def forward(self, batch: StepBatch, kv: Tensor, signal: LayerReadiness | None = None, hidden: Tensor | None = None) -> Tensor:
        """Write the KV of the batch's T tokens into `kv`, notifying `signal` of each layer; return logits [R, vocab] float32.

        `hidden` [R, hidden_size] float32 is filled with the hidden states, before the final norm, that the logits come from.
        """
        ...


@dataclass(frozen=True, eq=False)
class WeightVersion:
    """Hold one version: `weights_hash`, what computes with it, and what makes embeddings (None: nothing does)."""

    weights_hash: str
    model: ForwardModel
    pooler: Pooler | None = None


class WeightVersions:
    """Hold the versions that requests may be computed with. Changed between two steps, under the engine's lock."""

    def __init__(self, version: WeightVersion) -> None:
        self.current = version
        self._earlier: dict[str, tuple[WeightVersion, float]] = {}  # with when it was replaced (s)

    def __len__(self) -> int:
        return 1 + len(self._earlier)

    def __contains__(self, weights_hash: object) -> bool:
        return weights_hash == self.current.weights_hash or weights_hash in self._earlier

    def update(self, version: WeightVersion, now_s: float) -> None:
        """Make `version` the current one."""
        self._earlier.pop(version.weights_hash, None)
        if version.weights_hash != self.current.weights_hash:
            self._earlier[self.current.weights_hash] = (self.current, now_s)
        self.current = version

    def check(self, weights_hash: str) -> str:
        """Return the hash of the version for a new request that asks for `weights_hash`, empty for the current one. Raises
        UnknownWeights."""
        if not weights_hash or weights_hash in self:
            return weights_hash or self.current.weights_hash
        raise UnknownWeights(f"weights_hash: {weights_hash[:16]!r} is not what this engine computes with (any more)")

    def drop_unused(self, used: Collection[str], now_s: float) -> None:
        """Drop earlier versions that no request needs."""
        for weights_hash, (_, replaced_s) in list(self._earlier.items()):
            if weights_hash not in used and now_s - replaced_s > GRACE_S:
                del self._earlier[weights_hash]

    def drop_earlier(self) -> None:
        """Drop all earlier versions, which no request needs."""
        self._earlier.clear()

    def of(self, weights_hash: str) -> WeightVersion:
        """Return a version that is here."""
        return self.current if weights_hash == self.current.weights_hash else self._earlier[weights_hash][0]

    def split(self, pieces: Sequence[ScheduledSequence]) -> list[tuple[WeightVersion, list[ScheduledSequence]]]:
        """Return the sequences of a step by version, in their order; one entry nearly always."""
        if not self._earlier:
            return [(self.current, list(pieces))]
        by_hash: dict[str, list[ScheduledSequence]] = {}
        for piece in pieces:
            by_hash.setdefault(piece.sequence.group.weights_hash, []).append(piece)
        return [(self.of(weights_hash), each) for weights_hash, each in by_hash.items()]


class Loaded(Protocol):
    """What of a loaded model has to stay as it is: pdmesh/engine/loader/loader.py."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def runs_ahead(self) -> bool: ...
    @property
    def adapter_slots(self) -> object | None: ...


def check_new_weights(present: Loaded, new: Loaded, *, has_ranks: bool, has_drafts: bool) -> None:
    """Raise WeightsRefused unless `new` may take the place of `present`: the same model in shape, computed in the same formats,
    and nothing in the engine that is made of the present weights."""
    depending = {
        "a GPU, whose graphs hold them": present.runs_ahead,
        "several ranks": has_ranks,
        "places for LoRA adapters": present.adapter_slots is not None,
        "drafts of a model": has_drafts,
    }
    if any(depending.values()):
        what = ", ".join(name for name, is_so in depending.items() if is_so)
        remedy = "; start it with --speculation prompt_lookup" if has_drafts else ""
        raise WeightsRefused(f"model: this engine cannot take other weights while it has {what}{remedy}")
    pairs = [(each.name, getattr(present.config, each.name), getattr(new.config, each.name)) for each in fields(present.config)]
    pairs += [(name, getattr(present, name), getattr(new, name)) for name in ("numeric_mode", "dtype", "kv_dtype", "kv_scales")]
    for name, ours, theirs in pairs:
        if ours != theirs:
            raise WeightsRefused(f"model: its {name} is {theirs!r:.60}, and this engine's {ours!r:.60}; start a worker with it")
