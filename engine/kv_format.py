"""How numbers lie in a KV block, and how blocks of one form become blocks of another. NumPy only; bytes in, bytes out.

    plain     [block_size][num_heads][head_dim]                                                  the torch backend
    panels    groups of 16 tokens as the CPU kernels read them (engine/kernels/cpu/attention.h):
              keys   [num_heads][block_size / 16][head_dim / pair][16 tokens][pair dims]         pair: 2, and 1 for float32
              values [num_heads][block_size / 16][head_dim / 16][16 / pair][16 dims][pair tokens]
              int8: float32 scales [num_heads][block_size] behind either

Block size, heads and head_dim of a pool are parameters, so a shard of a tensor-parallel worker is a format like any other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

GROUP = 16  # tokens of a group, and dimensions of a panel
SCALE_BYTES = 4
_ELEMENTS = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8}
_CONVERTIBLE = ("float32", "bfloat16", "int8")

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Numbers:
    """KV of some tokens: `values` [tokens, heads, head_dim] in the element type of `dtype` (bfloat16 as uint16); `scales`
    [tokens, heads] float32 for int8."""

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

    def converted(self, dtype: str) -> Numbers:
        """Rounded to nearest even; int8 with the scale that the kernels would choose."""
        if dtype == self.dtype:
            return self
        floats = self._floats()
        if dtype == "float32":
            return Numbers(dtype, floats)
        if dtype == "bfloat16":
            return Numbers(dtype, _to_bfloat16(floats))
        return _to_int8(floats)

    def _floats(self) -> NDArray[np.float32]:
        if self.dtype == "bfloat16":
            return (self.values.astype(np.uint32) << 16).view(np.float32)
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
        same = self.dtype == other.dtype
        return None if same or {self.dtype, other.dtype} <= set(_CONVERTIBLE) else "dtype"

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


def _to_int8(floats: NDArray[np.float32]) -> Numbers:
    peak = np.abs(floats).max(axis=2)
    factor = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    return Numbers("int8", np.rint(floats * factor[:, :, None]).astype(np.int8), peak / np.float32(127))
