"""A pool in memory of a GPU that begins with the bytes of one on the host, for tests of what only a GPU can show."""

from __future__ import annotations

import torch

from kvtransfer.staging import StagedMemory
from pdmesh.engine.kv_cache.cuda_ipc import CudaSharing
from pdmesh.engine.kv_cache.ipc_pool import ShownPool
from pdmesh.engine.kv_cache.staging import Marks, Staging, StagingSizes
from pdmesh.engine.kv_cache.streams import streams_of
from tests.support.host_sharing import PART_BYTES, pool_of
from tests.support.kv_memory import FakeKVMemory


class GpuMemory(StagedMemory):
    """As a worker on a GPU makes it (pdmesh/worker/kv_memory.py)."""

    def __init__(self, memory: FakeKVMemory, block_size: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self._host = memory
        self._pool = pool_of(memory, block_size).to(device)
        streams, sizes = streams_of(device), StagingSizes(num_pieces=2, piece_bytes=6 * memory.bytes_per_layer_block)
        out, back = (Staging(self._pool, streams, sizes) for _ in range(2))
        shown = ShownPool(self._pool, CudaSharing(device), streams, part_bytes=PART_BYTES)
        shown.warm(streams.mark)
        super().__init__(memory, out, back, Marks(streams), shown)

    def show(self) -> None:
        """What the GPU holds now is what checks look at."""
        self._host.memory()[:] = self._pool.cpu().numpy().tobytes()
