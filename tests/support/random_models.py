"""Models with random weights on the Triton kernels, and engines on them: 16 GB appear in a second."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.engine.backend_selection import Numerics
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.kernels.triton.cuda_graphs import DecodeSizes, fewest_rows, make_recorder
from pdmesh.engine.kernels.triton.linear.linear import make_triton_linear
from pdmesh.engine.kernels.triton.model import TritonModel
from pdmesh.engine.kernels.triton.piecewise_graphs import token_buckets
from pdmesh.engine.loader.loader import LoadedModel
from pdmesh.engine.loader.quantize import Fp8Weight, Int4Weight, Int8Weight
from pdmesh.engine.loader.triton import QuantizedMaps, TritonBuilder
from pdmesh.engine.memory import effective_max_context
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.decoder import DecoderModel
from pdmesh.engine.models.layers import Linear
from pdmesh.text.block_hash import hash_block
from tests.support.random_weights import RandomSource, random_fp8, random_int4, random_int8


class RandomMaps(QuantizedMaps):
    """Linear maps of random codes."""

    def __init__(self, source: RandomSource, numerics: Numerics, device: str) -> None:
        super().__init__(source, numerics, device)
        self._encoding, self._group, self._place = numerics.weights, numerics.group, device

    def joined(self, parts: Sequence[tuple[str, int]], width: int, bias: Tensor | None) -> Linear:
        """One map for all parts."""
        weight = _DRAWN[self._encoding](parts[0][0], sum(rows for _, rows in parts), width, self._group, self._place)
        return make_triton_linear(weight, bias)

    def head(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """In 8 bits, as that of a checkpoint."""
        rows, width = weight.shape
        return make_triton_linear(random_int8("head", rows, width, 0, self._place), bias)


_DRAWN: dict[str, Callable[[str, int, int, int, str], Int8Weight | Int4Weight | Fp8Weight]] = {
    "int8": random_int8,
    "int4": random_int4,
    "fp8": random_fp8,
}


def make_decoder(
    shape: ModelConfig, weights: str, config: EngineConfig, dtype: torch.dtype, place: str | None = None
) -> DecoderModel:
    """`weights`: int8, int4, fp8, or none, which is `dtype`. `place`: a device of torch, by default the engine's."""
    is_plain = weights == "none"
    name = str(dtype).removeprefix("torch.") if is_plain else weights
    numerics = Numerics("triton", name, config.quantization_group if weights == "int4" else 0, dtype, dtype)
    source = RandomSource(shape, place or config.device, dtype)
    maps = None if is_plain else RandomMaps(source, numerics, place or config.device)
    builder = TritonBuilder(source, dtype, place or config.device, maps)
    return builder.build(effective_max_context(config, shape), lambda _share, _text: None)


class Unprepared(TritonModel):
    """Records a bucket when it is first needed: kernels of those that nobody measures would cost a run minutes of compilation."""

    def prepare(self, kv: Tensor) -> None:
        """Nothing."""


@dataclass
class Subject:
    """An engine, and its model as it was made."""

    engine: Engine
    model: TritonModel

    def close(self) -> None:
        """Gives the device's memory back, as far as nobody else holds on to it."""
        on_gpu = self.model.device.type == "cuda"
        self.engine.close()
        del self.engine, self.model
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()


def make_subject(shape: ModelConfig, weights: str, config: EngineConfig, dtype: torch.dtype) -> Subject:
    model = graph_model(make_decoder(shape, weights, config, dtype), config)
    return Subject(make_engine(model, config, dtype), model)


def make_engine(model: TritonModel | DecoderModel, config: EngineConfig, dtype: torch.dtype) -> Engine:
    """As one that has loaded a checkpoint; with KV in fp8 where the model has scales for it."""
    kv_dtype = torch.float8_e4m3fn if getattr(model, "kv_scales", None) is not None else dtype
    loaded = LoadedModel(model.config, model, "random weights", dtype, kv_dtype, "as measured")
    return Engine(config, hash_block=hash_block, loaded=loaded)


def graph_model(decoder: DecoderModel, config: EngineConfig) -> TritonModel:
    """The decoder on the kernels, steps as graphs."""
    is_fp8, shape = config.kv_dtype == "fp8", (decoder.config.num_layers, 2)
    return Unprepared(
        decoder,
        _sizes(decoder, config),
        token_buckets=_token_buckets(decoder, config),
        recorder=make_recorder(decoder.device),
        kv_scales=torch.ones(shape, device=decoder.device) if is_fp8 else None,
    )


def launched_model(decoder: DecoderModel, config: EngineConfig) -> TritonModel:
    """The same buckets, made launch by launch: what graphs are compared with."""
    return TritonModel(decoder, _sizes(decoder, config), token_buckets=_token_buckets(decoder, config), recorder=None)


def _sizes(decoder: DecoderModel, config: EngineConfig) -> DecodeSizes:
    max_context = effective_max_context(config, decoder.config)
    return DecodeSizes(config.max_num_seqs, max_context, config.block_size, fewest_rows(decoder.device))


def _token_buckets(decoder: DecoderModel, config: EngineConfig) -> tuple[int, ...]:
    return token_buckets(config.max_num_batched_tokens, decoder.config.layer_weights)
