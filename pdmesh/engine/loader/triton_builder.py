"""From a checkpoint's tensors to a decoder for the Triton kernels, which differs from torch's in its maps and experts."""

from __future__ import annotations

from torch import Tensor

from pdmesh.engine.kernels.triton.experts.experts import GroupedExperts
from pdmesh.engine.kernels.triton.linear.linear import make_triton_linear
from pdmesh.engine.loader.builder import TorchBuilder
from pdmesh.engine.models.config import ExpertsConfig
from pdmesh.engine.models.layers import MLP, Linear


class TritonBuilder(TorchBuilder):
    """Build a decoder whose experts lie together, for the kernels: while a layer is loaded the device holds one expert twice."""

    def _experts(self, prefix: str, experts: ExpertsConfig) -> MLP:
        each = (expert for expert in self._each_expert(prefix, experts) if expert is not None)
        around = self._around_experts(prefix, experts)
        return GroupedExperts(experts, self.config.activation, experts=each, **around)

    def _map(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return make_triton_linear(weight, bias)
