"""Blocks in fewer bits than the pool has: what the tiers hold where they round (--kv-tier-dtype).

    pool    bfloat16, float16 or float32, as the backend arranges them
    int8    [layer][keys, values]   plain numbers, then a float32 scale for each head and token: what a pool in int8 would hold
    fp8     [layer][keys, values]   plain codes of float8_e4m3fn, then a float32 scale for each head: a power of two

Both are fixed points: a block that was restored and is written again is not rounded any further. Numbers that are not finite
come back as such. NumPy only; whole blocks are converted at once, in the threads of the tiers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvtransfer.conversion import FP8, SCALE_BYTES, Bytes, KVFormat, Numbers
from kvtransfer.framing import checksum, room_for
from kvtransfer.tiers.base import BlockBytes

DTYPES = {"int8": "int8", "fp8": FP8}
"""Element types of the setting `kv_tier_dtype`."""
ROUNDED_FROM = ("bfloat16", "float16", "float32")
LARGEST = np.float32(448)
"""The largest number of float8_e4m3fn."""


@dataclass(frozen=True)
class Rounding:
    """Convert blocks of `num_layers` layers, whose keys (and values) of a layer have the format `source`, and back. `dtype` is
    int8 or fp8. Raises ValueError that names the setting."""

    source: KVFormat
    num_layers: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"kv_tier_dtype: {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.source.dtype not in ROUNDED_FROM:
            problem = (
                f"the pool's KV is in {self.source.dtype} already, which is not rounded any further; leave it at pool, "
                "or give the pool another kv_dtype, such as bfloat16"
            )
            raise ValueError(f"kv_tier_dtype: {problem}")

    @property
    def plane_bytes(self) -> int:
        """Return the bytes of a rounded block's keys (or values) in one layer."""
        tokens = self.source.block_size if self.dtype == "int8" else 1
        return self.source.num_heads * (self.source.block_size * self.source.head_dim + SCALE_BYTES * tokens)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of a rounded block."""
        return 2 * self.num_layers * self.plane_bytes

    def rounded(self, block: BlockBytes) -> BlockBytes:
        """Return what the tiers hold of a block of the pool."""
        planes = _planes(block.content, self.num_layers, self.source.num_bytes)
        content = room_for(self.num_bytes)
        stored = _planes(content, self.num_layers, self.plane_bytes)
        with np.errstate(invalid="ignore", over="ignore"):
            for kv in (0, 1):
                numbers = self.source.unpack(planes[:, kv], is_value=bool(kv))
                stored[:, kv] = self._packed_int8(numbers) if self.dtype == "int8" else self._packed_fp8(numbers)
        return BlockBytes(content, checksum([content]))

    def restored(self, block: BlockBytes) -> BlockBytes:
        """Return a block of the pool; where `block` is damaged, one whose CRC is wrong."""
        content = room_for(2 * self.num_layers * self.source.num_bytes)
        if checksum([block.content]) != block.crc:
            return BlockBytes(content, ~checksum([content]) & 0xFFFFFFFF)
        stored = _planes(block.content, self.num_layers, self.plane_bytes)
        planes = _planes(content, self.num_layers, self.source.num_bytes)
        with np.errstate(invalid="ignore", over="ignore"):
            for kv in (0, 1):
                numbers = self._from_int8(stored[:, kv]) if self.dtype == "int8" else self._from_fp8(stored[:, kv])
                planes[:, kv] = self.source.pack(numbers, is_value=bool(kv))
        return BlockBytes(content, checksum([content]))

    def _packed_int8(self, numbers: Numbers) -> Bytes:
        return self._int8.pack(numbers.converted("int8"), is_value=False)

    def _from_int8(self, stored: Bytes) -> Numbers:
        return self._int8.unpack(stored, is_value=False).converted(self.source.dtype)

    @property
    def _int8(self) -> KVFormat:
        source = self.source
        return KVFormat("plain", "int8", source.block_size, source.num_heads, source.head_dim)

    def _packed_fp8(self, numbers: Numbers) -> Bytes:
        floats = numbers.converted("float32").values.astype(np.float32, copy=False).reshape(self._shape)
        scales = _powers_of_two(np.abs(floats).max(axis=(1, 3)))
        codes = _codes(floats / scales[:, None, :, None], is_bfloat16=self.source.dtype == "bfloat16")
        return np.concatenate((codes.reshape(self.num_layers, -1), scales.view(np.uint8)), axis=1)

    def _from_fp8(self, stored: Bytes) -> Numbers:
        num_codes = self.plane_bytes - SCALE_BYTES * self.source.num_heads
        codes = np.ascontiguousarray(stored[:, :num_codes]).reshape(self._shape)
        scales = np.ascontiguousarray(stored[:, num_codes:]).view(np.float32)
        unscaled = Numbers(FP8, codes).converted("float32").values.astype(np.float32, copy=False)
        floats = unscaled * scales[:, None, :, None]
        tokens = floats.reshape(-1, self.source.num_heads, self.source.head_dim)
        return Numbers("float32", tokens).converted(self.source.dtype)

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        return self.num_layers, self.source.block_size, self.source.num_heads, self.source.head_dim


def _planes(content: memoryview, num_layers: int, plane_bytes: int) -> Bytes:
    """Return a view [layers, keys and values, bytes] of a block."""
    return np.frombuffer(content, np.uint8).reshape(num_layers, 2, plane_bytes)


def _powers_of_two(peaks: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the least powers of two by which numbers up to `peaks` come within `LARGEST`; NaN where a peak is not finite."""
    mantissas, exponents = np.frexp(peaks / LARGEST)
    scales = np.ldexp(np.float32(1), exponents - (mantissas == 0.5))
    # A peak near the smallest float32 would need a scale that is none.
    scales = np.maximum(scales, np.finfo(np.float32).tiny)
    return np.where(np.isfinite(peaks), np.where(peaks > 0, scales, 1), np.nan).astype(np.float32)


def _codes(floats: NDArray[np.float32], *, is_bfloat16: bool) -> NDArray[np.uint8]:
    """Return the codes of numbers; what was bfloat16 before it was scaled is looked up, which is five times as fast."""
    if not is_bfloat16:
        return np.asarray(Numbers("float32", floats).converted(FP8).values, np.uint8)
    return _codes_of_bfloat16()[(floats.view(np.uint32) >> 16).astype(np.uint16)]


@cache
def _codes_of_bfloat16() -> NDArray[np.uint8]:
    """Return the codes of all 65536 bfloat16 numbers."""
    floats = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        return np.asarray(Numbers("float32", floats).converted(FP8).values, np.uint8)
