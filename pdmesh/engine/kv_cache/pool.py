"""The KV pool: one tensor for all layers' keys and values, in memory that peers can be shown but not change.

    tensor [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]        keys = [:, 0], values = [:, 1]

On Linux CPU a shared pool is a memfd: anonymous shared memory without a name, which goes when its last mapping and descriptor
go, however the process ends. Our own writable mapping is made first; then the file is sealed, so that a peer that is given the
descriptor can only map it read-only and can neither shrink nor grow it. A pool that nobody maps is private memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.engine.kv_cache.kv_pages import TouchedPages
from pdmesh.engine.kv_cache.large_pages import private_memory
from pdmesh.engine.kv_cache.sealed_memory import sealed_memory


@dataclass(frozen=True)
class KVShape:
    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        return (self.num_layers, 2, self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def bytes_per_layer_block(self) -> int:
        """Bytes of one block's keys (or values) in one layer."""
        return self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: keys and values of all layers."""
        return self.num_layers * 2 * self.bytes_per_layer_block

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block


class KVPool:
    """Owner of the pool's memory. After close(), neither `tensor` nor `memory()` may be used.

    Views handed out (`block_view`, `memory`) must be released by their holders: one that is still held at close() keeps the
    mapping, and only the mapping, until it is dropped.
    """

    def __init__(
        self,
        shape: KVShape,
        device: str = "cpu",
        *,
        shared: bool = True,
        before_seal: Callable[[int], None] | None = None,
    ) -> None:
        """`shared` False: nobody will map the pool, so it may lie in large pages, which shared memory mostly has not: over long
        contexts attention is then up to twice as fast. `before_seal` gets the descriptor of shared memory while it can still be
        mapped for writing: by processes that compute with this one."""
        self.shape = shape
        self.fd: int | None = None
        self._map: mmap.mmap | None = None
        self._pages: TouchedPages | None = None
        if device == "cpu":
            can_share = shared and sys.platform == "linux"
            num_bytes = shape.num_bytes
            if can_share:
                self._map, self.fd = sealed_memory("pdmesh-kv", num_bytes, before_seal)
            else:
                self._map = private_memory(num_bytes)
            self._tensor: Tensor | None = torch.frombuffer(self._map, dtype=shape.dtype).view(shape.tensor_shape)
            planes = 2 * shape.num_layers
            self._pages = TouchedPages(self._tensor.data_ptr(), planes, shape.num_blocks, shape.bytes_per_layer_block)
        else:
            # By bytes: not every operator of torch takes every narrow dtype.
            zeros = torch.zeros(shape.num_bytes, dtype=torch.uint8, device=device)
            self._tensor = zeros.view(shape.dtype).view(shape.tensor_shape)

    @property
    def tensor(self) -> Tensor:
        if self._tensor is None:
            raise ValueError("the KV pool is closed")
        return self._tensor

    @property
    def num_layers(self) -> int:
        return self.shape.num_layers

    @property
    def num_blocks(self) -> int:
        return self.shape.num_blocks

    @property
    def bytes_per_layer_block(self) -> int:
        return self.shape.bytes_per_layer_block

    def memory(self) -> memoryview:
        """The whole pool as writable bytes. Raises ValueError when closed or not in CPU memory."""
        if self._map is None:
            raise ValueError("the KV pool is closed or not in CPU memory; its bytes cannot be viewed")
        return memoryview(self._map)

    def block_view(self, layer: int, kv: int, block_id: int) -> memoryview:
        """Writable bytes of one block's keys (kv=0) or values (kv=1) in one layer. Raises IndexError outside the pool."""
        for name, value, limit in (("layer", layer, self.num_layers), ("kv", kv, 2), ("block_id", block_id, self.num_blocks)):
            if not 0 <= value < limit:
                raise IndexError(f"{name} {value} is not in [0, {limit})")
        size = self.bytes_per_layer_block
        start = ((layer * 2 + kv) * self.num_blocks + block_id) * size
        with self.memory() as whole:
            return whole[start : start + size]

    def reach(self, block_id: int) -> None:
        """Blocks up to this one are in use: those behind it will be soon. From one thread."""
        if self._pages is not None:
            self._pages.reach(block_id)

    def close(self) -> None:
        """Gives the memory back. May be called again."""
        if self._pages is not None:
            self._pages.close()
            self._pages = None
        self._tensor = None
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        if self._map is not None:
            # A view still held elsewhere pins the mapping (BufferError); it is unmapped when that view is dropped.
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None
