"""From a loaded decoder to one on the Triton kernels, and its linear maps in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.kernels.triton.decode import DecodeSizes
from engine.kernels.triton.graphs import make_recorder
from engine.kernels.triton.linear import make_triton_linear
from engine.kernels.triton.model import KERNEL_REVISION, TritonModel
from engine.kernels.triton.pieces import token_buckets
from engine.layers import Linear
from engine.model import DecoderModel
from engine.numerics import Numerics
from engine.weights.pack import concat_rows
from engine.weights.quantize import Int4Weight, Int8Weight, quantize_int4, quantize_int8
from engine.weights.source import WeightSource
from engine.weights.tensors import checked

Weight = Int8Weight | Int4Weight


class QuantizedMaps:
    """Makes maps of a checkpoint's tensors. Quantized on the CPU, one tensor at a time; the device gets what is read there."""

    def __init__(self, source: WeightSource, numerics: Numerics, device: str) -> None:
        self._source, self._numerics, self._device = source, numerics, device

    def joined(self, parts: Sequence[tuple[str, int]], width: int, bias: Tensor | None) -> Linear:
        """One product of several maps with the same input: parts are (name, output rows). Raises ValueError as `checked` does."""
        weight = concat_rows([self._weight(f"{name}.weight", rows, width) for name, rows in parts])
        return make_triton_linear(_moved(weight, self._device), bias)

    def head(self, weight: Tensor) -> Linear:
        """In 8 bits at least: it decides between neighbours, and 4 bits would cost it more than they save."""
        return make_triton_linear(_moved(quantize_int8(weight.cpu()), self._device), None)

    def _weight(self, name: str, rows: int, width: int) -> Weight:
        is_int4, group = self._numerics.weights == "int4", self._numerics.group
        exact = self._source.get_int4(name, group) if is_int4 else None
        if exact is not None and exact.values.shape == (rows, width):
            return exact
        tensor = checked(self._source, name, (rows, width))
        try:
            return quantize_int4(tensor, group) if is_int4 else quantize_int8(tensor)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def triton_model(decoder: DecoderModel, config: EngineConfig, numerics: Numerics, max_context: int) -> tuple[TritonModel, str]:
    """The decoder on the kernels, steps as graphs; and its numeric mode."""
    sizes = DecodeSizes(config.max_num_seqs, max_context, config.block_size)
    buckets = token_buckets(config.max_num_batched_tokens, decoder.config.layer_weights)
    model = TritonModel(decoder, sizes, token_buckets=buckets, recorder=make_recorder(decoder.device))
    return model, numerics.name(f"triton{KERNEL_REVISION}-{decoder.layers[0].qkv.kind}-{_processor(config.device)}")


def _processor(device: str) -> str:
    if device != "cuda":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"


def _moved(weight: Weight, device: str) -> Weight:
    if isinstance(weight, Int8Weight):
        return replace(weight, values=weight.values.to(device), scales=weight.scales.to(device))
    return replace(weight, values=weight.values.to(device), scales=weight.scales.to(device), minimums=weight.minimums.to(device))
