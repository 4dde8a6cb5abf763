"""Weights in the order in which the native kernels read them: panels of 16 outputs, a vector lane for each.

    float32   [N/16][K  ][16]     float32
    bfloat16  [N/16][K/2][16][2]  bfloat16
    int8      [N/16][K/4][16][4]  uint8, value + 128; the scales stay apart, [N] float32
    int4      [N/16][K/g] of: [g/8][16][4] bytes, then 16 scales and 16 minimums in float16
              byte b of step s: value 8s+b of the group in the low half, value 8s+4+b in the high half

So every format is a transposition of 4-byte units, and a panel is one stream of memory. N is padded with rows of zeros to a
multiple of 16, K with zeros to a whole unit. Functions return the bytes as a flat uint8 tensor that begins at a multiple of
64 bytes (torch's CPU allocator aligns it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from pdmesh.engine.backend_selection import Numerics
from pdmesh.engine.kernels.cpu.model import (
    PackedExperts,
    PackedLatent,
    PackedLayer,
    PackedLinear,
    PackedMLP,
    PackedNorm,
    PackedRope,
    PackedWeights,
    gathered,
)
from pdmesh.engine.loader.quantize import Fp8Weight, Int4Weight, Int8Weight, quantize_int4, quantize_int8
from pdmesh.engine.loader.safetensors import WeightSource, checked, exact_weight
from pdmesh.engine.models.config import LATENT_EPS, ExpertsConfig, LatentConfig
from pdmesh.engine.models.layers import RotaryTable, temperatures
from pdmesh.engine.models.rope import RopeConfig

PANEL = 16
_ALIGNMENT = 64  # bytes: a cache line, and the widest vector
Weight = Tensor | Int8Weight | Int4Weight | Fp8Weight
_W = TypeVar("_W", bound=Weight)


def pack_float32(weight: Tensor) -> Tensor:
    """Pack weight [N, K] of any floating dtype -> N' * K * 4 bytes."""
    return _bytes(_panels(_units(weight.float())))


def pack_bfloat16(weight: Tensor) -> Tensor:
    """Pack weight [N, K] of any floating dtype, rounded to nearest even -> N' * K' * 2 bytes, K' even."""
    return _bytes(_panels(_units(weight.bfloat16())))


def pack_int8(weight: Int8Weight) -> Tensor:
    """Pack to N' * K' bytes, K' a multiple of 4, each its value + 128: the dot instruction multiplies unsigned weights with
    signed activations. The scales are not among them (see `pad_to_panels`)."""
    return _bytes(_panels(_units(weight.values))).bitwise_xor_(0x80)


def pack_int4(weight: Int4Weight) -> Tensor:
    """Pack to N' * K / 2 bytes of values and N' * K / group * 4 of scales and minimums."""
    halves = _units(weight.values).view(len(weight.values), -1, 2)
    values = _panels((halves[:, :, 1] << 4).bitwise_or_(halves[:, :, 0]))
    scales, minimums = (_bytes(_panels(tensor)) for tensor in (weight.scales, weight.minimums))
    shape = (len(values), weight.scales.shape[1], -1)
    return _bytes(torch.cat([part.view(shape) for part in (_bytes(values), scales, minimums)], dim=2))


def interleave_gate_up(gate: _W, up: _W) -> _W:
    """Interleave gate [I, K] and up [I, K] -> [2 * I', K]: gate rows 0..15, up rows 0..15, gate rows 16..31, and so on, so that
    one tile of the kernel holds a gate and its up. Each is padded with rows of zeros to I', a multiple of 16. Biases [I]
    likewise."""
    return _by_rows(_alternate_panels, (gate, up))


def concat_rows(parts: Sequence[_W]) -> _W:
    """Join maps of the same input: [N1, K], [N2, K], ... -> [N1 + N2 + ..., K]. A single part is passed on without a copy."""
    return parts[0] if len(parts) == 1 else _by_rows(_cat, parts)


def pad_to_panels(tensor: Tensor) -> Tensor:
    """Pad [N, ...] -> [N', ...] with zeros, N' a multiple of 16: biases and scales for kernels that read whole panels."""
    missing = -tensor.shape[0] % PANEL
    return tensor if missing == 0 else torch.cat((tensor, tensor.new_zeros((missing, *tensor.shape[1:]))))


def _by_rows(join: Callable[[list[Tensor]], Tensor], parts: Sequence[_W]) -> _W:
    """Apply `join` to whatever has a row for each output. Raises ValueError for parts that are not quantized alike."""
    formats = [_format(part) for part in parts]
    if len(set(formats)) > 1:
        raise ValueError(f"quantization: parts of one map are {', '.join(formats)}; quantize them alike")
    joined = [join(list(column)) for column in zip(*map(_row_tensors, parts), strict=True)]
    first: Weight = parts[0]
    if isinstance(first, Int8Weight | Fp8Weight):
        return cast(_W, type(first)(*joined))
    return cast(_W, Int4Weight(joined[0], joined[1], joined[2], first.group) if isinstance(first, Int4Weight) else joined[0])


def _format(weight: Weight) -> str:
    if isinstance(weight, Tensor):
        return str(weight.dtype)
    if isinstance(weight, Int4Weight):
        return f"int4 in groups of {weight.group}"
    return "int8" if isinstance(weight, Int8Weight) else "fp8"


def _row_tensors(weight: Weight) -> tuple[Tensor, ...]:
    if isinstance(weight, Tensor):
        return (weight,)
    scaled = (weight.values, weight.scales)
    return (*scaled, weight.minimums) if isinstance(weight, Int4Weight) else scaled


def _cat(tensors: list[Tensor]) -> Tensor:
    """Concatenate fp8 as bytes: torch cannot concatenate it on every device."""
    first = tensors[0]
    if first.dtype != torch.float8_e4m3fn:
        return torch.cat(tensors)
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(first.dtype)


def _alternate_panels(tensors: list[Tensor]) -> Tensor:
    panels = [_split_panels(tensor) for tensor in tensors]
    return torch.stack(panels, dim=1).flatten(0, 2)


def _units(matrix: Tensor) -> Tensor:
    """[N, K] -> [N, units] int32: a row's bytes, padded with zeros, in units of 4."""
    per_unit = 4 // matrix.itemsize
    missing = -matrix.shape[1] % per_unit
    padded = F.pad(matrix, (0, missing)) if missing else matrix.contiguous()
    # A tensor mapped from a file may begin in the middle of a unit.
    return (padded.clone() if padded.storage_offset() % per_unit else padded).view(torch.int32)


def _panels(rows: Tensor) -> Tensor:
    """[N, U] -> [N / 16, U, 16], N padded. Always a copy: `contiguous` would return a single column unchanged."""
    return _split_panels(rows).transpose(1, 2).clone(memory_format=torch.contiguous_format)


def _split_panels(tensor: Tensor) -> Tensor:
    """[N, ...] -> [N / 16, 16, ...], N padded."""
    padded = pad_to_panels(tensor)
    return padded.reshape(len(padded) // PANEL, PANEL, *padded.shape[1:])


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.view(-1).view(torch.uint8)
    assert flat.data_ptr() % _ALIGNMENT == 0, "torch's CPU allocator no longer aligns to 64 bytes"
    return flat


# From a checkpoint to the packed weights of the CPU kernels: quantized, fused and laid out once, at load


Progress = Callable[[float, str], None]
NativeWeight = Tensor | Int8Weight | Int4Weight


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Use one torch thread: packing is many short operations, whose threads would wait for each other longer than they work, and
    very long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class NativeBuilder:
    """Take tensors out of a checkpoint and pack them for the kernels. Raises ValueError like `checked`."""

    def __init__(self, source: WeightSource, numerics: Numerics, max_context: int) -> None:
        self.source, self.numerics, self.max_context = source, numerics, max_context
        self.config = source.config

    def build(self, progress: Progress) -> PackedWeights:
        return self.with_tables(self.pack(progress))

    def pack(self, progress: Progress) -> PackedWeights:
        """Return the weights without what follows from the configuration: see `with_tables`. None of them keeps the checkpoint
        mapped."""
        config = self.config
        layers = []
        for index in range(config.num_layers):
            progress(index / (config.num_layers + 1), f"packing layer {index + 1} of {config.num_layers}")
            layers.append(self._layer(index))
        progress(config.num_layers / (config.num_layers + 1), "packing embeddings")
        embedding = self._tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        return PackedWeights(
            layers,
            norm=self._norm("model.norm"),
            head=self._head(embedding),
            embedding=embedding.to(self.numerics.dtype, copy=True).contiguous(),
            # As transformers does it: the factor is rounded to the dtype of the embeddings.
            embedding_multiplier=float(torch.tensor(config.embedding_multiplier, dtype=self.numerics.dtype)),
            positions=self._positions() if config.learned_positions else None,
            ropes=(),
            max_context=0,
            embedding_norm=self._norm("model.embed_norm") if config.embedding_norm else None,
        )

    def with_tables(self, weights: PackedWeights) -> PackedWeights:
        """Return the weights with the tables of rotary embeddings and temperatures for this context."""
        config = self.config
        ropes = (rope for rope in (config.rope, config.local_rope) if rope is not None and rope.rotary_dim)
        return replace(
            weights,
            ropes=tuple(map(self._rope, ropes)),
            max_context=self.max_context,
            temperatures=temperatures(config.temperature, self.max_context) if config.temperature else None,
        )

    def _head(self, embedding: Tensor) -> PackedLinear:
        weight = embedding if self.config.tie_word_embeddings else self._tensor("lm_head.weight", *embedding.shape)
        bias = self._tensor("lm_head.bias", len(embedding)) if self.config.head_bias else None
        # The head ranks close tokens: 4 bits would cost it more accuracy than they save.
        form = "int8" if self.numerics.weights == "int4" else self.numerics.weights
        return gathered([_packed(_quantized(weight, form, 0), form, bias)])[0]

    def _positions(self) -> Tensor:
        """Return the learned positions in the dtype of the embeddings, widened."""
        table = self._tensor("model.embed_positions.weight", self.config.learned_positions, self.config.hidden_size)
        return _own_float(table.to(self.numerics.dtype))

    def _rope(self, rope: RopeConfig) -> PackedRope:
        table = RotaryTable(rope, self.max_context, dtype=torch.float32)
        half = table.cos.shape[1] // 2
        return PackedRope(table.cos[:, :half].contiguous(), table.sin[:, half:].contiguous())

    def _layer(self, index: int) -> PackedLayer:
        config, prefix = self.config, f"model.layers.{index}"
        attention = f"{prefix}.self_attn"
        values = config.num_heads * (config.latent.value_dim if config.latent else config.head_dim)
        has_mlp_norm = config.pre_norm and config.mlp_norm
        is_local = config.local_rope is not None and config.windows[index] is not None
        return PackedLayer(
            input_norm=self._norm(f"{prefix}.input_layernorm") if config.pre_norm else None,
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm") if has_mlp_norm else None,
            query_norm=self._head_norm(f"{attention}.q_norm", config.num_heads) if config.has_qk_norm(index) else None,
            key_norm=self._head_norm(f"{attention}.k_norm", config.num_kv_heads) if config.has_qk_norm(index) else None,
            qkv=self._latent_input(attention, config.latent) if config.latent else self._qkv(attention),
            output=self._linear(f"{attention}.o_proj", config.hidden_size, values, has_bias=config.output_bias),
            mlp=self._experts(f"{prefix}.mlp", config.experts)
            if config.has_experts(index) and config.experts
            else self._mlp(f"{prefix}.mlp", config.intermediate_size, has_bias=config.mlp_bias),
            post_attention_norm=self._norm(f"{prefix}.post_self_attn_norm") if config.post_norm else None,
            post_mlp_norm=self._norm(f"{prefix}.post_mlp_norm") if config.post_norm else None,
            sinks=_own_float(self._tensor(f"{attention}.sinks", config.num_heads)) if config.sinks else None,
            latent=self._latent(attention, config.latent) if config.latent else None,
            rope=(1 if is_local else 0) if config.is_rotated(index) else None,
        ).gathered()

    def _qkv(self, attention: str) -> PackedLinear:
        config = self.config
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        rows = {"q": query, "k": kv, "v": kv}
        weights = [self._weight(f"{attention}.{name}_proj", count, config.hidden_size) for name, count in rows.items()]
        biases = [self._tensor(f"{attention}.{n}_proj.bias", count) for n, count in rows.items()] if config.qkv_bias else []
        return self._packed(concat_rows(weights), torch.cat(biases) if biases else None)

    def _latent_input(self, attention: str, latent: LatentConfig) -> PackedLinear:
        """Return the map of what reads the layer's input: to the query's bottleneck, or the queries, and to the latent."""
        config = self.config
        heads = config.num_heads * (latent.nope_dim + latent.rope_dim)
        query = (f"{attention}.q_a_proj", latent.query_rank) if latent.query_rank else (f"{attention}.q_proj", heads)
        parts = [query, (f"{attention}.kv_a_proj", latent.width)]
        bias = None
        if config.qkv_bias:  # queries without a bottleneck have none
            own = self._tensor(f"{query[0]}.bias", query[1]) if latent.query_rank else torch.zeros(query[1])
            bias = torch.cat((own, self._tensor(f"{parts[1][0]}.bias", latent.width)))
        return self._packed(concat_rows([self._weight(name, rows, config.hidden_size) for name, rows in parts]), bias)

    def _latent(self, attention: str, latent: LatentConfig) -> PackedLatent:
        heads, rank, nope = self.config.num_heads, latent.kv_rank, latent.nope_dim
        expanded = self._tensor(f"{attention}.kv_b_proj.weight", heads * (nope + latent.value_dim), rank)
        by_head = expanded.view(heads, nope + latent.value_dim, rank)
        keys, values = by_head[:, :nope], by_head[:, nope:]
        has_bottleneck, queries = latent.query_rank > 0, heads * (nope + latent.rope_dim)
        name = f"{attention}.q_b_proj"
        return PackedLatent(
            latent,
            query_norm=self._norm(f"{attention}.q_a_norm", latent.query_rank, LATENT_EPS) if has_bottleneck else None,
            queries=self._linear(name, queries, latent.query_rank, has_bias=False) if has_bottleneck else None,
            latent_norm=self._norm(f"{attention}.kv_a_norm", rank, LATENT_EPS),
            key_maps=tuple(self._head_map(key.t().contiguous()) for key in keys),
            value_maps=tuple(self._head_map(value.contiguous()) for value in values),
        )

    def _head_map(self, weight: Tensor) -> PackedLinear:
        """Return one head's part of a map. What has 4 bits elsewhere has 8 here: groups may not divide a head's width."""
        form = "int8" if self.numerics.weights == "int4" else self.numerics.weights
        return _packed(_quantized(weight, form, 0), form, None)

    def _mlp(self, prefix: str, inner: int, *, has_bias: bool) -> PackedMLP:
        hidden = self.config.hidden_size
        down = self._linear(f"{prefix}.down_proj", hidden, inner, has_bias=has_bias)
        if not self.config.gated_mlp:
            return PackedMLP(self._linear(f"{prefix}.up_proj", inner, hidden, has_bias=has_bias), down)
        gate, up = (self._weight(f"{prefix}.{name}_proj", inner, hidden) for name in ("gate", "up"))
        biases = [self._tensor(f"{prefix}.{name}_proj.bias", inner) for name in ("gate", "up")] if has_bias else []
        return PackedMLP(self._packed(interleave_gate_up(gate, up), interleave_gate_up(*biases) if biases else None), down)

    def _experts(self, prefix: str, experts: ExpertsConfig) -> PackedExperts:
        count, inner, shared = experts.num_experts, experts.intermediate_size, experts.shared_intermediate_size
        correction = _own_float(self._tensor(f"{prefix}.router.correction", count)) if experts.has_correction else None
        return PackedExperts(
            experts,
            router=self._router(prefix, experts),
            correction=correction,
            experts=tuple(self._mlp(f"{prefix}.experts.{number}", inner, has_bias=experts.bias) for number in range(count)),
            shared=self._mlp(f"{prefix}.shared_expert", shared, has_bias=self.config.mlp_bias) if shared else None,
        )

    def _router(self, prefix: str, experts: ExpertsConfig) -> PackedLinear:
        """Return the map to the experts' scores and, behind them, to the shared expert's gate. It stays in float32."""
        count, hidden = experts.num_experts, self.config.hidden_size
        rows = [self._tensor(f"{prefix}.router.weight", count, hidden).float()]
        bias = self._tensor(f"{prefix}.router.bias", count).float() if experts.router_bias else None
        if experts.shared_gate:
            rows.append(self._tensor(f"{prefix}.shared_gate.weight", 1, hidden).float())
            bias = None if bias is None else torch.cat((bias, bias.new_zeros(1)))
        return gathered([_packed(concat_rows(rows), "float32", bias)])[0]

    def _linear(self, name: str, rows: int, width: int, *, has_bias: bool) -> PackedLinear:
        bias = self._tensor(f"{name}.bias", rows) if has_bias else None
        return self._packed(self._weight(name, rows, width), bias)

    def _weight(self, name: str, rows: int, width: int) -> NativeWeight:
        """Return [rows, width] in the format of this engine."""
        name = f"{name}.weight"
        exact = exact_weight(self.source, name, self.numerics.weights, self.numerics.group)
        if exact is not None and exact.values.shape == (rows, width):
            return exact
        tensor = self._tensor(name, rows, width)
        try:
            return _quantized(tensor, self.numerics.weights, self.numerics.group)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def _packed(self, weight: NativeWeight, bias: Tensor | None) -> PackedLinear:
        return _packed(weight, self.numerics.weights, bias)

    def _norm(self, name: str, width: int = 0, eps: float = 0.0) -> PackedNorm:
        config, width = self.config, width or self.config.hidden_size
        bias = self._wide(f"{name}.bias", width) if config.norm_bias else None
        return PackedNorm(self._wide(f"{name}.weight", width), bias, eps or config.norm_eps, config.norm)

    def _head_norm(self, name: str, num_heads: int) -> PackedNorm:
        config, dim = self.config, self.config.head_dim
        shape = {"head": (dim,), "heads": (num_heads, dim), "all": (num_heads * dim,)}[config.qk_norm]
        bias = self._wide(f"{name}.bias", *shape) if config.qk_norm_bias else None
        return PackedNorm(self._wide(f"{name}.weight", *shape), bias, config.norm_eps, config.norm)

    def _wide(self, name: str, *shape: int) -> Tensor:
        """Return a vector (or one for each head) as float32, padded to whole panels."""
        return _own_float(pad_to_panels(self._tensor(name, *shape).flatten()))

    def _tensor(self, name: str, *shape: int) -> Tensor:
        return checked(self.source, name, shape)


def _quantized(weight: Tensor, form: str, group: int) -> NativeWeight:
    if form == "int8":
        return quantize_int8(weight)
    return quantize_int4(weight, group) if form == "int4" else weight


def _packed(weight: NativeWeight, form: str, bias: Tensor | None) -> PackedLinear:
    padded_bias = None if bias is None else _own_float(pad_to_panels(bias))
    if isinstance(weight, Int8Weight):
        packed, scales = pack_int8(weight), _own_float(pad_to_panels(weight.scales))
        return PackedLinear(form, *_shape(weight.values.shape), 0, packed, scales, padded_bias)
    if isinstance(weight, Int4Weight):
        return PackedLinear(form, *_shape(weight.values.shape), weight.group, pack_int4(weight), None, padded_bias)
    packed = pack_float32(weight) if form == "float32" else pack_bfloat16(weight)
    return PackedLinear(form, *_shape(weight.shape), 0, packed, None, padded_bias)


def _own_float(tensor: Tensor) -> Tensor:
    """Return a float32 copy also of what is float32: a view would keep its checkpoint mapped."""
    return tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _shape(shape: Sequence[int]) -> tuple[int, int]:
    rows, width = shape
    return rows, width
