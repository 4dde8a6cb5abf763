"""KV formats and the conversion of one layout into another: parts are staged, checked, and written block by block in our format.

    wire ──► Staging (the sender's format) ──CRC──► Conversion.write ──► our pool: other block size, element type, heads

Nothing is staged where both formats are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout import Layout
from kvtransfer.manifest import KVMemory, Part, PoolShape
from pdmesh.v1 import common_pb2

# The format of numbers in a KV block, and how blocks of one format become blocks of another. NumPy only, no I/O.
#
#     plain     [block_size][num_heads][head_dim]                                                  the torch backend
#     panels    groups of 16 tokens as the CPU kernels read them (pdmesh/engine/kernels/cpu/attention.h):
#               keys   [num_heads][block_size / 16][head_dim / pair][16 tokens][pair dims]         pair: 2, and 1 for float32
#               values [num_heads][block_size / 16][head_dim / 16][16 / pair][16 dims][pair tokens]
#               int8: float32 scales [num_heads][block_size] after either
#
# Numbers of float8_e4m3fn are multiplied by a scale, one for all keys of a layer and one for its values. The scale is not in the
# block: it belongs to the checkpoint (pdmesh/engine/loader/kv_scales.py), and the caller of a conversion passes it.
#
# Block size, heads and head_dim of a pool are parameters, so a shard of a tensor-parallel worker is a format like any other.


GROUP = 16  # tokens of a group, and dimensions of a panel
SCALE_BYTES = 4
FP8 = "float8_e4m3fn"
_ELEMENTS = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8, FP8: np.uint8}

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Numbers:
    """Hold the KV of some tokens: `values` [tokens, heads, head_dim] in the element type of `dtype` (bfloat16 as uint16,
    float8_e4m3fn as uint8); `scales` [tokens, heads] float32 for int8."""

    dtype: str
    values: NDArray[np.generic]
    scales: NDArray[np.float32] | None = None

    def heads(self, start: int, end: int) -> Numbers:
        """Return the numbers of heads `start` to `end` (exclusive)."""
        scales = None if self.scales is None else self.scales[:, start:end]
        return replace(self, values=self.values[:, start:end], scales=scales)

    def tokens(self, start: int, end: int) -> Numbers:
        """Return the numbers of tokens `start` to `end` (exclusive)."""
        return replace(self, values=self.values[start:end], scales=None if self.scales is None else self.scales[start:end])

    def assign(self, token: int, head: int, other: Numbers) -> None:
        """Overwrite the numbers from `token` and `head` on with `other`, which has the same dtype."""
        num_tokens, num_heads, _ = other.values.shape
        self.values[token : token + num_tokens, head : head + num_heads] = other.values
        if self.scales is not None:
            self.scales[token : token + num_tokens, head : head + num_heads] = other.scales

    def converted(self, dtype: str, fp8_scale: float = 1.0) -> Numbers:
        """Return the numbers in `dtype`, rounded to nearest even. int8 takes the scale that the kernels would choose; float16 and
        float8_e4m3fn saturate at their largest number. `fp8_scale` is the scale of these keys or values wherever they are in
        float8_e4m3fn."""
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
    """Describe the format of one layer's keys (or values) of a block. `arrangement` is plain or panels."""

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
        """Return the bytes of one block."""
        scales = SCALE_BYTES if self.has_scales else 0
        return self.block_size * self.num_heads * (self.head_dim * np.dtype(_ELEMENTS[self.dtype]).itemsize + scales)

    @property
    def has_scales(self) -> bool:
        return self.dtype == "int8"

    def why_not_to(self, other: KVFormat) -> str | None:
        """Return the field that prevents a conversion of this format's blocks into the other format; None if none does."""
        for field in ("arrangement", "head_dim"):
            if getattr(self, field) != getattr(other, field):
                return field
        return None if self.dtype == other.dtype or {self.dtype, other.dtype} <= _ELEMENTS.keys() else "dtype"

    def unpack(self, blocks: Bytes, *, is_value: bool) -> Numbers:
        """Return a copy of the numbers in `blocks` [num_blocks, num_bytes]."""
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
        """Return the blocks [num_blocks, num_bytes] that hold `numbers`: whole blocks of tokens, in this dtype."""
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
        """Return the axes of blocks in memory order, and the permutation that makes them [tokens, heads, dims]."""
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
    """Return the e4m3 codes of `floats`, rounded like pdmesh/engine/kernels/triton/kv.py: to 3 bits of mantissa, or to multiples
    of 2**-9."""
    clipped = np.clip(floats, -_E4M3_MAX, _E4M3_MAX)
    bits = np.abs(clipped).view(np.uint32)
    normal = (bits + 0x7FFFF + (bits >> 20 & 1) >> 20) - (127 - 7 << 3)  # the exponent's bias is 7
    small = np.rint(np.abs(clipped) * np.float32(512))
    codes = np.where(bits < _E4M3_MIN_NORMAL_BITS, small, normal).astype(np.uint8)
    return np.where(np.isnan(floats), 0x7F, codes | np.signbit(clipped).astype(np.uint8) << 7).astype(np.uint8)


def _e4m3() -> NDArray[np.float32]:
    """Return the values of the 256 codes: sign, 4 bits of exponent, 3 of mantissa; no infinity, and one NaN of either sign."""
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


def kv_format(identity: common_pb2.Identity, layout: Layout) -> KVFormat:
    """Return the format of one layer's keys (or values) of a block. Raises ValueError for an impossible format."""
    num_heads = len(layout.heads(identity.num_kv_heads))
    return KVFormat(layout.arrangement, layout.kv_dtype, layout.block_size, num_heads, identity.head_dim)


FP8Scales = Sequence[tuple[float, float]]


class Staging:
    """Hold one part in the sender's format: block i of the part is block i here. Satisfies KVMemory."""

    fd = None

    def __init__(self, part: Part, bytes_per_layer_block: int, num_planes: int = 2) -> None:
        self.layers = part.layers  # layers of the model
        self.num_layers = len(part.layers)
        self.num_blocks = part.num_blocks
        self.bytes_per_layer_block = bytes_per_layer_block
        self.num_planes = num_planes
        self.bytes = np.empty((self.num_layers, num_planes, self.num_blocks, 2 * bytes_per_layer_block // num_planes), np.uint8)
        self.part = replace(part, layer_start=0, layer_end=self.num_layers, block_start=0, block_end=self.num_blocks)
        self.block_ids = range(self.num_blocks)

    def memory(self) -> memoryview:
        return self.bytes.data.cast("B")

    def block_view(self, layer: int, plane: int, block_id: int) -> memoryview:
        shape = PoolShape(self.num_layers, self.num_blocks, self.bytes_per_layer_block, self.num_planes)
        start = shape.offset(layer, plane, block_id)
        return self.memory()[start : start + shape.plane_bytes]


@dataclass(frozen=True)
class Conversion:
    """Convert blocks of a sender's format into ours. `source_heads`, `heads`: the model's KV heads in either pool. `fp8_scales`:
    scales of each layer's keys and values where either pool is in fp8, the same for both; empty: all are 1."""

    source: KVFormat
    source_heads: range
    target: KVFormat
    heads: range
    fp8_scales: FP8Scales = ()

    def blocks(self, part: Part, num_blocks: int, first_token: int) -> range:
        """Return which of the request's `num_blocks` blocks in our pool `write` changes."""
        first = max(part.block_start * self.source.block_size, first_token)
        end = min(part.block_end * self.source.block_size, num_blocks * self.target.block_size)
        size = self.target.block_size
        return range(first // size, -(-end // size)) if first < end else range(0)

    def write(
        self,
        staging: Staging,
        part: Part,
        memory: KVMemory,
        block_ids: Sequence[int],
        first_token: int,
        check_interrupted: Callable[[], None],
    ) -> None:
        """Write the contents of `staging`, which are `part`, into `block_ids` (of the whole request) of `memory`; tokens before
        `first_token` stay as they are.

        It runs in a thread, one call at a time for a request: blocks are read, changed and written back.
        """
        begin = part.block_start * self.source.block_size
        first = max(begin, first_token)
        end = min(part.block_end * self.source.block_size, len(block_ids) * self.target.block_size)
        if first >= end:
            return
        pool = np.frombuffer(memory.memory(), np.uint8).reshape(memory.num_layers, 2, memory.num_blocks, -1)
        blocks = range(first // self.target.block_size, -(-end // self.target.block_size))
        ids = [block_ids[block] for block in blocks]
        try:
            for index, layer in enumerate(part.layers):
                check_interrupted()
                # The part's own layers: those of `memory` may be numbered otherwise.
                scales = self.fp8_scales[staging.layers[index]] if self.fp8_scales else (1.0, 1.0)
                for kv in (0, 1):
                    ours = self._ours(staging.bytes[index, kv], scales[kv], is_value=bool(kv))
                    numbers = ours.tokens(first - begin, end - begin)
                    offset = first - blocks.start * self.target.block_size
                    pool[layer, kv, ids] = self._merged(pool[layer, kv, ids], numbers, offset, is_value=bool(kv))
        finally:
            del pool  # an interruption's traceback must not keep the memory

    def _ours(self, raw: Bytes, fp8_scale: float, *, is_value: bool) -> Numbers:
        """Return the tokens of a part in our element type, reduced to the heads in our pool."""
        start = max(self.heads.start, self.source_heads.start)
        end = min(self.heads.stop, self.source_heads.stop)
        numbers = self.source.unpack(raw, is_value=is_value)
        numbers = numbers.heads(start - self.source_heads.start, end - self.source_heads.start)
        return numbers.converted(self.target.dtype, fp8_scale)

    def _merged(self, before: Bytes, numbers: Numbers, token: int, *, is_value: bool) -> Bytes:
        merged = self.target.unpack(before, is_value=is_value)
        merged.assign(token, max(self.heads.start, self.source_heads.start) - self.heads.start, numbers)
        return self.target.pack(merged, is_value=is_value)
