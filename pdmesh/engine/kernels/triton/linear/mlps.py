"""A layer's MLP on the kernels: a class for each kind, so that a step calls any of them alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pdmesh.engine.kernels.triton.linear.dense import VectorDense
from pdmesh.engine.kernels.triton.linear.linear import WordLinear
from pdmesh.engine.kernels.triton.norms import activate, gate_mul
from pdmesh.engine.models.layers import Linear


class MLPStep(Protocol):
    """Compute an MLP: [T, hidden_size] -> the same shape, which the caller may overwrite."""

    @property
    def maps(self) -> Iterator[Linear]:
        """Yield the maps that every token takes."""

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        """slots [T] int32: negative for padding, whose result is not defined."""


@dataclass(frozen=True)
class GatedStep:
    """Compute down(act(gate(x)) * up(x))."""

    gate_up: Linear
    down: Linear
    activation: str

    @property
    def maps(self) -> Iterator[Linear]:
        yield from (self.gate_up, self.down)

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        if isinstance(self.gate_up, VectorDense | WordLinear):
            return self.down(self.gate_up.gated(x, self.activation))
        return self.down(gate_mul(self.gate_up(x), self.activation))


@dataclass(frozen=True)
class PlainStep:
    """Compute down(act(up(x)))."""

    up: Linear
    down: Linear
    activation: str

    @property
    def maps(self) -> Iterator[Linear]:
        yield from (self.up, self.down)

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        return self.down(activate(self.up(x), self.activation))
