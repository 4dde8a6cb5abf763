"""What the native backend computes, in plain torch and float64: exact but for the roundings that its formats ask for.

    weights     float32 as they are, bfloat16 rounded, int8 and int4 quantized (the head is int8 where the others are int4)
    rows        before each product, in the partner format of its weights: float32, bfloat16 or int8 (int4: for each group)
    attention   keys and values as the cache has them; queries, and the weights of a chunk of keys, float32 beside a cache in
                float32, bfloat16 beside one in bfloat16 and on matrix tiles, int16 (a scale for each row) beside one in int8

Sums have another order here, so that now and then a number falls on the other side of a rounding: results are close, much closer
than to those of float32, not equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pdmesh.engine.backend_selection import Numerics
from pdmesh.engine.kernels.cpu import isa
from pdmesh.engine.loader.builder import open_checkpoint
from pdmesh.engine.loader.quantize import dequantize_int4, dequantize_int8, quantize_int4, quantize_int8
from pdmesh.engine.loader.safetensors import MissingTensor, WeightSource
from pdmesh.engine.models.layers import RotaryTable, rotate
from tests.engine.kernels.cpu.native_models import prompt
from tests.engine.paged_loop import PagedLoop

OUTLIERS = 4  # units of a row that may exceed the range of the others: kOutliers of gemm.h
UNIT = 4
TILE_STEP = 32  # numbers of a row that a matrix tile takes
CHUNK = 128
LENGTH = 290  # of the prompts that it is compared with: three chunks of keys


class Oracle:
    """One sequence at a time, without a cache: `logits` of all tokens."""

    def __init__(self, path: Path, numerics: Numerics) -> None:
        self.source, _ = open_checkpoint(path)
        self.config, self.numerics = self.source.config, numerics
        self.rotary = RotaryTable(self.config.rope, self.config.max_context, dtype=torch.float32)

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """[len(token_ids), vocab] float64."""
        embedding = self.source.get("model.embed_tokens.weight")
        hidden = embedding.to(self.numerics.dtype)[list(token_ids)].double()
        for index, window in enumerate(self.config.windows):
            layer = f"model.layers.{index}"
            hidden = hidden + self._attend(f"{layer}.self_attn", self._norm(f"{layer}.input_layernorm", hidden), window)
            normed = self._norm(f"{layer}.post_attention_layernorm", hidden)
            gate, up = (self._linear(f"{layer}.mlp.{name}_proj", normed) for name in ("gate", "up"))
            hidden = hidden + self._linear(f"{layer}.mlp.down_proj", torch.nn.functional.silu(gate) * up)
        head = "lm_head.weight" if self._has("lm_head.weight") else "model.embed_tokens.weight"
        form = "int8" if self.numerics.weights == "int4" else self.numerics.weights
        return product(self._norm("model.norm", hidden), self.source.get(head), form)

    def _attend(self, name: str, normed: Tensor, window: int | None) -> Tensor:
        """[T, hidden_size] -> what is added to it."""
        config, num_tokens = self.config, len(normed)
        query, key, value = (
            self._linear(f"{name}.{part}_proj", normed).view(num_tokens, -1, config.head_dim) for part in ("q", "k", "v")
        )
        if config.qk_norm:
            query, key = self._norm(f"{name}.q_norm", query), self._norm(f"{name}.k_norm", key)
        angles = [angle.double() for angle in self.rotary.at(torch.arange(num_tokens))]
        query = rotate(query, *angles) * (config.head_dim**-0.5 * math.log2(math.e))
        key = rotate(key, *angles)
        kv_dtype = self.numerics.kv_dtype
        heads = [
            attention(query[:, head], key[:, head // config.num_groups], value[:, head // config.num_groups], window, kv_dtype)
            for head in range(config.num_heads)
        ]
        return self._linear(f"{name}.o_proj", torch.cat(heads, dim=1))

    def _linear(self, name: str, rows: Tensor) -> Tensor:
        weight = self.source.get(f"{name}.weight")
        result = product(rows, weight, self.numerics.weights, self.numerics.group, exact=_int4(self.source, name, self.numerics))
        return result + self.source.get(f"{name}.bias").double() if self._has(f"{name}.bias") else result

    def _has(self, name: str) -> bool:
        """Return whether the checkpoint has the tensor, by whatever name it stores it."""
        try:
            self.source.get(name)
        except MissingTensor:
            return False
        return True

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        scale = (rows.square().mean(-1, keepdim=True) + self.config.norm_eps).rsqrt()
        return rows * scale * self.source.get(f"{name}.weight").double()


def product(rows: Tensor, weight: Tensor, form: str, group: int = 0, exact: Tensor | None = None) -> Tensor:
    """rows [T, K] float64, weight [N, K] -> [T, N] float64. `exact`: the int4 weights, where the checkpoint itself has them."""
    if form == "int8":
        return rounded_row(rows) @ dequantize_int8(quantize_int8(weight)).double().T
    if form == "int4":
        restored = dequantize_int4(quantize_int4(weight, group)) if exact is None else exact
        return rounded_groups(rows, group) @ restored.double().T
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    return rows.to(dtype).double() @ weight.to(dtype).double().T


def _int4(source: WeightSource, name: str, numerics: Numerics) -> Tensor | None:
    weight = source.get_int4(f"{name}.weight", numerics.group) if numerics.weights == "int4" else None
    return None if weight is None else dequantize_int4(weight)


def rounded_groups(rows: Tensor, group: int) -> Tensor:
    """Symmetric int8 for each group of a row."""
    groups = rows.view(len(rows), -1, group)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / scale.clamp_min(1e-300)).round() * scale).view(rows.shape)


def rounded_row(rows: Tensor) -> Tensor:
    """Symmetric int8 for a whole row, cut to the range of all but OUTLIERS units of 4; what was cut off in an int8 of its own."""
    units = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 64)).view(len(rows), -1, UNIT)
    limit = units.abs().amax(-1).sort(dim=1, descending=True).values[:, OUTLIERS, None]
    inside = torch.maximum(torch.minimum(rows, limit), -limit)
    return _rounded(inside, limit) + _rounded(rows - inside, (rows - inside).abs().amax(-1, keepdim=True))


def _rounded(rows: Tensor, limit: Tensor) -> Tensor:
    scale = limit / 127
    return (rows / scale.clamp_min(1e-300)).round() * scale


def attention(query: Tensor, key: Tensor, value: Tensor, window: int | None, kv_dtype: torch.dtype) -> Tensor:
    """Of one head: query, key, value [T, head_dim] float64, queries scaled so that weights are powers of 2."""
    rounded_to = _words if kv_dtype == torch.int8 and not _on_tiles(query.shape[1]) else _plain(kv_dtype)
    (key, key_scale), (value, value_scale) = (_stored(numbers, kv_dtype) for numbers in (key, value))
    scores = rounded_to(query) @ key.T * key_scale
    positions = torch.arange(len(query))
    distance = positions[:, None] - positions
    scores = scores.masked_fill((distance < 0) | (distance >= (window or len(query))), -math.inf)
    peak = scores.amax(1, keepdim=True)
    total, result = torch.zeros(len(query), 1, dtype=torch.float64), torch.zeros_like(query)
    for start in range(0, len(query), CHUNK):
        part = slice(start, start + CHUNK)
        chunk_peak = scores[:, part].amax(1, keepdim=True).clamp_min(-1e30)
        weights = torch.exp2(scores[:, part] - chunk_peak)
        factor = torch.exp2(chunk_peak - peak)
        total += weights.sum(1, keepdim=True) * factor
        result += rounded_to(weights * value_scale[part]) @ value[part] * factor
    return result / total


def _words(rows: Tensor) -> Tensor:
    """Symmetric int16 for each row."""
    scale = rows.abs().amax(1, keepdim=True) / 32767
    return (rows / scale.clamp_min(1e-300)).round() * scale


def _plain(kv_dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    form = torch.float32 if kv_dtype == torch.float32 else torch.bfloat16
    return lambda rows: rows.to(form).double()


def _on_tiles(head_dim: int) -> bool:
    return isa.detect().name == "amx" and head_dim % TILE_STEP == 0


def _stored(numbers: Tensor, kv_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys or values as the cache has them: numbers [T, head_dim] and a factor for each token [T], both float64."""
    if kv_dtype != torch.int8:
        return numbers.to(kv_dtype).double(), torch.ones(len(numbers), dtype=torch.float64)
    scale = numbers.abs().amax(1) / 127
    return (numbers / scale[:, None]).round(), scale


def errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Relative, for each token."""
    norm = torch.linalg.vector_norm
    relative: Tensor = norm(actual.double() - expected.double(), dim=1) / norm(expected.double(), dim=1)
    return relative


def assert_rounds_as(oracle: Oracle, loop: PagedLoop, plain: Tensor) -> None:
    """`plain`: logits in float32. A number that falls on the other side of a rounding changes all that depends on it: some tokens
    have none, most are far closer than the whole of the rounding."""
    logits = loop.logits(prompt(LENGTH), 100)
    off, rounding = errors(logits, oracle.logits(prompt(LENGTH))), errors(logits, plain)
    assert off.min() < 1e-5
    assert off.norm() < 0.5 * rounding.norm()
