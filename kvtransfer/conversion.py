"""KV of one layout into a pool of another: what arrived is staged, checked, and then written block by block in our form.

    wire ──► Staging (the sender's form) ──CRC──► Conversion.write ──► our pool: other block size, element type, heads

Nothing is staged where both forms are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvtransfer.layout import Layout
from kvtransfer.manifest import Part
from kvtransfer.memory import KVMemory, PoolShape
from pdmesh.engine.kv_cache.format import Bytes, KVFormat, Numbers
from pdmesh.v1 import common_pb2


def kv_format(identity: common_pb2.Identity, layout: Layout) -> KVFormat:
    """The form of one layer's keys (or values) of a block. Raises ValueError for one that cannot be."""
    num_heads = len(layout.heads(identity.num_kv_heads))
    return KVFormat(layout.arrangement, layout.kv_dtype, layout.block_size, num_heads, identity.head_dim)


FP8Scales = Sequence[tuple[float, float]]


class Staging:
    """Room for one part in the sender's form: block i of the part is block i here. Satisfies KVMemory."""

    fd = None

    def __init__(self, part: Part, bytes_per_layer_block: int) -> None:
        self.layers = part.layers  # of the model
        self.num_layers = len(part.layers)
        self.num_blocks = part.num_blocks
        self.bytes_per_layer_block = bytes_per_layer_block
        self.bytes = np.empty((self.num_layers, 2, self.num_blocks, bytes_per_layer_block), np.uint8)
        self.part = replace(part, layer_start=0, layer_end=self.num_layers, block_start=0, block_end=self.num_blocks)
        self.block_ids = range(self.num_blocks)

    def memory(self) -> memoryview:
        return self.bytes.data.cast("B")

    def block_view(self, layer: int, kv: int, block_id: int) -> memoryview:
        start = PoolShape(self.num_layers, self.num_blocks, self.bytes_per_layer_block).offset(layer, kv, block_id)
        return self.memory()[start : start + self.bytes_per_layer_block]


@dataclass(frozen=True)
class Conversion:
    """From a sender's form to ours. `source_heads`, `heads`: KV heads of the model that lie in either pool. `fp8_scales`: of each
    layer's keys and values where either pool is in fp8, the same for both; empty: all are 1."""

    source: KVFormat
    source_heads: range
    target: KVFormat
    heads: range
    fp8_scales: FP8Scales = ()

    def blocks(self, part: Part, num_blocks: int, first_token: int) -> range:
        """Those of a request's `num_blocks` of ours that `write` changes."""
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
        """Write what `staging` holds of `part` into `block_ids` (the whole request's) of `memory`; nothing before `first_token`.

        Runs in a thread, one at a time for a request: blocks are read, changed and written back.
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
        """Tokens of a part in our element type, only the heads that we have."""
        start = max(self.heads.start, self.source_heads.start)
        end = min(self.heads.stop, self.source_heads.stop)
        numbers = self.source.unpack(raw, is_value=is_value)
        numbers = numbers.heads(start - self.source_heads.start, end - self.source_heads.start)
        return numbers.converted(self.target.dtype, fp8_scale)

    def _merged(self, before: Bytes, numbers: Numbers, token: int, *, is_value: bool) -> Bytes:
        merged = self.target.unpack(before, is_value=is_value)
        merged.assign(token, max(self.heads.start, self.source_heads.start) - self.heads.start, numbers)
        return self.target.pack(merged, is_value=is_value)
