# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The kernels of kv_store.py, which explains them. A row is one head of one token: rows of a token follow each other in memory,

qkv | token 0: q heads | k heads | v heads | token 1: q heads | ...          a program takes ROWS rows, DIM_PAD columns
"""

import triton
import triton.language as tl

from pdmesh.engine.kernels.triton.kernel_cache_keys import settle_keys

FLOAT8_MAX = tl.constexpr(448.0)
FLOAT8_MIN_NORMAL = tl.constexpr(2.0**-6)
# Adding it leaves multiples of 2**-9 only, the steps of float8_e4m3fn below its normal numbers.
FLOAT8_SUBNORMAL = tl.constexpr(1.5 * 2.0**14)


@triton.jit
def _to_float8(x):
    """Rounded here, to even and saturating, so that the cast only drops zeros: the interpreter's cast rounds otherwise. NaN stays
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
    ROWS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Program: ROWS rows. Each result is rounded to the dtype where torch's code rounds it."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = rows // (HEADS + 2 * KV_HEADS), (rows % (HEADS + 2 * KV_HEADS)).to(tl.int32)
    columns = tl.arange(0, DIM_PAD)
    alive = rows < num_rows
    present = alive[:, None] & (columns < DIM)[None, :]
    rotated = head < HEADS + KV_HEADS
    turned = rotated[:, None] & (columns < ROTARY)[None, :]
    # The other half's column, by which a column is turned.
    other = tl.where(columns < ROTARY // 2, columns + ROTARY // 2, columns - ROTARY // 2)
    dtype = qkv.dtype.element_ty
    start = qkv + token * qkv_stride + head * DIM
    x = tl.load(start[:, None] + columns[None, :], mask=present, other=0.0)
    swapped = tl.load(start[:, None] + other[None, :], mask=present & turned, other=0.0)
    if HAS_NORM:
        wide = x.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
        normed = present & rotated[:, None]
        weight = tl.load(norm + head[:, None] * DIM + columns[None, :], mask=normed, other=0.0)
        swapped_weight = tl.load(norm + head[:, None] * DIM + other[None, :], mask=present & turned, other=0.0)
        x = tl.where(normed, _product(weight, (wide * factor).to(dtype), dtype), x)
        swapped = _product(swapped_weight, (swapped.to(tl.float32) * factor).to(dtype), dtype)
    position = tl.load(positions + token, mask=alive, other=0)
    at = position.to(tl.int64)[:, None] * ROTARY + columns[None, :]
    c = tl.load(cos + at, mask=present & turned, other=0.0)
    s = tl.load(sin + at, mask=present & turned, other=0.0)
    sum_of_both = _product(x, c, dtype).to(tl.float32) + _product(swapped, s, dtype).to(tl.float32)
    x = tl.where(turned, sum_of_both.to(dtype), x)
    is_query = present & (head < HEADS)[:, None]
    query_at = query + token * query_token_stride + head * query_head_stride
    tl.store(query_at[:, None] + columns[None, :], x, mask=is_query)
    slot = tl.load(slots + token, mask=alive, other=-1)
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
    """Program: ROWS rows of keys and of values, as they are."""
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
