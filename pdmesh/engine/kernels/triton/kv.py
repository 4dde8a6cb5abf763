"""New keys and values into the pool, and what comes before: norm of query and key heads, rotary embedding, in one kernel.

It replaces, with their order of operations and their roundings, `rms_norm` of engine/layers.py, `rotate` of engine/rope.py and
the writing of engine/paged_attention.py: without it seven kernels, and four passes over all heads. Read are T * (H + 2 KVH) * D
elements (the halves that are swapped a second time, out of the cache) and two rows of the rotary tables, written as many: for
8B and a batch of 32 0.8 MB, so nothing but the launch counts; for 8192 tokens of prefill 201 MB, 42 us at 4.8 TB/s.

The sum of squares of a head has another order than torch's, so with QK-norm results may differ from torch's by one rounding. They
depend on the token alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.kv_kernels import rope_store_kernel, store_kernel
from pdmesh.engine.kernels.triton.tiles import padded_dim
from pdmesh.engine.models.rope import RotaryTable

# 4 warps with 16 bytes of 2-byte elements for each thread: 1024 elements.
_ELEMENTS = 1024


def rope_and_store(
    qkv: Tensor,
    kv: Tensor,
    rotary: RotaryTable,
    positions: Tensor,
    slots: Tensor,
    *,
    num_heads: int,
    norm: Tensor | None = None,
    eps: float = 0.0,
    kv_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Norm (if any) and rotation of query and key heads; keys and values to their slots; returns the query.

    qkv [T, (num_heads + 2 * num_kv_heads) * head_dim]: query heads, key heads, value heads; kv [2, num_blocks, block_size,
    num_kv_heads, head_dim], one layer of the pool, in qkv's dtype or float8_e4m3fn with `kv_scales` [2] float32 (what is stored
    is divided by them, rounded to nearest even and saturated); positions [T] int32, within the rotary table; slots [T] int32, -1:
    not stored; norm [num_heads + num_kv_heads, head_dim]. Returns [T, num_heads, head_dim] in qkv's dtype, in `out` if given.
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
    if num_rows:
        rope_store_kernel[(-(-num_rows // rows),)](
            qkv, qkv if norm is None else norm, rotary.cos, rotary.sin, positions, slots, out, kv[0], kv[1],
            qkv if kv_scales is None else kv_scales,
            num_rows, qkv.stride(0), out.stride(0), out.stride(1), kv.stride(2), kv.stride(3), eps,
            HEADS=num_heads, KV_HEADS=num_kv_heads, DIM=dim, DIM_PAD=padded, ROTARY=rotary.cos.shape[1], ROWS=rows,
            HAS_NORM=norm is not None, HAS_SCALES=kv_scales is not None, num_warps=4,
        )  # fmt: skip
    return out


def store_kv(key: Tensor, value: Tensor, kv: Tensor, slots: Tensor, *, kv_scales: Tensor | None = None) -> None:
    """Keys and values that are rotated already, to their slots. key, value [T, num_kv_heads, head_dim]; the rest as above."""
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
    """kv [2, num_blocks, block_size, num_kv_heads, head_dim] whose slots lie evenly. Raises ValueError naming what differs."""
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


def _check_tables(rotary: RotaryTable, norm: Tensor | None, norm_shape: tuple[int, int], dtype: torch.dtype) -> None:
    if rotary.cos.dtype != dtype or rotary.cos.shape[1] > norm_shape[1]:
        raise ValueError(
            f"rotary: {rotary.cos.dtype} of {rotary.cos.shape[1]} dimensions, for heads of {norm_shape[1]} in {dtype}"
        )
    if norm is not None and (norm.shape != norm_shape or norm.dtype != dtype or not norm.is_contiguous()):
        raise ValueError(f"norm: {norm.dtype} {tuple(norm.shape)}, expected {dtype} {norm_shape}")
