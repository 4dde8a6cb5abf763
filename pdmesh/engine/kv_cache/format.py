"""How numbers lie in a KV block, and how blocks of one form become blocks of another. NumPy only; bytes in, bytes out.

    plain     [block_size][num_heads][head_dim]                                                  the torch backend
    panels    groups of 16 tokens as the CPU kernels read them (pdmesh/engine/kernels/cpu/attention.h):
              keys   [num_heads][block_size / 16][head_dim / pair][16 tokens][pair dims]         pair: 2, and 1 for float32
              values [num_heads][block_size / 16][head_dim / 16][16 / pair][16 dims][pair tokens]
              int8: float32 scales [num_heads][block_size] behind either

Numbers of float8_e4m3fn stand for themselves times a scale, one for all keys of a layer and one for its values. It lies in no
block: it is the checkpoint's (pdmesh/engine/loader/kv_scales.py), and whoever converts says it.

Block size, heads and head_dim of a pool are parameters, so a shard of a tensor-parallel worker is a format like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

GROUP = 16  # tokens of a group, and dimensions of a panel
SCALE_BYTES = 4
FP8 = "float8_e4m3fn"
_ELEMENTS = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8, FP8: np.uint8}

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Numbers:
    """KV of some tokens: `values` [tokens, heads, head_dim] in the element type of `dtype` (bfloat16 as uint16, float8_e4m3fn as
    uint8); `scales` [tokens, heads] float32 for int8."""

    dtype: str
    values: NDArray[np.generic]
    scales: NDArray[np.float32] | None = None

    def heads(self, start: int, end: int) -> Numbers:
        """Only these heads."""
        scales = None if self.scales is None else self.scales[:, start:end]
        return replace(self, values=self.values[:, start:end], scales=scales)

    def tokens(self, start: int, end: int) -> Numbers:
        """Only these tokens."""
        return replace(self, values=self.values[start:end], scales=None if self.scales is None else self.scales[start:end])

    def assign(self, token: int, head: int, other: Numbers) -> None:
        """Overwrite what begins at this token and head with numbers of the same dtype."""
        num_tokens, num_heads, _ = other.values.shape
        self.values[token : token + num_tokens, head : head + num_heads] = other.values
        if self.scales is not None:
            self.scales[token : token + num_tokens, head : head + num_heads] = other.scales

    def converted(self, dtype: str, fp8_scale: float = 1.0) -> Numbers:
        """Rounded to nearest even; int8 with the scale that the kernels would choose; float16 and float8_e4m3fn hold no more than
        their largest number. `fp8_scale`: of these keys or values wherever they are in float8_e4m3fn."""
        if dtype == self.dtype:
            return self
        floats = self._floats(fp8_scale)
        if dtype == "int8":
            return _to_int8(floats)
        return Numbers(dtype, _to_fp8(floats / np.float32(fp8_scale)) if dtype == FP8 else _ROUNDED[dtype](floats))

    def _floats(self, fp8_scale: float) -> NDArray[np.float32]:
        if self.dtype == "bfloat16":
            return (self.values.astype(np.uint32) << 16).view(np.float32)
        if self.dtype == FP8:
            return np.asarray(_E4M3[self.values] * np.float32(fp8_scale))
        floats = self.values.astype(np.float32)
        return floats if self.scales is None else floats * self.scales[:, :, None]


@dataclass(frozen=True)
class KVFormat:
    """The form of one layer's keys (or values) of a block. `arrangement`: plain or panels."""

    arrangement: str
    dtype: str
    block_size: int
    num_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.arrangement == "panels" and (self.block_size % GROUP or self.head_dim % GROUP):
            raise ValueError(f"panels have groups of {GROUP} tokens and dimensions, not {self.block_size} and {self.head_dim}")

    @property
    def num_bytes(self) -> int:
        """Of one block."""
        scales = SCALE_BYTES if self.has_scales else 0
        return self.block_size * self.num_heads * (self.head_dim * np.dtype(_ELEMENTS[self.dtype]).itemsize + scales)

    @property
    def has_scales(self) -> bool:
        return self.dtype == "int8"

    def why_not_to(self, other: KVFormat) -> str | None:
        """The field in which blocks of this form cannot become blocks of the other; None if they can."""
        for field in ("arrangement", "head_dim"):
            if getattr(self, field) != getattr(other, field):
                return field
        return None if self.dtype == other.dtype or {self.dtype, other.dtype} <= _ELEMENTS.keys() else "dtype"

    def unpack(self, blocks: Bytes, *, is_value: bool) -> Numbers:
        """The numbers of [num_blocks, num_bytes]. A copy."""
        element = _ELEMENTS[self.dtype]
        size = self.block_size * self.num_heads * self.head_dim * np.dtype(element).itemsize
        raw = np.ascontiguousarray(blocks[:, :size]).view(element)
        count = blocks.shape[0]
        if self.arrangement == "plain":
            values = raw.reshape(count * self.block_size, self.num_heads, self.head_dim)
        else:
            shape, order = self._panels(count, is_value=is_value)
            values = raw.reshape(shape).transpose(order).reshape(count * self.block_size, self.num_heads, self.head_dim)
        if not self.has_scales:
            return Numbers(self.dtype, values.copy())
        scales = np.ascontiguousarray(blocks[:, size:]).view(np.float32).reshape(count, self.num_heads, self.block_size)
        return Numbers(self.dtype, values.copy(), scales.transpose(0, 2, 1).reshape(-1, self.num_heads).copy())

    def pack(self, numbers: Numbers, *, is_value: bool) -> Bytes:
        """[num_blocks, num_bytes] of whole blocks of tokens in this dtype."""
        count = numbers.values.shape[0] // self.block_size
        if self.arrangement == "plain":
            raw = numbers.values
        else:
            shape, order = self._panels(count, is_value=is_value)
            raw = numbers.values.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))
        blocks = np.ascontiguousarray(raw).reshape(count, -1).view(np.uint8)
        if numbers.scales is None:
            return blocks
        scales = numbers.scales.reshape(count, self.block_size, self.num_heads).transpose(0, 2, 1)
        return np.concatenate((blocks, np.ascontiguousarray(scales).reshape(count, -1).view(np.uint8)), axis=1)

    def _panels(self, count: int, *, is_value: bool) -> tuple[list[int], list[int]]:
        """The axes of blocks as they lie, and their order as [tokens, heads, dims]."""
        pair = 1 if self.dtype == "float32" else 2
        groups, panels = self.block_size // GROUP, self.head_dim // GROUP
        if is_value:
            #        0      1               2       3       4              5      6
            return [count, self.num_heads, groups, panels, GROUP // pair, GROUP, pair], [0, 2, 4, 6, 1, 3, 5]
        return [count, self.num_heads, groups, self.head_dim // pair, GROUP, pair], [0, 2, 4, 1, 3, 5]


def _to_bfloat16(floats: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(floats).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _to_float16(floats: NDArray[np.float32]) -> NDArray[np.float16]:
    largest = np.finfo(np.float16).max
    return np.clip(floats, -largest, largest).astype(np.float16)


def _to_fp8(floats: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Codes of e4m3, as pdmesh/engine/kernels/triton/kv.py rounds: its 3 bits of a float32's mantissa, or multiples of 2**-9."""
    clipped = np.clip(floats, -_E4M3_MAX, _E4M3_MAX)
    bits = np.abs(clipped).view(np.uint32)
    normal = (bits + 0x7FFFF + (bits >> 20 & 1) >> 20) - (127 - 7 << 3)  # the exponent's bias is 7
    small = np.rint(np.abs(clipped) * np.float32(512))
    codes = np.where(bits < _E4M3_MIN_NORMAL_BITS, small, normal).astype(np.uint8)
    return np.where(np.isnan(floats), 0x7F, codes | np.signbit(clipped).astype(np.uint8) << 7).astype(np.uint8)


def _e4m3() -> NDArray[np.float32]:
    """The values of the 256 codes: sign, 4 bits of exponent, 3 of mantissa; no infinity, and one NaN of either sign."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    magnitude[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes < 128, magnitude, -magnitude).astype(np.float32)


_E4M3, _E4M3_MAX, _E4M3_MIN_NORMAL_BITS = _e4m3(), np.float32(448), np.float32(2.0**-6).view(np.uint32)
_ROUNDED: dict[str, Callable[[NDArray[np.float32]], NDArray[np.generic]]] = {
    "float32": lambda floats: floats,
    "float16": _to_float16,
    "bfloat16": _to_bfloat16,
}


def _to_int8(floats: NDArray[np.float32]) -> Numbers:
    peak = np.abs(floats).max(axis=2)
    factor = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    return Numbers("int8", np.rint(floats * factor[:, :, None]).astype(np.int8), peak / np.float32(127))
