"""An adapter in memory: the two thin matrices of each map that it changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from pdmesh.adapter_id import AdapterId
from pdmesh.engine.models.config import ModelConfig


class Site(NamedTuple):
    """Name a linear map of the decoder, such as (3, "self_attn.q_proj")."""

    layer: int
    stem: str


@dataclass(frozen=True)
class AdapterMap:
    """Hold what is added to one map: b (a x). The scale is in `b`."""

    a: Tensor  # [rank, in] float32
    b: Tensor  # [out, rank] float32

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True)
class Adapter:
    """Hold an adapter's maps; sites without one are the base model's."""

    id: AdapterId
    maps: Mapping[Site, AdapterMap]

    @property
    def rank(self) -> int:
        """Return the largest rank of its maps."""
        return max(each.rank for each in self.maps.values())

    @property
    def num_bytes(self) -> int:
        return sum(each.a.nbytes + each.b.nbytes for each in self.maps.values())


def sites_of(config: ModelConfig) -> dict[Site, tuple[int, int]]:
    """Return the maps that may have an adapter, with their (outputs, inputs). Those of experts and of latent attention's
    bottlenecks may not: their weights are not multiplied with rows of the step, or not as they are stored."""
    return {Site(layer, stem): shape for layer in range(config.num_layers) for stem, shape in _shapes(config, layer).items()}


def places_bytes(config: ModelConfig, num_places: int, rank: int, itemsize: int) -> int:
    """Return the memory of places of a fixed rank for adapters of all maps (pdmesh/engine/lora/triton_maps.py)."""
    return num_places * rank * itemsize * sum(outputs + inputs for outputs, inputs in sites_of(config).values())


def _shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    values = config.num_heads * config.latent.value_dim if config.latent else query
    shapes = {"self_attn.o_proj": (hidden, values)}
    if config.latent is None:
        shapes |= {"self_attn.q_proj": (query, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    if not config.has_experts(layer):
        shapes |= {"mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        shapes |= {"mlp.gate_proj": (inner, hidden)} if config.gated_mlp else {}
    return shapes
