"""The KV of vLLM's CPU backend in memory that pdmesh's transfers read and write: one pool of all layers, keys and values joined.

vLLM allocates a tensor for each layer, [blocks, kv_heads, block_size, 2 * head_dim]; of a head, the first half of the numbers are
keys and the second are values, in an order that depends on the machine's instructions. `adopt` moves these tensors into one
mapping that peers may map as well; to vLLM they stay the same tensors.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from pdmesh.engine.kv_cache.pool import private_memory, shared_memory
from pdmesh_vllm.ranks.link import check_alike


class JoinedPool:
    """Satisfy kvtransfer.manifest.KVMemory with [num_layers, num_blocks, block_bytes] bytes."""

    num_planes = 1

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_bytes: int,
        *,
        shared: bool,
        before_seal: Callable[[int], None] | None = None,
    ) -> None:
        """`block_bytes`: of one block's keys and values in one layer. `shared`: other processes may map it, to read; those that
        write get its descriptor by `before_seal`."""
        self.num_layers, self.num_blocks = num_layers, num_blocks
        self.bytes_per_layer_block = block_bytes // 2
        num_bytes = num_layers * num_blocks * block_bytes
        self.fd: int | None = None
        if shared:
            self._map, self.fd = shared_memory("pdmesh-vllm-kv", num_bytes, before_seal)
        else:
            self._map = private_memory(num_bytes)

    def memory(self) -> memoryview:
        """Return the whole pool, writable, as bytes."""
        return memoryview(self._map)

    def block_view(self, layer: int, plane: int, block_id: int) -> memoryview:
        """Return the bytes of one block in one layer, writable. Raises IndexError outside the pool."""
        for name, value, limit in (
            ("layer", layer, self.num_layers),
            ("plane", plane, 1),
            ("block_id", block_id, self.num_blocks),
        ):
            if not 0 <= value < limit:
                raise IndexError(f"{name} {value} is not in [0, {limit})")
        size = 2 * self.bytes_per_layer_block
        start = (layer * self.num_blocks + block_id) * size
        return self.memory()[start : start + size]

    def zero(self, block_ids: Sequence[int]) -> None:
        """Write zeros into blocks, in all layers."""
        zeros = bytes(2 * self.bytes_per_layer_block)
        for layer in range(self.num_layers):
            for block_id in block_ids:
                self.block_view(layer, 0, block_id)[:] = zeros

    def layer(self, index: int, like: Tensor) -> Tensor:
        """Return a layer's bytes as a tensor of the same dtype and shape as `like`."""
        count = like.numel()
        offset = index * count * like.element_size()
        return torch.frombuffer(self._map, dtype=like.dtype, count=count, offset=offset).view(like.shape)

    def close(self) -> None:
        """Close the descriptor. The mapping stays as long as vLLM's tensors do."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        with contextlib.suppress(BufferError):
            if isinstance(self._map, mmap.mmap):
                self._map.close()


def adopt(caches: Mapping[str, Tensor], *, shared: bool) -> JoinedPool:
    """Move vLLM's KV tensors into a pool. Raises ValueError for tensors that are not alike, contiguous and on the CPU."""
    first = check_alike(caches)
    num_blocks = first.shape[0]
    pool = JoinedPool(len(caches), num_blocks, first.numel() * first.element_size() // num_blocks, shared=shared)
    for index, cache in enumerate(caches.values()):
        cache.set_(pool.layer(index, cache))  # type: ignore[call-overload]  # torch types set_ for storages alone
    return pool
