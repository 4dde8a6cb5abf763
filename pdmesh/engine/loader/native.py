"""From a checkpoint to the packed weights of the CPU kernels: quantized, fused and laid out once, at load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pdmesh.engine.backend_selection import Numerics
from pdmesh.engine.kernels.cpu.model import PackedLayer, PackedLinear, PackedWeights, gathered
from pdmesh.engine.loader import pack
from pdmesh.engine.loader.quantize import Int4Weight, Int8Weight, quantize_int4, quantize_int8
from pdmesh.engine.loader.source import WeightSource
from pdmesh.engine.loader.tensors import checked
from pdmesh.engine.models.rope import RotaryTable

Progress = Callable[[float, str], None]
NativeWeight = Tensor | Int8Weight | Int4Weight


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Packing is many short operations: the threads of each would wait for each other longer than they work, and very long on a
    machine that is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class NativeBuilder:
    """Takes tensors out of a checkpoint and makes of them what the kernels read. Raises ValueError as `checked` does."""

    def __init__(self, source: WeightSource, numerics: Numerics, max_context: int) -> None:
        self.source, self.numerics, self.max_context = source, numerics, max_context
        self.config = source.config

    def build(self, progress: Progress) -> PackedWeights:
        config = self.config
        layers = []
        for index in range(config.num_layers):
            progress(index / (config.num_layers + 1), f"packing layer {index + 1} of {config.num_layers}")
            layers.append(self._layer(f"model.layers.{index}"))
        progress(config.num_layers / (config.num_layers + 1), "packing embeddings")
        embedding = self._tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        head = embedding if config.tie_word_embeddings else self._tensor("lm_head.weight", *embedding.shape)
        # The head decides between neighbours: 4 bits would cost it more than they save.
        head_format = "int8" if self.numerics.weights == "int4" else self.numerics.weights
        rotary = RotaryTable(config.rope, self.max_context, dtype=torch.float32)
        half = rotary.cos.shape[1] // 2
        return PackedWeights(
            layers,
            norm=self._norm("model.norm", config.hidden_size),
            head=gathered([_packed(_quantized(head, head_format, 0), head_format, None)])[0],
            embedding=embedding.to(self.numerics.dtype, copy=True).contiguous(),
            cos=rotary.cos[:, :half].contiguous(),
            sin=rotary.sin[:, half:].contiguous(),
        )

    def _layer(self, prefix: str) -> PackedLayer:
        config = self.config
        query, kv, hidden = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.hidden_size
        inner, attention, mlp = config.intermediate_size, f"{prefix}.self_attn", f"{prefix}.mlp"
        rows = {"q": query, "k": kv, "v": kv}
        qkv = [self._weight(f"{attention}.{name}_proj", count, hidden) for name, count in rows.items()]
        qkv_bias = [self._tensor(f"{attention}.{n}_proj.bias", count) for n, count in rows.items()] if config.qkv_bias else []
        gate, up = (self._weight(f"{mlp}.{name}_proj", inner, hidden) for name in ("gate", "up"))
        gate_up_bias = [self._tensor(f"{mlp}.{name}_proj.bias", inner) for name in ("gate", "up")] if config.mlp_bias else []
        return PackedLayer(
            input_norm=self._norm(f"{prefix}.input_layernorm", hidden),
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm", hidden),
            query_norm=self._norm(f"{attention}.q_norm", config.head_dim) if config.qk_norm else None,
            key_norm=self._norm(f"{attention}.k_norm", config.head_dim) if config.qk_norm else None,
            qkv=self._packed(pack.concat_rows(qkv), torch.cat(qkv_bias) if qkv_bias else None),
            output=self._linear(f"{attention}.o_proj", hidden, query, has_bias=config.output_bias),
            gate_up=self._packed(
                pack.interleave_gate_up(gate, up), pack.interleave_gate_up(*gate_up_bias) if gate_up_bias else None
            ),
            down=self._linear(f"{mlp}.down_proj", hidden, inner, has_bias=config.mlp_bias),
        ).gathered()

    def _linear(self, name: str, rows: int, width: int, *, has_bias: bool) -> PackedLinear:
        bias = self._tensor(f"{name}.bias", rows) if has_bias else None
        return self._packed(self._weight(name, rows, width), bias)

    def _weight(self, name: str, rows: int, width: int) -> NativeWeight:
        """[rows, width] in the format of this engine."""
        name = f"{name}.weight"
        if self.numerics.weights == "int4":
            exact = self.source.get_int4(name, self.numerics.group)
            if exact is not None and exact.values.shape == (rows, width):
                return exact
        tensor = self._tensor(name, rows, width)
        try:
            return _quantized(tensor, self.numerics.weights, self.numerics.group)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def _packed(self, weight: NativeWeight, bias: Tensor | None) -> PackedLinear:
        return _packed(weight, self.numerics.weights, bias)

    def _norm(self, name: str, width: int) -> Tensor:
        return pack.pad_to_panels(self._tensor(f"{name}.weight", width).float()).contiguous()

    def _tensor(self, name: str, *shape: int) -> Tensor:
        return checked(self.source, name, shape)


def _quantized(weight: Tensor, form: str, group: int) -> NativeWeight:
    if form == "int8":
        return quantize_int8(weight)
    return quantize_int4(weight, group) if form == "int4" else weight


def _packed(weight: NativeWeight, form: str, bias: Tensor | None) -> PackedLinear:
    padded_bias = None if bias is None else pack.pad_to_panels(bias.float()).contiguous()
    if isinstance(weight, Int8Weight):
        packed, scales = pack.pack_int8(weight), pack.pad_to_panels(weight.scales)
        return PackedLinear(form, *_shape(weight.values.shape), 0, packed, scales, padded_bias)
    if isinstance(weight, Int4Weight):
        return PackedLinear(form, *_shape(weight.values.shape), weight.group, pack.pack_int4(weight), None, padded_bias)
    packed = pack.pack_float32(weight) if form == "float32" else pack.pack_bfloat16(weight)
    return PackedLinear(form, *_shape(weight.shape), 0, packed, None, padded_bias)


def _shape(shape: Sequence[int]) -> tuple[int, int]:
    rows, width = shape
    return rows, width
