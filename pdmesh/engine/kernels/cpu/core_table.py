"""A table of a host's cores, which workers of that host map to lend each other those that they do not use.

A worker takes a slot for each of its threads. While it computes, its slots are marked as wanted; while it has nothing to
compute, one other worker may borrow each of them, and gives it back as soon as it is wanted (core_table.h, parallel.h). Where
the workers have more cores than slots have owners, since others will start later or have ended, the rest may be borrowed too.
The file holds times and marks only: whatever happens to the processes, tokens stay the same, as results depend on no number of
threads.

    header   magic (8 bytes), version, number of slots in use, number of shared cores (4 each)     64 bytes
    slot     whether it has an owner, until when it is wanted, until when and by which borrowed,
             how often it was borrowed, its core's number (-1: any), for how long others borrowed
             it, and of an owner's first slot, for how long the owner borrowed others'              64 bytes, 4 096 of them
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
import struct
import time
import weakref

from pdmesh.engine.outputs import CoreSeconds
from pdmesh.platform.fallbacks import process_cores, quota_cores, usable_cores

MAGIC, VERSION = b"pdmcores", 2
MAX_SLOTS, SLOT_BYTES = 4096, 64
NUM_BYTES = SLOT_BYTES * (1 + MAX_SLOTS)
_HEADER = struct.Struct("=8sIII")
_SLOT = struct.Struct("=QqQQqQQ")
_OWNER, _BORROWED, _REST = struct.Struct("=Qq"), 16, struct.Struct("=QqQQ")  # what is before the borrower's mark, and behind it
_PATIENCE_S = 10.0


class CoreTable:
    """Hold the mapped table and this process's slots [first, first + num_threads) in it, until `close()` or the process's end.

    The lock on a slot says that its owner lives. Locks are the process's: one engine of a process may have a table.
    """

    def __init__(self, path: str, num_threads: int, num_shared: int = 0) -> None:
        """Map the file, which is made where there is none, and take slots. `num_shared`: the cores that all its workers have
        together, those of none included; the largest holds that was given since there were no workers. ValueError, naming
        `core_table`, for a file that is no table, cannot be opened, may be written by others, or has no room."""
        self.num_threads = num_threads
        with contextlib.suppress(OSError):
            if _place(os.stat(path)) in _joined:  # to close another descriptor of the file would give up the locks
                raise ValueError(f"core_table: this process has joined {path} already; give each of its engines another file")
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ValueError(f"core_table: {path}: {error.strerror}; give one that can be written, or none") from None
        try:
            _check_owner(path, os.fstat(self._fd))
            _lock_table(self._fd, path)
            self._map(path)
            self.first = self._take(num_shared)
            _unlock(self._fd, 0)
        except BaseException:
            os.close(self._fd)
            raise
        place = _place(os.fstat(self._fd))
        _joined.add(place)
        self._release = weakref.finalize(
            self, _release, self._memory, self._fd, range(self.first, self.first + num_threads), place
        )

    def _map(self, path: str) -> None:
        size = os.fstat(self._fd).st_size
        if size == 0:
            os.ftruncate(self._fd, NUM_BYTES)
        elif size != NUM_BYTES:
            raise ValueError(f"core_table: {path} has {size} bytes, a table of cores has {NUM_BYTES}; give another file")
        self._memory = mmap.mmap(self._fd, NUM_BYTES)
        magic, version, *_ = _HEADER.unpack_from(self._memory)
        if magic in {MAGIC, bytes(len(MAGIC))} and not self._has_owners():  # one that workers of another version left, perhaps
            self._memory[:] = bytes(NUM_BYTES)
            _HEADER.pack_into(self._memory, 0, MAGIC, VERSION, 0, 0)
        elif (magic, version) != (MAGIC, VERSION):
            raise ValueError(f"core_table: {path} is no table of cores of version {VERSION}; give another file")

    def _has_owners(self) -> bool:
        """Return whether a process has a slot. Locks that are taken for this are given back."""
        if not _lock(self._fd, _offset(0), NUM_BYTES - _offset(0)):
            return True
        _unlock(self._fd, _offset(0), NUM_BYTES - _offset(0))
        return False

    def _take(self, num_shared: int) -> int:
        """Return the first of the slots, which lie side by side. What an owner that is gone has left behind in them ends here."""
        run: list[int] = []
        for slot in range(MAX_SLOTS):
            if len(run) == self.num_threads:
                break
            if _lock(self._fd, _offset(slot)):
                run.append(slot)
                continue
            for free in run:
                _unlock(self._fd, _offset(free))
            run = []
        if len(run) < self.num_threads:
            raise ValueError(f"core_table: no room for {self.num_threads} threads among its {MAX_SLOTS}; give another file")
        cores = usable_cores()  # of this thread, to which the worker may have bound it
        is_bound = len(cores) == self.num_threads and cores != process_cores()
        numbers = cores if is_bound else [-1] * self.num_threads
        for slot, core in zip(run, numbers, strict=True):
            _write(self._memory, slot, is_owned=1, core=core)
        magic, version, num_used, shared_before = _HEADER.unpack_from(self._memory)
        shared = max(shared_before, min(num_shared, MAX_SLOTS))
        _HEADER.pack_into(self._memory, 0, magic, version, max(num_used, run[-1] + 1), shared)
        return run[0]

    @property
    def address(self) -> int:
        """Return where the header lies in this process's memory, for the kernels. The table outlives what has it."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    @property
    def max_guests(self) -> int:
        """Return how many threads more than its own the worker may run: on all cores that its affinity and quota allow."""
        allowed = len(process_cores())
        return max(0, min(allowed, quota_cores() or allowed) - self.num_threads)

    def seconds(self) -> CoreSeconds:
        """Return for how long cores were held since start, counted when a core is given back, its holder's stops included."""
        slots = [_SLOT.unpack_from(self._memory, _offset(self.first + each)) for each in range(self.num_threads)]
        return CoreSeconds(sum(slot[5] for slot in slots) / 1e3, slots[0][6] / 1e3)

    def close(self) -> None:
        """Give the slots up; they are lent no more. Idempotent."""
        self._release()


def _release(memory: mmap.mmap, fd: int, slots: range, place: tuple[int, int]) -> None:
    for slot in slots:
        _write(memory, slot, is_owned=0, core=-1)
    os.close(fd)  # with the locks
    _joined.discard(place)


def _write(memory: mmap.mmap, slot: int, *, is_owned: int, core: int) -> None:
    """Begin a slot anew. The mark of one that borrows it now stays, and ends by itself: else it would be lent twice until
    then."""
    _OWNER.pack_into(memory, _offset(slot), is_owned, 0)
    _REST.pack_into(memory, _offset(slot) + _BORROWED + 8, 0, core, 0, 0)


_joined: set[tuple[int, int]] = set()


def _place(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _check_owner(path: str, found: os.stat_result) -> None:
    """Raise ValueError for a file that another user could shrink, which would end all that map it. One without a name is open to
    nobody else."""
    if found.st_nlink and (found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise ValueError(f"core_table: {path} belongs to another user, or others may write it; give a file of this user's own")


def _lock_table(fd: int, path: str) -> None:
    """Wait while another worker takes its slots, which takes it a moment."""
    until = time.monotonic() + _PATIENCE_S
    while not _lock(fd, 0):
        if time.monotonic() > until:
            raise ValueError(f"core_table: {path} has been locked for {_PATIENCE_S:g} s by a worker that starts; end it")
        time.sleep(0.01)


def _offset(slot: int) -> int:
    return SLOT_BYTES * (1 + slot)


def _lock(fd: int, offset: int, num_bytes: int = 1) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, num_bytes, offset)
    except OSError:
        return False
    return True


def _unlock(fd: int, offset: int, num_bytes: int = 1) -> None:
    fcntl.lockf(fd, fcntl.LOCK_UN, num_bytes, offset)
