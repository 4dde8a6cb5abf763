"""Reads of peers' pools into our own buffers, in host or GPU memory; what arrives is then copied into the pool. Only this process
writes into the pool.

A read cannot be cancelled: NIXL reports that it has released one, and UCX goes on writing (seen over UCX's tcp with a source that
was paused: 63 of 64 MiB came after the release). So an abandoned read keeps its buffer and its remote until it has ended.
"""

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import numpy as np

from kvtransfer.errors import TransferRefused
from kvtransfer.framing import copy_runs
from kvtransfer.manifest import KVMemory, PoolShape, Rectangle, copies, refuse
from kvtransfer.native.library import Runs, address_of
from kvtransfer.stream import TURN_MS
from kvtransfer.transports.nixl.agent import HOST, Agent, NixlFailed, OutsideMemory, Place

BUFFER_BYTES = 1 << 20  # so the data is still in the processor's cache when it is copied
NUM_BUFFERS = 32  # a part takes two; the others are for slow senders and reads that do not end
KEEP_S = 5.0  # how long an unused remote is kept for the next push of its sender


@dataclass
class Remote:
    """Hold a peer's agent. `num_users` counts connections and abandoned reads."""

    metadata: bytes
    name: str
    num_users: int = 0
    is_broken: bool = False
    idle_since: float = 0.0


@dataclass(frozen=True)
class Read:
    """Hold a read under way into buffer `index`."""

    handle: int
    index: int
    remote: Remote


class Reads:
    """Own the receiver's agent and its buffers, for any number of connections and threads."""

    def __init__(self, address: int, num_buffers: int, buffer_bytes: int, place: Place) -> None:
        """Open the agent. The buffers lie side by side from `address` on, and outlive it. Raises NixlUnusable."""
        self._address, self._buffer_bytes = address, buffer_bytes
        self._agent = Agent(address, num_buffers * buffer_bytes, place)
        self._lock = threading.Lock()
        self._free = list(range(num_buffers))
        self._left: list[Read] = []  # abandoned reads
        self._remotes: dict[bytes, Remote] = {}

    @property
    def num_remotes(self) -> int:
        return len(self._remotes)

    @property
    def num_free(self) -> int:
        """Return the number of free buffers."""
        return len(self._free)

    def reach(self, metadata: bytes) -> Remote:
        """Return the peer with this metadata, connected until leave(). May take a few milliseconds. Raises TransferRefused."""
        with self._lock:
            self._tidy()
            remote = self._remotes.get(metadata)
            if remote is None:
                remote = self._remotes[metadata] = Remote(metadata, self._add(metadata))
            if remote.is_broken:
                problem = "a read of this sender failed, and others of it have not ended"
                raise TransferRefused(grpc.StatusCode.UNAVAILABLE, f"nixl: {problem}")
            remote.num_users += 1
            return remote

    def leave(self, remote: Remote) -> None:
        """End one reach() of the remote."""
        with self._lock:
            self._drop_user(remote)
            self._tidy()

    def read(self, remote: Remote, pieces: Runs, source: Place = HOST) -> Read | None:
        """Begin to read `pieces` (offset in a buffer, address in `source` of the peer, bytes); None: no buffer is free. Raises
        TransferRefused for memory that the peer has not registered, and NixlFailed."""
        index = self._take()
        if index is None:
            return None
        begin = self._address + index * self._buffer_bytes
        try:
            return Read(self._agent.read(remote.name, pieces + np.array([begin, 0, 0]), source), index, remote)
        except OutsideMemory as error:
            self._give_back(index)
            problem = f"the pool there is not what the sender registered with NIXL: {error}"
            raise refuse("hello.pool_address", problem) from error
        except NixlFailed:
            remote.is_broken = True
            self._give_back(index)
            raise

    def has_ended(self, read: Read) -> bool:
        """Return whether the read has ended; its buffer then belongs to the caller until finish(). Raises NixlFailed, and frees
        the buffer."""
        try:
            return self._agent.has_ended(read.handle)
        except NixlFailed:
            # Late data in the buffer can at most corrupt a copy, which its checksum shows.
            read.remote.is_broken = True
            self._give_back(read.index)
            raise

    def finish(self, read: Read) -> None:
        """Free the buffer of the read."""
        self._give_back(read.index)

    def abandon(self, read: Read) -> None:
        """Give up a read that may be under way; its buffer is freed when the read has ended."""
        with self._lock:
            read.remote.num_users += 1
            self._left.append(read)
            self._tidy()

    def close(self) -> None:
        """Close the agent; idempotent. No connection may use it any more. Nothing is written into the buffers from here on."""
        with self._lock:
            self._agent.close()

    def _take(self) -> int | None:
        with self._lock:
            if not self._free:
                self._tidy()
            return self._free.pop() if self._free else None

    def _give_back(self, index: int) -> None:
        with self._lock:
            self._free.append(index)

    def _add(self, metadata: bytes) -> str:
        try:
            return self._agent.add_remote(metadata)
        except NixlFailed as error:
            raise TransferRefused(grpc.StatusCode.UNIMPLEMENTED, str(error), field="hello.nixl_metadata") from error

    def _drop_user(self, remote: Remote) -> None:
        remote.num_users -= 1
        remote.idle_since = time.monotonic()

    def _tidy(self) -> None:
        """Free the buffers of abandoned reads that have ended, and drop remotes that were unused for KEEP_S."""
        left, self._left = self._left, []
        for read in left:
            if self._is_over(read):
                self._free.append(read.index)
                self._drop_user(read.remote)
            else:
                self._left.append(read)
        now = time.monotonic()
        for remote in list(self._remotes.values()):
            if remote.num_users == 0 and (remote.is_broken or now - remote.idle_since >= KEEP_S):
                del self._remotes[remote.metadata]
                self._agent.remove_remote(remote.name)

    def _is_over(self, read: Read) -> bool:
        try:
            return self._agent.has_ended(read.handle)
        except NixlFailed:
            read.remote.is_broken = True
            return True


class Reader(Reads):
    """Read into buffers in host memory."""

    def __init__(self) -> None:
        """Allocate the buffers. Raises NixlUnusable."""
        self._memory = mmap.mmap(-1, NUM_BUFFERS * BUFFER_BYTES)
        super().__init__(address_of(memoryview(self._memory)), NUM_BUFFERS, BUFFER_BYTES, HOST)

    def view(self, read: Read) -> memoryview:
        """Return the bytes of the read; the caller releases the view."""
        with memoryview(self._memory) as whole:
            return whole[read.index * BUFFER_BYTES : (read.index + 1) * BUFFER_BYTES]

    def close(self) -> None:
        super().close()  # first, because the agent may be writing into the buffers
        self._memory.close()


# A part is read ahead from a peer's pool into buffers, in pieces of the wire order, then copied and summed


NUM_AHEAD = 2  # buffers of a part: one is filled while the other is copied
PATIENCE_S = 0.01  # then the thread serves other connections
FIRST_PAUSE_S, MAX_PAUSE_S = 20e-6, 1e-3


class Pull:
    """Copy the bytes of `source`, in a pool at `address` of `remote`, into `target` of `memory`.

    `remaining` counts bytes; `value` is the CRC-32C of what was stored.
    """

    def __init__(
        self, reader: Reader, remote: Remote, address: int, source: Rectangle, memory: KVMemory, target: Rectangle
    ) -> None:
        self._reader = reader
        self._remote = remote
        self._memory = memory
        wire = wire_order(target)
        reads, writes = copies(wire, source), copies(target, wire)
        reads[:, 1] += address
        self._to_come = zip(cut(reads, BUFFER_BYTES, 0), cut(writes, BUFFER_BYTES, 1), strict=True)
        self._next = next(self._to_come, None)
        self._under_way: deque[tuple[Read, Runs]] = deque()
        self.remaining = int(writes[:, 2].sum())
        self.value = 0

    def turn(self, check_interrupted: Callable[[], None]) -> int:
        """Copy what has arrived, for at most TURN_MS, in a thread; return the number of bytes. Raises NixlFailed,
        TransferRefused."""
        before, now = self.remaining, time.monotonic()
        deadline, patience, pause = now + TURN_MS / 1000, now + PATIENCE_S, FIRST_PAUSE_S
        while self.remaining and time.monotonic() < min(deadline, patience):
            check_interrupted()
            self._read_ahead()
            if self._copy_next():
                patience, pause = time.monotonic() + PATIENCE_S, FIRST_PAUSE_S
            else:
                time.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE_S)
        return before - self.remaining

    def close(self) -> None:
        """Abandon reads that are under way; idempotent. No thread may be inside."""
        while self._under_way:
            self._reader.abandon(self._under_way.popleft()[0])

    def _read_ahead(self) -> None:
        while self._next is not None and len(self._under_way) < NUM_AHEAD:
            reads, writes = self._next
            read = self._reader.read(self._remote, reads)
            if read is None:
                return
            self._under_way.append((read, writes))
            self._next = next(self._to_come, None)

    def _copy_next(self) -> bool:
        """Copy the oldest piece; return False if it has not arrived yet."""
        if not self._under_way:
            return False
        read, writes = self._under_way.popleft()
        if not self._reader.has_ended(read):
            self._under_way.appendleft((read, writes))
            return False
        try:
            with self._reader.view(read) as original, self._memory.memory() as target:
                self.value = copy_runs(self.value, target, original, writes)
        finally:
            self._reader.finish(read)
        self.remaining -= int(writes[:, 2].sum())
        return True


def wire_order(target: Rectangle) -> Rectangle:
    """Return the blocks of a part in a pool that holds nothing else: its bytes are contiguous, in wire order."""
    num_layers, num_blocks = len(target.layers), len(target.block_ids)
    shape = PoolShape(num_layers, num_blocks, target.shape.bytes_per_layer_block, target.shape.num_planes)
    return Rectangle(shape, range(num_layers), range(num_blocks))


def cut(table: Runs, num_bytes: int, column: int) -> Iterator[Runs]:
    """Yield a table of copies, [n, 3] with bytes in column 2, cut after every `num_bytes`. `column` holds offsets in wire order,
    which become relative to the cut."""
    ends = np.cumsum(table[:, 2])
    starts = ends - table[:, 2]
    for begin in range(0, int(ends[-1]), num_bytes):
        end = min(begin + num_bytes, int(ends[-1]))
        first, last = np.searchsorted(ends, begin, "right"), np.searchsorted(starts, end, "left")
        rows = table[first:last].copy()
        rows[-1, 2] -= ends[last - 1] - end
        skipped = begin - starts[first]
        rows[0] += np.array([skipped, skipped, -skipped])
        rows[:, column] -= begin
        yield rows
