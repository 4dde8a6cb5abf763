# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Products of each expert's tokens with its maps, in one launch for all experts (grouped GEMM), and the sum of a token's experts.

    order     | expert 0: 5 places | 1 | 2: 18 places     |              tiles of BLOCK_M places of one expert each
    tiles       0                    -   1           2

A program owns 64 outputs and a tile of places. Which tile it has, it finds in `starts` on the device; the grid is as large as
any division of the places among experts needs, and programs behind the last tile end at once. So a graph serves every routing.

A program's product is [64 outputs, inputs] x [inputs, BLOCK_M], as in linear/weight_product.py, with the same words; sums are
float32, inputs in order, never split. So a row's bits depend on the row and its expert, and on which of two tiles it is in, which
the step's number of tokens decides (`Tile.of`). gate_up_kernel multiplies gate and up and writes what the second product reads;
down_kernel multiplies by the scores, and writes each place by itself; sum_kernel adds a token's places in the order of its
scores, in float32. Roundings are those of pdmesh.engine.models.experts, but that the sum is rounded once.

Limits: a step reads the weights of each expert that any of its tokens takes, once for BLOCK_M of its tokens; besides 2 K T
(2 I + hidden) activations. Counted, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdmesh.engine.kernels.triton.experts.routing import Routed
from pdmesh.engine.kernels.triton.experts.weights import ExpertWeights
from pdmesh.engine.kernels.triton.launching import settle_keys
from pdmesh.engine.kernels.triton.linear.weight_product import PRODUCT_ROWS_MAX
from pdmesh.engine.kernels.triton.linear.weight_words import TILE_ROWS, group_words, in_order, numbers, scale_and_minimum
from pdmesh.engine.kernels.triton.norms import gated

_BLOCK = 1024  # of the sum's columns


@triton.jit
def _tile_of(program, starts, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the expert of a tile (EXPERTS or more: there is no such tile), its first place in the order, and its last."""
    expert = tl.arange(0, EXPERTS_PAD)
    first = tl.load(starts + expert, mask=expert < EXPERTS, other=0)
    end = tl.load(starts + expert + 1, mask=expert < EXPERTS, other=0)
    tiles = (end - first + BLOCK_M - 1) // BLOCK_M
    behind = tl.cumsum(tiles, 0)
    own = tl.sum((behind <= program).to(tl.int32), 0)
    begin = first + (program - behind + tiles) * BLOCK_M
    return own, tl.sum(tl.where(expert == own, begin, 0), 0), tl.sum(tl.where(expert == own, end, 0), 0)


@triton.jit
def _product(
    rows, alive, weights, scales, expert, row_tile, first_output, num_row_tiles, num_tiles, N, K,
    BLOCK_M: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return 64 outputs of the places whose inputs begin at `rows` [BLOCK_M], float32 [64, BLOCK_M]: outputs of a row tile of
    words, or from `first_output` on."""
    expert = expert.to(tl.int64)
    total = tl.zeros([64, BLOCK_M], tl.float32)
    r = tl.arange(0, 64)
    n = first_output + r
    if FORMAT == "plain":
        own = weights + (expert * N + n)[:, None] * K
        for first in range(0, K, COLUMNS):
            k = first + tl.arange(0, COLUMNS)
            w = tl.load(own + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
            here = tl.load(rows[None, :] + k[:, None], mask=alive[None, :] & (k < K)[:, None], other=0.0)
            total = tl.dot(w, here, total, input_precision="ieee")
    else:
        INT4: tl.constexpr = FORMAT == "int4"
        INPUTS: tl.constexpr = GROUP if INT4 else 128
        WIDE: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth == 16
        from_tile = (expert * num_row_tiles + row_tile) * num_tiles
        for chunk in range(num_tiles * (64 if INT4 else 32) // INPUTS):
            k = chunk * INPUTS + tl.arange(0, INPUTS)
            here = tl.load(rows[None, :] + k[:, None], mask=alive[None, :] & (k < K)[:, None], other=0.0)
            if INT4:
                word = tl.load(weights + from_tile * 512 + group_words(chunk, GROUP)[None, None, :])
                scale, minimum = scale_and_minimum(tl.load(scales + (from_tile * (64 // GROUP) + chunk) * 64 + r))
                w = numbers(word, FORMAT, 1, 1, WIDE) * scale[:, None] + minimum[:, None]
            else:
                tile = (from_tile + chunk * 4 + tl.arange(0, 4))[None, :, None]
                word = tl.load(weights + tile * 512 + tl.arange(0, 512)[None, None, :])
                w = numbers(word, FORMAT, 4, 1, WIDE)
            total = tl.dot(w.to(here.dtype), in_order(here, WIDE), total, input_precision="ieee")
        if not INT4:
            total = total * tl.load(scales + expert * N + n, mask=n < N, other=0.0)[:, None]
    return total


@triton.jit
def _rounded(total, bias, expert, first_output, N, dtype: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return a product as the map's result is rounded, in float32."""
    if HAS_BIAS:
        n = first_output + tl.arange(0, 64)
        total += tl.load(bias + expert.to(tl.int64) * N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    return total.to(dtype).to(tl.float32)


@triton.jit
def gate_up_kernel(
    x, order, starts, weights, scales, bias, out, limit, stride_x, inner, K, num_row_tiles, num_tiles,
    TOP_K: tl.constexpr, KIND: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Program (64 outputs of gate and of up, tile): x [T, K] of tokens by their places -> out [M, inner], in the order."""
    row_tile = tl.program_id(0)
    expert, first, end = _tile_of(tl.program_id(1), starts, EXPERTS, EXPERTS_PAD, BLOCK_M)
    if expert >= EXPERTS:
        return
    m = first + tl.arange(0, BLOCK_M)
    alive = m < end
    token = tl.load(order + m, mask=alive, other=0) // TOP_K
    rows = x + token.to(tl.int64) * stride_x
    dtype = out.dtype.element_ty
    at = row_tile * 64
    gate = _product(
        rows, alive, weights, scales, expert, row_tile, at, num_row_tiles, num_tiles, 2 * inner, K,
        BLOCK_M, FORMAT, GROUP, COLUMNS,
    )  # fmt: skip
    up = _product(
        rows, alive, weights, scales, expert, row_tile + num_row_tiles // 2, inner + at, num_row_tiles, num_tiles, 2 * inner, K,
        BLOCK_M, FORMAT, GROUP, COLUMNS,
    )  # fmt: skip
    gate = _rounded(gate, bias, expert, at, 2 * inner, dtype, HAS_BIAS)
    up = _rounded(up, bias, expert, inner + at, 2 * inner, dtype, HAS_BIAS)
    n = at + tl.arange(0, 64)
    place = m.to(tl.int64)[None, :] * inner + n[:, None]
    tl.store(out + place, gated(gate, up, limit, dtype, KIND), mask=alive[None, :] & (n < inner)[:, None])


@triton.jit
def down_kernel(
    x, order, starts, scores, weights, scales, bias, out, N, K, num_row_tiles, num_tiles,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Program (64 outputs, tile): x [M, K] in the order -> out [M, N] by places, times their scores."""
    row_tile = tl.program_id(0)
    expert, first, end = _tile_of(tl.program_id(1), starts, EXPERTS, EXPERTS_PAD, BLOCK_M)
    if expert >= EXPERTS:
        return
    m = first + tl.arange(0, BLOCK_M)
    alive = m < end
    choice = tl.load(order + m, mask=alive, other=0)
    dtype = out.dtype.element_ty
    total = _product(
        x + m.to(tl.int64) * K, alive, weights, scales, expert, row_tile, row_tile * 64, num_row_tiles, num_tiles, N, K,
        BLOCK_M, FORMAT, GROUP, COLUMNS,
    )  # fmt: skip
    total = _rounded(total, bias, expert, row_tile * 64, N, dtype, HAS_BIAS)
    total = total * tl.load(scores + choice, mask=alive, other=0.0)[None, :]
    n = row_tile * 64 + tl.arange(0, 64)
    place = choice.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out + place, total.to(dtype), mask=alive[None, :] & (n < N)[:, None])


@triton.jit
def sum_kernel(
    parts, chosen, shared, logits, out, width, stride_shared, stride_logits,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (token, columns): parts [M, width] of its places, and the shared expert's [T, width], times its gate: the logit
    behind those of the experts."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    dtype = out.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for index in tl.static_range(TOP_K):
        place = token * TOP_K + index
        is_there = tl.load(chosen + place) < EXPERTS
        total += tl.load(parts + place * width + at, mask=inside & is_there, other=0.0).to(tl.float32)
    result = total.to(dtype)
    if HAS_SHARED:
        own = tl.load(shared + token * stride_shared + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_GATE:
            share = tl.div_rn(1.0, 1.0 + tl.exp(-tl.load(logits + token * stride_logits + EXPERTS)))
            own = (share.to(dtype).to(tl.float32) * own).to(dtype).to(tl.float32)
        result = (result.to(tl.float32) + own).to(dtype)
    tl.store(out + token * width + at, result, mask=inside)


settle_keys(globals())


@dataclass(frozen=True)
class Tile:
    """Describe the tiles of both products: places, columns of plain weights at a time, stages of the pipeline."""

    rows: int
    columns: int
    stages: int

    @staticmethod
    def of(num_tokens: int, dtype: torch.dtype, bits: int) -> Tile:
        """Return few rows for few tokens, as a token more costs a tile no time, and more for many, which then share its weights.
        float32 has no matrix units that are exact: each product is written out."""
        if dtype == torch.float32:
            return Tile(16, 32, 1)
        if num_tokens <= PRODUCT_ROWS_MAX:
            return Tile(16, 64, 3)
        return Tile(32 if bits else 64, 64, 3)

    def shared_bound(self, bits: int) -> int:
        """Return bytes of shared memory, no less than the compiler takes, of 16 bits an activation."""
        if not bits:
            return self.stages * (TILE_ROWS + self.rows) * self.columns * 2
        inputs = 64 if bits == 4 else 128
        return self.stages * (inputs * self.rows * 2 + TILE_ROWS * inputs * bits // 8 + TILE_ROWS * 4)

    def num_tiles(self, num_places: int, num_experts: int) -> int:
        """Return the most tiles that any division among experts has."""
        return min(num_places, num_places // self.rows + num_experts)


def gated_up(x: Tensor, routed: Routed, weights: ExpertWeights, activation: str, limit: float) -> Tensor:
    """Multiply x [T, hidden] by gate and up of its experts -> [M, inner], in the order of `routed`."""
    num_places, inner = routed.order.numel(), weights.num_outputs // 2
    _check(x, weights)
    out = x.new_empty((num_places, inner))
    tile = Tile.of(len(x), x.dtype, weights.bits)
    if num_places:
        gate_up_kernel[_grid(tile, routed, triton.cdiv(inner, TILE_ROWS))](
            x, routed.order, routed.starts, weights.values, weights.scales, _bias(weights), out, limit,
            x.stride(0), inner, weights.num_inputs, weights.num_row_tiles, weights.num_tiles,
            TOP_K=routed.chosen.shape[1], KIND=activation, **_switches(tile, routed, weights),
        )  # fmt: skip
    return out


def weighted_down(x: Tensor, num_tokens: int, routed: Routed, weights: ExpertWeights) -> Tensor:
    """Multiply x [M, inner], in the order of `routed`, by its experts' down and by their scores -> [M, hidden], by places."""
    _check(x, weights)
    out = x.new_empty((len(x), weights.num_outputs))
    tile = Tile.of(num_tokens, x.dtype, weights.bits)
    if len(x):
        down_kernel[_grid(tile, routed, triton.cdiv(weights.num_outputs, TILE_ROWS))](
            x, routed.order, routed.starts, routed.scores, weights.values, weights.scales, _bias(weights), out,
            weights.num_outputs, weights.num_inputs, weights.num_row_tiles, weights.num_tiles, **_switches(tile, routed, weights),
        )  # fmt: skip
    return out


def summed(parts: Tensor, routed: Routed, shared: Tensor | None) -> Tensor:
    """Add parts [M, hidden] of each token, and the shared expert's result [T, hidden] -> [T, hidden]. The shared expert has a
    gate where there is a logit more than experts."""
    num_tokens, width = len(routed.chosen), parts.shape[1]
    out, num_experts = parts.new_empty((num_tokens, width)), len(routed.starts) - 1
    other = parts if shared is None else shared
    if num_tokens:
        sum_kernel[(num_tokens, triton.cdiv(width, _BLOCK))](
            parts, routed.chosen, other, routed.logits, out, width, other.stride(0), routed.logits.stride(0),
            TOP_K=routed.chosen.shape[1], EXPERTS=num_experts, HAS_SHARED=shared is not None,
            HAS_GATE=routed.logits.shape[1] > num_experts, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return out


def _grid(tile: Tile, routed: Routed, num_row_tiles: int) -> tuple[int, int]:
    return num_row_tiles, tile.num_tiles(routed.order.numel(), len(routed.starts) - 1)


def _bias(weights: ExpertWeights) -> Tensor:
    return weights.values if weights.bias is None else weights.bias


def _switches(tile: Tile, routed: Routed, weights: ExpertWeights) -> dict[str, object]:
    num_experts = len(routed.starts) - 1
    return {
        "EXPERTS": num_experts,
        "EXPERTS_PAD": triton.next_power_of_2(num_experts),
        "BLOCK_M": tile.rows,
        "FORMAT": weights.encoding,
        "GROUP": weights.span,
        "COLUMNS": tile.columns,
        "HAS_BIAS": weights.bias is not None,
        "num_warps": 4,
        "num_stages": tile.stages,
    }


def _check(x: Tensor, weights: ExpertWeights) -> None:
    if x.dim() != 2 or x.shape[1] != weights.num_inputs or x.stride(1) != 1:
        raise ValueError(f"x: shape {tuple(x.shape)}, strides {x.stride()}; give [M, {weights.num_inputs}] with contiguous rows")
    if not weights.bits and weights.values.dtype != x.dtype:
        raise ValueError(f"x: {x.dtype}, but the experts' weights are {weights.values.dtype}")
