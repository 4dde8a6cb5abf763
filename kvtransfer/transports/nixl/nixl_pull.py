"""One part on its way out of a peer's pool: read ahead into buffers, a piece of the wire order each, then copied and summed."""

import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from kvtransfer.checksum import copy_runs
from kvtransfer.memory import KVMemory, PoolShape, Rectangle, copies
from kvtransfer.native.library import Runs
from kvtransfer.stream import TURN_MS
from kvtransfer.transports.nixl.reader import BUFFER_BYTES, Read, Reader, Remote

NUM_AHEAD = 2  # buffers of a part: one is read into while the other is copied
PATIENCE_S = 0.01  # then the thread is for others
FIRST_PAUSE_S, MAX_PAUSE_S = 20e-6, 1e-3


class Pull:
    """The bytes of `source`, in a pool from `address` on of `remote`, into `target` of `memory`.

    `remaining` are bytes, `value` is the CRC-32C of what was stored.
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
        """Copy what has come, for at most TURN_MS, in a thread; returns the bytes. Raises NixlFailed, TransferRefused."""
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
        """Leave what is under way to the reader; idempotent. No thread may be inside."""
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
        """Copy the oldest piece; False: it is not here yet."""
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
    """The bytes of a part as if they lay side by side: a pool that holds nothing else."""
    num_layers, num_blocks = len(target.layers), len(target.block_ids)
    shape = PoolShape(num_layers, num_blocks, target.shape.bytes_per_layer_block)
    return Rectangle(shape, range(num_layers), range(num_blocks))


def cut(table: Runs, num_bytes: int, column: int) -> Iterator[Runs]:
    """Cut a table of copies, [n, 3] with bytes in column 2, behind every `num_bytes`; `column`, which counts those bytes, counts
    from each cut."""
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
