"""Loading for the Triton kernels: a decoder with their maps and experts, its conversion, and linear maps in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pdmesh.engine.backend_selection import Numerics
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kernels.triton.cuda_graphs import DecodeSizes, fewest_rows, make_recorder
from pdmesh.engine.kernels.triton.experts.experts import GroupedExperts
from pdmesh.engine.kernels.triton.linear.linear import make_triton_linear
from pdmesh.engine.kernels.triton.model import KERNEL_REVISION, TritonModel, bounds_of
from pdmesh.engine.kernels.triton.piecewise_graphs import token_buckets
from pdmesh.engine.loader.builder import TorchBuilder
from pdmesh.engine.loader.kv_scales import KVScales
from pdmesh.engine.loader.pack import concat_rows
from pdmesh.engine.loader.quantize import Fp8Weight, Int4Weight, Int8Weight, quantize_fp8, quantize_int4, quantize_int8
from pdmesh.engine.loader.safetensors import WeightSource, checked, exact_weight
from pdmesh.engine.lora.triton_maps import TritonAdapters
from pdmesh.engine.models.config import ExpertsConfig
from pdmesh.engine.models.decoder import DecoderModel
from pdmesh.engine.models.layers import MLP, Linear

Weight = Int8Weight | Int4Weight | Fp8Weight


class QuantizedMaps:
    """Make maps of a checkpoint's tensors. They are quantized on the device that reads them, one tensor at a time, block by
    block: of the checkpoint's tensors the device holds only the head."""

    def __init__(self, source: WeightSource, numerics: Numerics, device: str) -> None:
        self._source, self._numerics, self._device = source, numerics, device

    def joined(self, parts: Sequence[tuple[str, int]], width: int, bias: Tensor | None) -> Linear:
        """Return one product of several maps with the same input: parts are (name, output rows). Raises ValueError like
        `checked`."""
        weight = concat_rows([_moved(self._weight(f"{name}.weight", rows, width), self._device) for name, rows in parts])
        return make_triton_linear(weight, bias, rounds_activations=self._numerics.rounds_activations)

    def head(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Return the head in int8 whatever the others are: it ranks close tokens. 4 bits would cost it more accuracy than they
        save, and fp8 is coarser near a row's largest weights."""
        return make_triton_linear(quantize_int8(weight, self._device), bias)

    def _weight(self, name: str, rows: int, width: int) -> Weight:
        exact = self._exact(name, rows, width)
        return self._quantized(name, checked(self._source, name, (rows, width))) if exact is None else exact

    def _exact(self, name: str, rows: int, width: int) -> Int4Weight | Int8Weight | None:
        """Return the checkpoint's own tensor in this format, on the host."""
        exact = exact_weight(self._source, name, self._numerics.weights, self._numerics.group)
        return exact if exact is not None and exact.values.shape == (rows, width) else None

    def _quantized(self, name: str, tensor: Tensor) -> Weight:
        """Quantize on the device. Raises ValueError that names the tensor."""
        try:
            if self._numerics.weights == "int4":
                return quantize_int4(tensor, self._numerics.group, self._device)
            return _IN_8_BITS[self._numerics.weights](tensor, self._device)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


_IN_8_BITS: dict[str, Callable[[Tensor, str], Int8Weight | Fp8Weight]] = {"int8": quantize_int8, "fp8": quantize_fp8}


def triton_model(
    decoder: DecoderModel, config: EngineConfig, numerics: Numerics, max_context: int, kv_scales: KVScales
) -> tuple[TritonModel, str]:
    """Return the decoder on the kernels, steps as graphs; and its numeric mode. `kv_scales`: of a pool in fp8, else empty."""
    buckets = token_buckets(config.max_num_batched_tokens, decoder.config.layer_weights)
    model = TritonModel(
        decoder,
        DecodeSizes(config.max_num_seqs, max_context, config.block_size, fewest_rows(decoder.device)),
        token_buckets=buckets,
        recorder=make_recorder(decoder.device),
        kv_scales=torch.tensor(kv_scales, dtype=torch.float32, device=decoder.device) if kv_scales else None,
        max_rows=bounds_of(config, max_context).num_rows,
        adapters=TritonAdapters(decoder, places, config.max_lora_rank) if (places := config.num_adapter_slots) else None,
    )
    return model, numerics.name(f"triton{KERNEL_REVISION}-{decoder.layers[0].qkv.kind}-{_processor(config.device)}")


def _processor(device: str) -> str:
    if device != "cuda":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"


def _moved(weight: Weight, device: str) -> Weight:
    if isinstance(weight, Int4Weight):
        minimums = weight.minimums.to(device)
        return replace(weight, values=weight.values.to(device), scales=weight.scales.to(device), minimums=minimums)
    return replace(weight, values=weight.values.to(device), scales=weight.scales.to(device))


class TritonBuilder(TorchBuilder):
    """Build a decoder whose experts lie together, for the kernels: while a layer is loaded the device holds one expert twice."""

    def _experts(self, prefix: str, experts: ExpertsConfig) -> MLP:
        each = (expert for expert in self._each_expert(prefix, experts) if expert is not None)
        around = self._around_experts(prefix, experts)
        return GroupedExperts(experts, self.config.activation, experts=each, **around)

    def _map(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return make_triton_linear(weight, bias)
