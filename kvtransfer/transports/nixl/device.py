"""nixl between pools in memory of GPUs: NIXL reads a part into a buffer on the receiver's GPU, which copies it into its pool.

    sender: sums the part on its device, after the mark of its layers
    sender ── part header with block ids, part end with the sum ───► receiver: NIXL_READs the part into a buffer, in wire order;
                                                                     its device copies it into its pool, after its own mark,
                                                                     and sums WHAT IT STORES
           ◄── ok, if that is the sum ─────────────────────────────

NIXL never writes into the pool: late data arrives in a buffer ("room" in names), and the buffer of an abandoned read stays taken
until the read has ended (reader.py). What this transport does not support, such as another layout, goes over tcp: in the same
push if hello shows it, otherwise in the next attempt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from kvtransfer.errors import FrameError
from kvtransfer.manifest import KVMemory, Part, PoolShape, Rectangle, copies, refuse
from kvtransfer.stream import SocketStream
from kvtransfer.transports.common import (
    InlineIncoming,
    InlineOutgoing,
    SummedIncoming,
    SummedOutgoing,
    pulled,
    shape_of_sender,
    source_of,
    unusable,
)
from kvtransfer.transports.nixl.agent import HOST, KINDS, Agent, NixlFailed, NixlUnusable, Place
from kvtransfer.transports.nixl.reader import FIRST_PAUSE_S, MAX_PAUSE_S, PATIENCE_S, Read, Reads, Remote, wire_order
from pdmesh.v1 import transfer_pb2

if TYPE_CHECKING:
    from pdmesh.engine.kv_cache.ipc_pool import ShownPool
    from pdmesh.engine.kv_cache.streams import Mark


# The sender's pool in a hello over nixl


MAX_METADATA_BYTES = 64 << 10
_ADDRESS_END = 1 << 64


def check_pool(hello: transfer_pb2.TransferHello, memory: KVMemory) -> PoolShape:
    """Return the shape of the sender's pool; `memory` is ours, of the same model. Raises TransferRefused naming the field at
    fault."""
    shape = shape_of_sender(hello, memory)
    if not 0 < len(hello.nixl_metadata) <= MAX_METADATA_BYTES:
        raise refuse("hello.nixl_metadata", f"{len(hello.nixl_metadata)} bytes are not 1 to {MAX_METADATA_BYTES}")
    if shape.num_bytes == 0:
        raise refuse("hello.pool_num_blocks", "0; a pool has at least one block")
    if not 0 < hello.pool_address <= _ADDRESS_END - shape.num_bytes:
        raise refuse("hello.pool_address", f"no pool of {shape.num_bytes} bytes lies at {hello.pool_address:#x}")
    return shape


ROOM_BYTES = 64 << 20  # the largest part, so that Python's cost of a part is small beside it
NUM_ROOMS = 4
ROOM_S = 1.0  # limit of the wait for a free room: silent peers may hold all of them
POLL_S = 0.002  # no thread waits while nothing arrives

logger = logging.getLogger(__name__)


class NixlDeviceOutgoing(SummedOutgoing, InlineOutgoing):
    """Implement the sender's end of a connection over nixl between pools on GPUs."""

    def __init__(self, inline: InlineOutgoing, name: str, agent: Agent, memory: KVMemory, shown: ShownPool) -> None:
        InlineOutgoing.__init__(self, inline.stream, name)
        SummedOutgoing.__init__(self, inline.stream, shown, "nixl")
        self._agent = agent
        self._memory = memory

    async def send_hello(self, hello: transfer_pb2.TransferHello) -> None:
        place = place_of(self._shown)
        hello.nixl_metadata = self._agent.metadata
        hello.pool_address = self._shown.address
        hello.pool_num_blocks = self._memory.num_blocks
        hello.nixl_device.CopyFrom(transfer_pb2.NixlDevice(kind=place.kind, number=place.device))
        await super().send_hello(hello)


class DeviceReader(Reads):
    """Read into buffers in memory of the pool's device."""

    def __init__(self, shown: ShownPool) -> None:
        """Allocate the buffers. Raises NixlUnusable."""
        self.shown = shown
        try:
            shown.enter()
            self._rooms = shown.rooms(NUM_ROOMS, ROOM_BYTES)
        except RuntimeError as error:
            raise NixlUnusable(f"the device has no {NUM_ROOMS * ROOM_BYTES} bytes for what is read: {error}") from error
        super().__init__(self._rooms.address, NUM_ROOMS, ROOM_BYTES, place_of(shown))

    def store(self, read: Read, layers: range, block_ids: Sequence[int], after: Mark) -> Future[int]:
        """Write the buffer of `read` into the pool once the mark `after` is reached; return the sum of what was stored."""
        return self.shown.store(self._rooms.room(read.index), layers, block_ids, after)


class NixlDeviceIncoming(SummedIncoming, InlineIncoming):
    """Implement the receiver's end of a connection over nixl between pools on GPUs."""

    def __init__(self, stream: SocketStream, memory: KVMemory, reader: DeviceReader) -> None:
        super().__init__(stream)
        self._memory = memory
        self._reader = reader
        self._hello: transfer_pb2.TransferHello | None = None
        self._remote: Remote | None = None

    async def prepare(self, hello: transfer_pb2.TransferHello) -> None:
        """Check the hello. NIXL parses the metadata at the first part, because only then the delegate has checked the hello's
        token."""
        if not hello.HasField("nixl_device"):
            raise unusable("hello.nixl_device", "the sender's pool is in memory of its host, ours is not")
        if hello.nixl_device.kind not in KINDS:
            raise unusable("hello.nixl_device.kind", f"{hello.nixl_device.kind!r} is none of {', '.join(KINDS)}")
        check_pool(hello, self._memory)
        self._hello = hello

    async def pull_part(self, header: transfer_pb2.PartHeader, part: Part, block_ids: Sequence[int], after: Mark) -> int:
        if self._hello is None:
            raise FrameError("part before hello")
        if header.num_bytes > ROOM_BYTES:
            raise unusable("part.num_bytes", f"{header.num_bytes}; a room has {ROOM_BYTES}")
        source = source_of(header, part, check_pool(self._hello, self._memory))
        if self._remote is None:
            await self.stream.run(self._reach, self._hello.nixl_metadata)
        assert self._remote is not None, "the sender's agent is reached"
        reading = _Reading(self._reader, self._remote, self._hello, source)
        try:
            read = await self._read(reading)
            return await pulled(lambda: self._reader.store(read, part.layers, block_ids, after))
        finally:
            reading.close()

    def close(self) -> None:
        if self._remote is not None:
            self._reader.leave(self._remote)
        self._remote = None

    def _reach(self, metadata: bytes) -> None:
        self._reader.shown.enter()
        self._remote = self._reader.reach(metadata)

    async def _read(self, reading: _Reading) -> Read:
        """Return when the whole part is in a buffer. Raises TransferRefused, TimeoutError."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while (read := await self.stream.run(reading.turn, self.stream.check_interrupted)) is None:
            waited = loop.time() - begun
            if waited > self.stream.idle_timeout_s:
                raise TimeoutError
            if not reading.has_room and waited > ROOM_S:
                raise unusable("part", f"none of our {NUM_ROOMS} rooms on the device has become free")
            await asyncio.sleep(POLL_S)
        return read


class _Reading:
    """Read one part into a buffer."""

    def __init__(self, reader: DeviceReader, remote: Remote, hello: transfer_pb2.TransferHello, source: Rectangle) -> None:
        self._reader, self._remote = reader, remote
        self._place = Place(hello.nixl_device.kind, hello.nixl_device.number)
        self._pieces = copies(wire_order(source), source)
        self._pieces[:, 1] += hello.pool_address
        self._read: Read | None = None
        self._has_ended = False

    @property
    def has_room(self) -> bool:
        return self._read is not None

    def turn(self, check_interrupted: Callable[[], None]) -> Read | None:
        """Read for at most PATIENCE_S, in a thread; return the read when it is complete, else None. Raises TransferRefused."""
        self._reader.shown.enter()
        deadline, pause = time.monotonic() + PATIENCE_S, FIRST_PAUSE_S
        while time.monotonic() < deadline:
            check_interrupted()
            if self._advance():
                return self._read
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_S)
        return None

    def close(self) -> None:
        """Free the buffer once nothing is written into it; no thread may be inside, and no device may read it. Idempotent."""
        if self._read is not None and self._has_ended:
            self._reader.finish(self._read)
        elif self._read is not None:
            self._reader.abandon(self._read)
        self._read = None

    def _advance(self) -> bool:
        try:
            if self._read is None:
                self._read = self._reader.read(self._remote, self._pieces, self._place)
            self._has_ended = self._read is not None and self._reader.has_ended(self._read)
        except NixlFailed as error:
            self._read = None  # the reader has freed the buffer
            logger.warning("nixl could not read a part of another worker's pool: %s", error)
            raise unusable("part", f"nixl could not read it: {error}") from error
        return self._has_ended


def place_of(shown: ShownPool) -> Place:
    """Return the kind of memory of the pool. "DRAM" is host memory, which stands for GPU memory where there is no GPU."""
    if shown.device.type == "cpu":
        return HOST
    return Place("VRAM", shown.device.index or 0)
