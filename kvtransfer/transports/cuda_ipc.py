"""cuda_ipc: the receiver's GPU reads the sender's pool in GPU memory. For processes of one user on one host.

    sender ── hello + the driver's handle of its pool, over a Unix socket ──► receiver: opens it, once for each pool
    sender: sums the part on its device, after the mark of its layers
    sender ── part header with block ids, part end with the sum ────────────► receiver: its device copies from pool to pool,
                                                                              after its own mark, and sums WHAT IT STORES
           ◄── ok, if that is the sum ──────────────────────────────────────

No process writes into another's pool, so a sender that was paused and resumes does no harm: where it has freed blocks meanwhile,
the copy's sum differs, and its blocks are not read before the commit. A part is announced when it is final, so the two processes
share no event, and a peer that is silent holds nothing of the device. A push that is cancelled, and `quiesce`, wait for the
device; the other end learns of it from its connection.

When a process dies its connection ends, and with it the push; a copy that runs then goes on reading
(pdmesh/engine/kv_cache/cuda_ipc.py says what the driver promises), and its sum decides. Errors of the device are answered
with UNIMPLEMENTED, so the next attempt uses another transport. So are other layouts, memory without a handle, and devices that
cannot reach each other. Whether the sender's pool can be opened is known only by the attempt to open it.

The driver's handle opens the whole pool, also for writing: the kernel vouches that both ends belong to one user, as for shm.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from kvtransfer.errors import FrameError, TransportUnavailable
from kvtransfer.layout import Reach, Scope
from kvtransfer.manifest import MAX_PULLED_BYTES, KVMemory, Part, PoolShape, refuse
from kvtransfer.staging import StagedMemory
from kvtransfer.stream import SocketStream, expect
from kvtransfer.transports.common import (
    OpenedPools,
    SummedIncoming,
    SummedOutgoing,
    UnixSocketTransport,
    pulled,
    shape_of_sender,
    shown_by,
    source_of,
    unusable,
)
from pdmesh.v1 import common_pb2, transfer_pb2

if TYPE_CHECKING:  # transfers of KV in CPU memory need no torch
    from pdmesh.engine.kv_cache.ipc_pool import PeerPool, ShownPool
    from pdmesh.engine.kv_cache.streams import Mark

MAX_HANDLE_BYTES = 256


class CudaIpcOutgoing(SummedOutgoing):
    """Implement the sender's end of a connection over cuda_ipc."""

    def __init__(self, stream: SocketStream, memory: StagedMemory, shown: ShownPool) -> None:
        super().__init__(stream, shown, CudaIpcTransport.name)
        self._memory = memory
        self._handle = shown.handle

    async def send_hello(self, hello: transfer_pb2.TransferHello) -> None:
        handle = self._handle
        hello.pool_num_blocks = self._memory.num_blocks
        hello.device_pool.CopyFrom(transfer_pb2.DevicePool(handle=handle.handle, offset=handle.offset, device=handle.device))
        await self.stream.write_message(transfer_pb2.TransferMessage(hello=hello))


class CudaIpcIncoming(SummedIncoming):
    """Implement the receiver's end of a connection over cuda_ipc."""

    def __init__(self, stream: SocketStream, shown: ShownPool, memory: KVMemory, pools: OpenedPools) -> None:
        self.stream = stream
        self._shown = shown
        self._memory = memory
        self._pools = pools
        self._shape: PoolShape | None = None
        self._source: PeerPool | None = None

    async def receive_hello(self) -> transfer_pb2.TransferHello:
        return (await expect(self.stream, "hello")).hello

    async def prepare(self, hello: transfer_pb2.TransferHello) -> None:
        pool, shape = hello.device_pool, shape_of_sender(hello, self._memory)
        if not 0 < len(pool.handle) <= MAX_HANDLE_BYTES:
            raise refuse("hello.device_pool.handle", f"{len(pool.handle)} bytes are not 1 to {MAX_HANDLE_BYTES}")
        if shape.num_bytes == 0:
            raise refuse("hello.pool_num_blocks", "0; a pool has at least one block")
        key = (hello.sender_epoch, pool.handle, pool.offset, pool.device, shape)
        self._source = await self._pools.acquire(key, lambda: self._open(pool, shape.num_blocks))
        self._shape = shape

    async def pull_part(self, header: transfer_pb2.PartHeader, part: Part, block_ids: Sequence[int], after: Mark) -> int:
        if self._source is None or self._shape is None:
            raise FrameError("part before hello")
        source = source_of(header, part, self._shape)
        peer = self._source
        return await pulled(lambda: self._shown.pull(peer, source.block_ids, part.layers, block_ids, after))

    def close(self) -> None:
        if self._source is not None:
            self._pools.release(self._source)
            self._source = None

    async def _open(self, pool: transfer_pb2.DevicePool, num_blocks: int) -> PeerPool:
        from pdmesh.engine.kv_cache.cuda_ipc import NotShared, PoolHandle

        opened: list[PeerPool] = []
        handle = PoolHandle(pool.handle, pool.offset, pool.device)
        try:
            await self.stream.run(lambda: opened.append(self._shown.open(handle, num_blocks)))
        except NotShared as error:
            raise unusable(f"hello.device_pool.{error.field}", error.why) from error
        except BaseException:
            for each in opened:  # the caller was cancelled meanwhile
                each.close()
            raise
        return opened[0]


class CudaIpcTransport(UnixSocketTransport):
    """Transfer between processes of one user on one host whose pools lie in GPU memory."""

    name = "cuda_ipc"
    reach = Reach(Scope.HOST, same_layout=True)
    summary = "one copy from GPU to GPU"
    max_shown_bytes = MAX_PULLED_BYTES

    def __init__(self) -> None:
        self._pools = OpenedPools()

    def sends(self, memory: KVMemory) -> bool:
        return self.works_here and shown_by(memory) is not None

    def receives(self, memory: KVMemory) -> bool:
        return self.sends(memory)

    async def connect(
        self, endpoint: common_pb2.TransferEndpoint, memory: KVMemory, executor: Executor, reply_timeout_s: float
    ) -> CudaIpcOutgoing:
        shown = shown_by(memory)
        if shown is None or not isinstance(memory, StagedMemory):
            raise TransportUnavailable("cuda_ipc: our pool is not shown to other processes")
        return CudaIpcOutgoing(await self._connected(endpoint, executor, reply_timeout_s), memory, shown)

    def accept(self, sock: socket.socket, memory: KVMemory, executor: Executor, idle_timeout_s: float) -> CudaIpcIncoming:
        stream, shown = self._accepted(sock, executor, idle_timeout_s), shown_by(memory)
        assert shown is not None, "a transport that listens can receive"
        return CudaIpcIncoming(stream, shown, memory, self._pools)

    def close(self) -> None:
        self._pools.close()
