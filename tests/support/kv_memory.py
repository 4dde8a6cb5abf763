"""A KV pool without an engine: memfd-backed bytes of any shape, sealed like the real one; private where nothing can be sealed."""

import fcntl
import mmap
import os
import random

from kvtransfer.layout import num_planes
from kvtransfer.manifest import bytes_per_layer_block
from pdmesh.platform import linux
from pdmesh.platform.capabilities import MEMFD
from pdmesh.v1 import common_pb2

F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; the fcntl module has no name for it
SEALS = F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class FakeKVMemory:
    """Satisfies kvtransfer.manifest.KVMemory. `seals` 0 leaves the memfd unsealed; `shared` False gives no descriptor."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        bytes_per_layer_block: int,
        *,
        seals: int = SEALS,
        shared: bool = True,
        num_planes: int = 2,
    ) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.bytes_per_layer_block = bytes_per_layer_block
        self.num_planes = num_planes
        self.num_bytes = num_layers * 2 * num_blocks * bytes_per_layer_block
        self.fd: int | None = None
        if not MEMFD.is_there:
            self._map = mmap.mmap(-1, self.num_bytes)
            return
        self.fd = linux.memfd("pdmesh-test-kv", self.num_bytes)
        self._map = mmap.mmap(self.fd, self.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        if seals:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        if not shared:
            os.close(self.fd)
            self.fd = None

    def memory(self) -> memoryview:
        return memoryview(self._map)

    def block_view(self, layer: int, plane: int, block_id: int) -> memoryview:
        size = 2 * self.bytes_per_layer_block // self.num_planes
        start = ((layer * self.num_planes + plane) * self.num_blocks + block_id) * size
        return self.memory()[start : start + size]

    def fill(self, seed: int) -> None:
        """Random bytes everywhere."""
        self.memory()[:] = random.Random(seed).randbytes(self.num_bytes)

    def block_bytes(self, block_id: int) -> bytes:
        """A block's keys and values of all layers."""
        planes = range(self.num_planes)
        return b"".join(self.block_view(layer, plane, block_id) for layer in range(self.num_layers) for plane in planes)

    def close(self) -> None:
        self._map.close()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def make_layout(
    block_size: int = 16, kv_dtype: str = "bfloat16", *, size: int = 1, rank: int = 0, arrangement: str = "plain"
) -> common_pb2.KVLayout:
    return common_pb2.KVLayout(
        block_size=block_size, kv_dtype=kv_dtype, tensor_parallel_size=size, tensor_parallel_rank=rank, arrangement=arrangement
    )


def make_identity(num_layers: int = 3, num_kv_heads: int = 2, head_dim: int = 8) -> common_pb2.Identity:
    return common_pb2.Identity(
        model="tiny",
        weights_hash="0" * 64,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        numeric_mode="cpu-fp32",
        protocol_version=1,
    )


def make_memory(identity: common_pb2.Identity, layout: common_pb2.KVLayout, num_blocks: int) -> FakeKVMemory:
    """A pool that fits identity and layout."""
    planes = num_planes(layout.arrangement)
    return FakeKVMemory(identity.num_layers, num_blocks, bytes_per_layer_block(identity, layout), num_planes=planes)
