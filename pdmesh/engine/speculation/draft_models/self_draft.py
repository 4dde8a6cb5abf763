"""The first layers of a model guess what all of them will draw: early exit with the model's own norm and head.

No second weights and no second pool: the keys and values of the first layers are the model's own, for everything it has computed.
What is drafted is written behind that, into the slots where the next tokens go; verification then writes the same there, for all
layers. (Zhang et al., Draft & Verify, 2023; Elhoushi et al., LayerSkip, 2024.)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from torch import Tensor

from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.runner.model_runner import ForwardModel, TokenSampler
from pdmesh.engine.speculation.draft_models.kv import TargetKV
from pdmesh.engine.speculation.draft_models.proposer import ModelDraft
from pdmesh.engine.speculation.draft_models.room import Room
from pdmesh.engine.speculation.proposer import Proposer


class LayeredModel(Protocol):
    """A target that can stop early."""

    @property
    def config(self) -> ModelConfig: ...

    def first_layers(self, num_layers: int) -> ForwardModel:
        """A model of the first layers, with the same norm, head and weights."""
        ...


def first_layers(model: LayeredModel, num_layers: int) -> ForwardModel:
    """Without weights of its own. Raises ValueError for a number of layers that is no part of the model's."""
    check_num_layers(num_layers, model.config)
    return model.first_layers(num_layers)


def self_draft(
    model: LayeredModel,
    num_layers: int,
    kv: Tensor,
    sampler: TokenSampler,
    room: Room,
    *,
    eos_token_ids: Collection[int],
    max_context: int,
    name: str = "self_draft",
    inner: Proposer | None = None,
) -> ModelDraft:
    """`kv`: the target's pool, whose owner `room` asks for slots. Raises ValueError as `first_layers`."""
    return ModelDraft(
        name,
        first_layers(model, num_layers),
        TargetKV(kv),
        sampler,
        room,
        eos_token_ids=eos_token_ids,
        max_context=max_context,
        inner=inner,
    )


def check_num_layers(num_layers: int, model: ModelConfig) -> None:
    """Raises ValueError unless it is a part of the model's."""
    most = model.num_layers - 1
    if most < 1:
        raise ValueError("self_draft_layers: the model has one layer, which is all of it; let somebody else guess")
    if not 1 <= num_layers <= most:
        raise ValueError(f"self_draft_layers: {num_layers} is not allowed; give 1 to {most}: the model has {most + 1} layers")
