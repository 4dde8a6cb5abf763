"""A layer's mixture of experts on the kernels (pdmesh.engine.models.experts is the reference)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.experts.product import gated_up, summed, weighted_down
from pdmesh.engine.kernels.triton.experts.routing import routed
from pdmesh.engine.kernels.triton.experts.weights import ExpertStack, ExpertWeights
from pdmesh.engine.kernels.triton.linear.mlps import GatedStep
from pdmesh.engine.models.config import ExpertsConfig
from pdmesh.engine.models.experts import ClampedMLP
from pdmesh.engine.models.layers import MLP, GatedMLP, Linear


class GroupedExperts:
    """Compute router, experts and the shared one: six launches, and three of the shared expert. `counts` [num_experts] int64, on
    the device, adds up how many tokens each expert got; padding is not counted."""

    def __init__(
        self,
        config: ExpertsConfig,
        activation: str,
        *,
        router: Tensor,
        router_bias: Tensor | None,
        correction: Tensor | None,
        experts: Iterable[MLP],
        shared: MLP | None,
        shared_gate: Tensor | None,
    ) -> None:
        """`router` [num_experts, hidden_size], `shared_gate` [1, hidden_size]: float32, like what else is about scores. `experts`
        are taken one after the other, and not kept. `activation` where config names none."""
        self.config, self._activation = config, config.activation or activation
        self._router = router if shared_gate is None else torch.cat((router, shared_gate))
        self._bias = _filled(router_bias, len(self._router))
        self._correction = correction
        self._gate_up, self._down = _stacked(config, experts)
        self.shared = _shared(shared, activation)
        self.counts = torch.zeros(config.num_experts, dtype=torch.int64, device=router.device)

    @property
    def maps(self) -> Iterator[Linear]:
        """Yield the maps that every token takes."""
        yield from () if self.shared is None else self.shared.maps

    @property
    def num_bytes_of_token(self) -> int:
        """Return the bytes of the experts that one token takes."""
        return (self._gate_up.num_bytes + self._down.num_bytes) * self.config.top_k // self.config.num_experts

    def __call__(self, x: Tensor, slots: Tensor | None = None) -> Tensor:
        """Map x [T, hidden_size] to the same shape. slots [T] int32: negative for padding, which takes no expert."""
        slots = torch.zeros(len(x), dtype=torch.int32, device=x.device) if slots is None else slots
        own = routed(self.config, x, slots, self._router, self._bias, self._correction, self.counts)
        inner = gated_up(x, own, self._gate_up, self._activation, self.config.activation_limit)
        parts = weighted_down(inner, len(x), own, self._down)
        return summed(parts, own, None if self.shared is None else self.shared(x, slots))


def _filled(bias: Tensor | None, length: int) -> Tensor | None:
    """Return the router's bias with zeros for a shared expert's gate."""
    return None if bias is None else torch.nn.functional.pad(bias, (0, length - len(bias)))


def _shared(mlp: MLP | None, activation: str) -> GatedStep | None:
    if mlp is None:
        return None
    if not isinstance(mlp, GatedMLP):
        raise TypeError(f"{type(mlp).__name__} is no shared expert that the kernels compute")
    return GatedStep(mlp.gate_up, mlp.down, activation)


def _stacked(config: ExpertsConfig, experts: Iterable[MLP]) -> tuple[ExpertWeights, ExpertWeights]:
    gate_up, down = ExpertStack(config.num_experts, 2), ExpertStack(config.num_experts, 1)
    for number, mlp in enumerate(experts):
        if not isinstance(mlp, (GatedMLP, ClampedMLP)):
            raise TypeError(f"{type(mlp).__name__} is no expert that the kernels compute")
        gate_up.put(number, mlp.gate_up)
        down.put(number, mlp.down)
    return gate_up.weights(), down.weights()
