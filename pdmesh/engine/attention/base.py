"""Attention over the paged pool, behind one interface: a new backend is one new file and one line in `BACKENDS`.

`plan()` once per step turns block tables into whatever the backend's kernels index with; `run()` once per layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from pdmesh.engine.attention.paged_attention import ReferenceAttention
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.runner.batch import StepBatch


class AttentionPlan(Protocol):
    """One step's attention. Valid for that step only."""

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kv: Tensor) -> Tensor:
        """Writes the step's keys and values to the pool, then attends.

        query [T, num_heads, head_dim]; key, value [T, num_kv_heads, head_dim]; kv the pool (`KVPool.tensor`).
        Returns [T, num_heads, head_dim] in query's dtype.
        """


class AttentionBackend(Protocol):
    name: str  # part of the numeric mode

    def plan(self, batch: StepBatch, block_size: int) -> AttentionPlan: ...


def _triton(config: ModelConfig, device: str) -> AttentionBackend:
    from pdmesh.engine.kernels.triton.attention import TritonAttention  # triton is not everywhere

    return TritonAttention(config, device)


BACKENDS: dict[str, Callable[[ModelConfig, str], AttentionBackend]] = {
    "reference": ReferenceAttention,
    "triton": _triton,
}


def make_attention(name: str, config: ModelConfig, device: str) -> AttentionBackend:
    """Raises ValueError for a name that is not registered."""
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is not known; there are {', '.join(BACKENDS)}")
    return BACKENDS[name](config, device)
