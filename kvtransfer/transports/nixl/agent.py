"""One NIXL agent over UCX: memory that peers may read, and reads of peers' memory into it.

It uses the package's bindings, not its `nixl_agent`: the thread of that class polls without a pause, which takes a core
from the engine; with a delay, the same thread sleeps until there is something to do.
"""

import importlib
import logging
import os
import secrets
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from kvtransfer.native.library import Runs

PACKAGE = "nixl"
BACKEND = "UCX"
PROGRESS_DELAY_US = 100_000  # events wake the thread earlier
_NO_TAG = ""


@dataclass(frozen=True)
class Place:
    """Name a kind of memory as NIXL does. kind: "DRAM", the host, or "VRAM", the GPU with number `device` of its process."""

    kind: str = "DRAM"
    device: int = 0


HOST = Place()
KINDS = ("DRAM", "VRAM")


class NixlUnusable(Exception):
    """NIXL cannot be used in this process."""


class NixlFailed(ConnectionError):
    """An operation of NIXL has failed."""


class OutsideMemory(NixlFailed):
    """The read is outside the memory that the remote has registered."""


def is_installed() -> bool:
    """Return whether the package is installed, without importing it."""
    return find_spec(PACKAGE) is not None


@cache
def bindings() -> Any:
    """Return the package's bindings. Raises NixlUnusable."""
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # otherwise its warnings mix with the output of our processes
    raises = logging.raiseExceptions
    try:
        found = importlib.import_module(f"{PACKAGE}._bindings")
    except (ImportError, OSError) as error:
        remedy = "pip install --no-deps nixl nixl-cu12"
        raise NixlUnusable(f"the package does not load: {error}; install it with {remedy}") from error
    finally:
        logging.raiseExceptions = raises  # the package turns this off for the whole process
    theirs = logging.getLogger(PACKAGE)
    theirs.handlers.clear()  # the package's handler prints to standard output
    theirs.propagate = True
    return found


@cache
def _errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that the bindings raise."""
    named = [value for name, value in vars(bindings()).items() if name.endswith("Error")]
    return (*(each for each in named if isinstance(each, type) and issubclass(each, Exception)), RuntimeError)


class Agent:
    """Own a NIXL agent with `num_bytes` of memory of `place` from `address` on, which must outlive it. Its methods may be called
    from any thread; for GPU memory, from a thread in which that GPU is current.

    `metadata` is what peers need to read that memory.
    """

    def __init__(self, address: int, num_bytes: int, place: Place = HOST) -> None:
        """Open the agent, which takes a tenth of a second. Raises NixlUnusable, also where the backend does not support such
        memory."""
        nixl = bindings()
        settings = nixl.nixlAgentConfig()
        settings.useProgThread = True  # a read may need an answer of its source
        settings.useListenThread = False
        settings.pthrDelay = PROGRESS_DELAY_US
        settings.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        try:
            self._agent = nixl.nixlAgent(f"pdmesh-{secrets.token_hex(16)}", settings)
            self._agent.createBackend(BACKEND, {})
            self._memory = nixl.nixlRegDList(_kind(place), [(address, num_bytes, place.device, _NO_TAG)])
            self._agent.registerMem(self._memory, [])
            self.metadata = bytes(self._agent.getLocalMD())
        except _errors() as error:
            self.close()  # a stored error would keep its threads and files open
            raise NixlUnusable(f"no agent over {BACKEND} with {num_bytes} bytes of {place.kind}: {error}") from error
        self._nixl, self._place = nixl, place

    def add_remote(self, metadata: bytes) -> str:
        """Make another agent's memory readable and return its name. Raises NixlFailed."""
        try:
            name = self._agent.loadRemoteMD(metadata)
        except _errors() as error:
            raise NixlFailed(f"the metadata is of no use: {error}") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_remote(self, name: str) -> None:
        """Disconnect from the remote. No read of its memory may be under way: the end of such a read could not be detected any
        more."""
        try:
            self._agent.invalidateRemoteMD(name)
        except _errors() as error:
            logging.getLogger(__name__).info("nixl: %s was gone already: %s", name, error)

    def read(self, remote: str, pieces: Runs, source: Place = HOST) -> int:
        """Begin to read `pieces` (address here, address there in `source`, bytes) and return a handle. Raises OutsideMemory,
        NixlFailed."""
        here, there = self._list(pieces[:, [0, 2]], self._place), self._list(pieces[:, [1, 2]], source)
        try:
            handle = int(self._agent.createXferReq(self._nixl.NIXL_READ, here, there, remote, _NO_TAG, []))
        except _errors() as error:
            raise OutsideMemory(f"a read was refused: {error}") from error
        try:
            status = self._agent.postXferReq(handle, _NO_TAG)
        except _errors() as error:
            self._release(handle)
            raise NixlFailed(f"a read cannot begin: {error}") from error
        if status not in (self._nixl.NIXL_SUCCESS, self._nixl.NIXL_IN_PROG):
            self._release(handle)
            raise NixlFailed(f"a read cannot begin: {status}")
        return handle

    def has_ended(self, handle: int) -> bool:
        """Return whether the read has ended, and release its handle then. Raises NixlFailed for a read that failed, whose handle
        is released too.

        The handle of a read under way is never released: NIXL would report success, and go on writing.
        """
        try:
            status = self._agent.getXferStatus(handle)
        except _errors() as error:
            self._release(handle)
            raise NixlFailed(f"a read failed: {error}") from error
        if status == self._nixl.NIXL_IN_PROG:
            return False
        self._release(handle)
        if status != self._nixl.NIXL_SUCCESS:
            raise NixlFailed(f"a read failed: {status}")
        return True

    def close(self) -> None:
        """End all reads: nothing reads or writes the memory from here on. Idempotent."""
        self._agent = self._memory = None

    def _release(self, handle: int) -> None:
        try:
            self._agent.releaseXferReq(handle)
        except _errors() as error:
            logging.getLogger(__name__).warning("nixl: cannot release a read: %s", error)

    def _list(self, pieces: Runs, place: Place) -> Any:
        rows = np.full((len(pieces), 3), place.device, np.uint64)  # address, bytes, device
        rows[:, :2] = pieces
        return self._nixl.nixlXferDList(_kind(place), rows)


def _kind(place: Place) -> Any:
    return getattr(bindings(), f"{place.kind}_SEG")
