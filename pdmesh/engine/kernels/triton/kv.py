"""New keys and values into the pool, after norm of query and key heads and rotary embedding, in one kernel.

It replaces, with their order of operations and their roundings, `rms_norm` of pdmesh/engine/models/layers.py, `rotate` of
pdmesh/engine/models/layers.py and the writing of pdmesh/engine/attention/base.py: without it seven kernels, and four passes over
all heads. Read are T * (H + 2 KVH) * D elements (the halves that are swapped a second time, out of the cache) and two rows of
the rotary tables, written as many: for 8B and a batch of 32 0.8 MB, so nothing but the launch counts; for 8192 tokens of prefill
201 MB, 42 us at 4.8 TB/s.

The sum of squares of a head has another order than torch's, so with QK-norm results may differ from torch's by one rounding. They
depend on the token alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdmesh.engine.kernels.triton.launching import behind_last, overlap, settle_keys
from pdmesh.engine.kernels.triton.tiles import padded_dim
from pdmesh.engine.models.layers import RotaryTable

# The kernels. A row is one head of one token: rows of a token follow each other in memory,
#
# qkv | token 0: q heads | k heads | v heads | token 1: q heads | ...          a program takes ROWS rows, DIM_PAD columns


# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"


FLOAT8_MAX = tl.constexpr(448.0)
FLOAT8_MIN_NORMAL = tl.constexpr(2.0**-6)
# Adding this number leaves multiples of 2**-9 only, the steps of float8_e4m3fn below its normal numbers.
FLOAT8_SUBNORMAL = tl.constexpr(1.5 * 2.0**14)


@triton.jit
def _to_float8(x):
    """Round x here, to even and saturating, so that the cast only drops zeros: the interpreter's cast rounds otherwise. NaN stays
    NaN, which shows a broken activation: a GPU's minimum and maximum would make 448 of it, and the interpreter's cast 256."""
    is_number = x == x
    x = tl.minimum(tl.maximum(tl.where(is_number, x, 0.0), -FLOAT8_MAX), FLOAT8_MAX)
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (x + FLOAT8_SUBNORMAL) - FLOAT8_SUBNORMAL
    rounded = tl.where(tl.abs(x) < FLOAT8_MIN_NORMAL, small, normal)
    code = rounded.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(is_number, code, 0x7F).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _store(at, x, scales, index, present, HAS_SCALES: tl.constexpr):
    if HAS_SCALES:
        tl.store(at, _to_float8(tl.div_rn(x.to(tl.float32), tl.load(scales + index))), mask=present)
    else:
        tl.store(at, x, mask=present)


@triton.jit(do_not_specialize=["num_rows"])
def rope_store_kernel(
    qkv, norm, cos, sin, positions, slots, query, keys, values, scales,
    num_rows, qkv_stride, query_token_stride, query_head_stride, slot_stride, head_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROTARY: tl.constexpr,
    ROWS: tl.constexpr, HAS_NORM: tl.constexpr, KIND: tl.constexpr, HAS_SCALES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program: ROWS rows. KIND of the norm: as in norms.py; ROTARY 0: nothing is rotated. Each result is rounded to the dtype
    where torch's code rounds it."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = rows // (HEADS + 2 * KV_HEADS), (rows % (HEADS + 2 * KV_HEADS)).to(tl.int32)
    columns = tl.arange(0, DIM_PAD)
    alive = rows < num_rows
    present = alive[:, None] & (columns < DIM)[None, :]
    rotated = head < HEADS + KV_HEADS
    turned = rotated[:, None] & (columns < ROTARY)[None, :]
    # The other half's column, with which a column is rotated.
    other = tl.where(columns < ROTARY // 2, columns + ROTARY // 2, columns - ROTARY // 2)
    dtype = qkv.dtype.element_ty
    # Numbers of the step and tables were there before any kernel that overlaps.
    slot = tl.load(slots + token, mask=alive, other=-1)
    if ROTARY > 0:
        position = tl.load(positions + token, mask=alive, other=0)
        at = position.to(tl.int64)[:, None] * ROTARY + columns[None, :]
        c = tl.load(cos + at, mask=present & turned, other=0.0)
        s = tl.load(sin + at, mask=present & turned, other=0.0)
    behind_last(OVERLAPS)
    start = qkv + token * qkv_stride + head * DIM
    x = tl.load(start[:, None] + columns[None, :], mask=present, other=0.0)
    swapped = tl.load(start[:, None] + other[None, :], mask=present & turned, other=0.0)
    if HAS_NORM:
        wide, wide_swapped = x.to(tl.float32), swapped.to(tl.float32)
        if KIND == "layer":
            mean = (tl.sum(wide, 1) / DIM)[:, None]
            wide, wide_swapped = tl.where(present, wide - mean, 0.0), wide_swapped - mean
        factor = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
        normed = present & rotated[:, None]
        weight = tl.load(norm + head[:, None] * DIM + columns[None, :], mask=normed, other=0.0)
        swapped_weight = tl.load(norm + head[:, None] * DIM + other[None, :], mask=present & turned, other=0.0)
        if KIND == "rms":
            x = tl.where(normed, _product(weight, (wide * factor).to(dtype), dtype), x)
            swapped = _product(swapped_weight, (wide_swapped * factor).to(dtype), dtype)
        else:
            x = tl.where(normed, _product(weight, wide * factor, dtype), x)
            swapped = _product(swapped_weight, wide_swapped * factor, dtype)
    if ROTARY > 0:
        sum_of_both = _product(x, c, dtype).to(tl.float32) + _product(swapped, s, dtype).to(tl.float32)
        x = tl.where(turned, sum_of_both.to(dtype), x)
    is_query = present & (head < HEADS)[:, None]
    query_at = query + token * query_token_stride + head * query_head_stride
    tl.store(query_at[:, None] + columns[None, :], x, mask=is_query)
    kept = present & (slot >= 0)[:, None]
    is_key, is_value = (rotated & (head >= HEADS))[:, None], (head >= HEADS + KV_HEADS)[:, None]
    key_at = keys + slot.to(tl.int64) * slot_stride + (head - HEADS) * head_stride
    _store(key_at[:, None] + columns[None, :], x, scales, 0, kept & is_key, HAS_SCALES)
    value_at = values + slot.to(tl.int64) * slot_stride + (head - HEADS - KV_HEADS) * head_stride
    _store(value_at[:, None] + columns[None, :], x, scales, 1, kept & is_value, HAS_SCALES)


@triton.jit
def _product(a, b, dtype):
    return (a.to(tl.float32) * b.to(tl.float32)).to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def store_kernel(
    key, value, slots, keys, values, scales,
    num_rows, key_token_stride, key_head_stride, value_token_stride, value_head_stride, slot_stride, head_stride,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Program: ROWS rows of keys and of values, stored as they are."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = rows // KV_HEADS, rows % KV_HEADS
    columns = tl.arange(0, DIM_PAD)
    slot = tl.load(slots + token, mask=rows < num_rows, other=-1)
    kept = (slot >= 0)[:, None] & (columns < DIM)[None, :]
    offset = (slot.to(tl.int64) * slot_stride + head * head_stride)[:, None] + columns[None, :]
    key_at = key + (token * key_token_stride + head * key_head_stride)[:, None] + columns[None, :]
    _store(keys + offset, tl.load(key_at, mask=kept, other=0.0), scales, 0, kept, HAS_SCALES)
    value_at = value + (token * value_token_stride + head * value_head_stride)[:, None] + columns[None, :]
    _store(values + offset, tl.load(value_at, mask=kept, other=0.0), scales, 1, kept, HAS_SCALES)


settle_keys(globals())


# 4 warps with 16 bytes of 2-byte elements for each thread: 1024 elements.
_ELEMENTS = 1024


def rope_and_store(
    qkv: Tensor,
    kv: Tensor,
    rotary: RotaryTable | None,
    positions: Tensor,
    slots: Tensor,
    *,
    num_heads: int,
    norm: Tensor | None = None,
    eps: float = 0.0,
    norm_kind: str = "rms",
    kv_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Normalize (if there are norms) and rotate query and key heads; write keys and values to their slots; return the query.

    qkv [T, (num_heads + 2 * num_kv_heads) * head_dim]: query heads, key heads, value heads; kv [2, num_blocks, block_size,
    num_kv_heads, head_dim], one layer of the pool, in qkv's dtype or float8_e4m3fn with `kv_scales` [2] float32 (what is stored
    is divided by them, rounded to nearest even and saturated); positions [T] int32, within the rotary table; slots [T] int32, -1:
    not stored; norm [num_heads + num_kv_heads, head_dim] of `norm_kind` (norms.py). Without a rotary table nothing is rotated.
    Returns [T, num_heads, head_dim] in qkv's dtype, in `out` if given.
    Never synchronizes. Raises ValueError naming what does not fit.
    """
    num_kv_heads, dim = kv.shape[3], kv.shape[4]
    check_kv(kv, dim, qkv.dtype, kv_scales)
    _check_qkv(qkv, num_heads + 2 * num_kv_heads, dim)
    _check_indices(qkv.shape[0], positions=positions, slots=slots)
    _check_tables(rotary, norm, (num_heads + num_kv_heads, dim), qkv.dtype)
    out = torch.empty((qkv.shape[0], num_heads, dim), dtype=qkv.dtype, device=qkv.device) if out is None else out
    if out.shape != (qkv.shape[0], num_heads, dim) or out.dtype != qkv.dtype or out.stride(2) != 1:
        raise ValueError(f"out: {out.dtype} {tuple(out.shape)}, expected {qkv.dtype} {(qkv.shape[0], num_heads, dim)}")
    num_rows, padded = qkv.shape[0] * (num_heads + 2 * num_kv_heads), padded_dim(dim)
    rows = max(1, _ELEMENTS // padded)
    cos, sin, rotary_dim = (qkv, qkv, 0) if rotary is None else (rotary.cos, rotary.sin, rotary.cos.shape[1])
    if num_rows:
        rope_store_kernel[(-(-num_rows // rows),)](
            qkv, qkv if norm is None else norm, cos, sin, positions, slots, out, kv[0], kv[1],
            qkv if kv_scales is None else kv_scales,
            num_rows, qkv.stride(0), out.stride(0), out.stride(1), kv.stride(2), kv.stride(3), eps,
            HEADS=num_heads, KV_HEADS=num_kv_heads, DIM=dim, DIM_PAD=padded, ROTARY=rotary_dim, ROWS=rows,
            HAS_NORM=norm is not None, KIND=norm_kind, HAS_SCALES=kv_scales is not None, num_warps=4,
            **overlap(),
            enable_fp_fusion=False,  # a product and a sum in one step would skip the product's rounding, which torch has
        )  # fmt: skip
    return out


def store_kv(key: Tensor, value: Tensor, kv: Tensor, slots: Tensor, *, kv_scales: Tensor | None = None) -> None:
    """Write keys and values that are rotated already to their slots. key, value [T, num_kv_heads, head_dim]; the rest as
    above."""
    check_kv(kv, key.shape[-1], key.dtype, kv_scales)
    for name, x in (("key", key), ("value", value)):
        if x.shape != (key.shape[0], *kv.shape[3:]) or x.stride(2) != 1 or x.dtype != key.dtype:
            raise ValueError(f"{name}: {x.dtype} {tuple(x.shape)}, expected {key.dtype} {(key.shape[0], *kv.shape[3:])}")
    _check_indices(key.shape[0], slots=slots)
    num_rows, padded = key.shape[0] * kv.shape[3], padded_dim(key.shape[2])
    rows = max(1, _ELEMENTS // padded)
    if num_rows:
        store_kernel[(-(-num_rows // rows),)](
            key, value, slots, kv[0], kv[1], key if kv_scales is None else kv_scales,
            num_rows, key.stride(0), key.stride(1), value.stride(0), value.stride(1), kv.stride(2), kv.stride(3),
            KV_HEADS=kv.shape[3], DIM=key.shape[2], DIM_PAD=padded, ROWS=rows, HAS_SCALES=kv_scales is not None, num_warps=4,
        )  # fmt: skip


def check_kv(kv: Tensor, head_dim: int, dtype: torch.dtype, kv_scales: Tensor | None) -> None:
    """Check kv [2, num_blocks, block_size, num_kv_heads, head_dim], whose slots lie evenly. Raises ValueError naming what
    differs."""
    if kv.dim() != 5 or kv.shape[0] != 2 or kv.shape[4] != head_dim:
        raise ValueError(f"kv: {tuple(kv.shape)}, expected [2, blocks, block_size, kv_heads, {head_dim}]")
    if kv.stride(4) != 1 or kv.stride(1) != kv.shape[2] * kv.stride(2):
        raise ValueError(f"kv: strides {kv.stride()}: slots do not lie at even distances")
    if (kv.dtype == torch.float8_e4m3fn) != (kv_scales is not None):
        raise ValueError(f"kv_scales: go with a pool of float8_e4m3fn, and with no other; this is {kv.dtype}")
    if kv_scales is None and kv.dtype != dtype:
        raise ValueError(f"kv: {kv.dtype}, expected {dtype}")
    if kv_scales is not None and (kv_scales.shape != (2,) or kv_scales.dtype != torch.float32 or not kv_scales.is_contiguous()):
        raise ValueError(f"kv_scales: {kv_scales.dtype} {tuple(kv_scales.shape)}, expected float32 [2]")


def _check_qkv(qkv: Tensor, num_heads: int, dim: int) -> None:
    if qkv.dim() != 2 or qkv.shape[1] != num_heads * dim or qkv.stride(1) != 1:
        raise ValueError(f"qkv: {tuple(qkv.shape)}, expected [tokens, {num_heads * dim}] ({num_heads} heads of {dim})")


def _check_indices(num_tokens: int, **indices: Tensor) -> None:
    for name, index in indices.items():
        if index.dim() != 1 or index.shape[0] < num_tokens or index.dtype != torch.int32 or not index.is_contiguous():
            raise ValueError(f"{name}: {index.dtype} {tuple(index.shape)}, expected int32 of at least {num_tokens}")


def _check_tables(rotary: RotaryTable | None, norm: Tensor | None, norm_shape: tuple[int, int], dtype: torch.dtype) -> None:
    if rotary is not None and (rotary.cos.dtype != dtype or rotary.cos.shape[1] > norm_shape[1]):
        raise ValueError(
            f"rotary: {rotary.cos.dtype} of {rotary.cos.shape[1]} dimensions, for heads of {norm_shape[1]} in {dtype}"
        )
    if norm is not None and (norm.shape != norm_shape or norm.dtype != dtype or not norm.is_contiguous()):
        raise ValueError(f"norm: {norm.dtype} {tuple(norm.shape)}, expected {dtype} {norm_shape}")
