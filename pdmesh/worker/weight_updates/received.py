"""Weights that come over the network: files in a folder of this host's cache, beside links to what else their model needs.

first message  num_bytes ──► room on the disk? ──► $PDMESH_CACHE/received/RANDOM/, with links to the rest
each           file, data ──► appended
last           sha256 ──► compared
loaded         ──► $PDMESH_CACHE/received/sent-HASH/, while workers of this host compute with them; else removed
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, ParamSpec, TypeVar

from pdmesh.engine.loader.hash import cache_folder
from pdmesh.runtime.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from pdmesh.v1 import worker_pb2

P = ParamSpec("P")
T = TypeVar("T")
MAX_FILES = 1024
MAX_BYTES = 1 << 44
ABANDONED_S = 24 * 3600.0
_KEPT, _TAKEN = "sent-", "weights-"
_HASH = re.compile(r"[A-Za-z0-9._-]{1,200}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors(\.index\.json)?")
_WEIGHTS = re.compile(r".*\.(safetensors|safetensors\.index\.json|bin|bin\.index\.json|pt|pth|gguf)")


class ReceivedWeights:
    """Take the files of one stream. Every method but `remove` is awaited one after the other."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        """Use `begin`."""
        self.folder = folder
        self._num_bytes, self._num_left, self._num_files = num_bytes, num_bytes, 0
        self._digest, self._expected = hashlib.sha256(), b""
        self._file: BinaryIO | None = None

    @staticmethod
    async def begin(model: Path, first: worker_pb2.SendWeightsRequest) -> ReceivedWeights:
        """Make the folder, with all that the weights of `model`, a folder, need beside them, and take the first message. Raises
        MeshError."""
        if not 1 <= first.num_bytes <= MAX_BYTES:
            raise InvalidArgument("num_bytes", f"{first.num_bytes} is not 1 to {MAX_BYTES}; the first message gives it")
        if await asyncio.to_thread(model.is_file):
            remedy = "give a folder that the worker sees (UpdateWeights)"
            raise FailedPrecondition("file", f"the model of this worker is one file, {model.name}; {remedy}")
        received = ReceivedWeights(await _to_its_end(_folder_for, model, first.num_bytes), first.num_bytes)
        try:
            await received.take(first)
        except BaseException:
            received.remove()
            raise
        return received

    async def take(self, message: worker_pb2.SendWeightsRequest) -> None:
        """Take the next message. Raises InvalidArgument, or ResourceExhausted when the disk is full."""
        if self._expected:
            raise InvalidArgument("sha256", "is in a message that is not the last one")
        if len(message.data) > self._num_left:
            raise InvalidArgument("data", f"there are more than the {self._num_bytes} bytes of the first message's num_bytes")
        if message.sha256 and len(message.sha256) != hashlib.sha256().digest_size:
            raise InvalidArgument("sha256", f"has {len(message.sha256)} bytes; a SHA-256 has 32")
        if message.data and not message.file and self._file is None:
            raise InvalidArgument("file", "is empty in the first message with data; give the name of the file")
        if message.file:
            self._check_name(message.file)
        self._expected = message.sha256
        self._num_left -= len(message.data)
        try:
            await _to_its_end(self._write, message)
        except OSError as error:
            raise ResourceExhausted(f"{self.folder.parent} cannot hold the weights ({error.strerror})") from error

    async def end(self) -> None:
        """Close the last file. Raises InvalidArgument unless everything has come as it was sent."""
        self._close()
        if self._num_left:
            raise InvalidArgument("data", f"the stream ended {self._num_left} bytes before its num_bytes ({self._num_bytes})")
        if not self._expected:
            raise InvalidArgument("sha256", "is missing; the last message gives that of all data")
        if self._digest.digest() != self._expected:
            raise InvalidArgument("sha256", "is not that of the data that has come; send the weights again")

    def remove(self) -> None:
        """Remove the folder, unless it was kept; idempotent. A file of it that is mapped stays until it is unmapped."""
        self._close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def keep(self, weights_hash: str) -> KeptWeights | None:
        """Have this host keep the files as those of these weights, and hold them; None where it cannot."""
        self._close()
        kept = self.folder.with_name(_KEPT + weights_hash)
        try:
            self.folder.rename(kept)
        except OSError:  # another worker of this host keeps them already
            return KeptWeights.find(weights_hash)
        held = KeptWeights.find(weights_hash)
        if held is None:  # a file system that has no locks: nobody could remove it later
            shutil.rmtree(kept, ignore_errors=True)
        return held

    def _check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise InvalidArgument("file", f"{name[:200]!r} is no plain name that ends in .safetensors or .safetensors.index.json")
        if (self.folder / name).exists():
            raise InvalidArgument("file", f"{name!r} comes twice")
        self._num_files += 1
        if self._num_files > MAX_FILES:
            raise InvalidArgument("file", f"there are more than {MAX_FILES}")

    def _write(self, message: worker_pb2.SendWeightsRequest) -> None:
        if message.file:
            self._close()
            self._file = (self.folder / message.file).open("xb", buffering=0)
        if self._file is not None:
            left = memoryview(message.data)
            while left:
                left = left[self._file.write(left) or 0 :]
        self._digest.update(message.data)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class KeptWeights:
    """Hold the files of weights that were sent, for workers that come later and for one that is started again after a crash.

    Workers of a host share them: each holds a shared lock on the folder, which ends with its process, and the last one to release
    it removes the folder. What a crash leaves, and no worker finds within a day, the next stream removes."""

    def __init__(self, folder: Path, lock: int) -> None:
        """Use `find` or `hold`. `lock`: the descriptor of the locked folder."""
        self.folder = folder
        self._lock = lock

    @staticmethod
    def find(weights_hash: str) -> KeptWeights | None:
        """Hold what this host keeps of these weights; None: nothing."""
        return KeptWeights.hold(_parent() / (_KEPT + weights_hash)) if _HASH.fullmatch(weights_hash) else None

    @staticmethod
    def hold(folder: Path) -> KeptWeights | None:
        """Hold what is kept in this folder; None where there is nothing any more."""
        lock = _locked(folder, fcntl.LOCK_SH)
        if lock is None:
            return None
        with contextlib.suppress(OSError):
            os.utime(folder)  # its age counts from now
        return KeptWeights(folder, lock)

    @property
    def weights_hash(self) -> str:
        """Return the hash of the weights."""
        return self.folder.name.removeprefix(_KEPT)

    def leave(self) -> None:
        """Let go of the files, which stay; idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def release(self) -> None:
        """Let go of the files, and remove them unless another one holds them; idempotent."""
        if self._lock >= 0:
            self.leave()
            _remove_unheld(self.folder)


def _locked(folder: Path, how: int) -> int | None:
    """Return a descriptor that locks the folder; None where it is missing, or locked so that it cannot be."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.fstat(lock), folder.stat())  # not removed between the two calls
    except OSError:
        is_there = False
    if is_there:
        return lock
    os.close(lock)
    return None


def _remove_unheld(folder: Path) -> None:
    """Remove the folder of kept files, unless a process holds it. It is renamed first, so that none finds half of it."""
    lock = _locked(folder, fcntl.LOCK_EX)
    if lock is None:
        return
    try:
        with contextlib.suppress(OSError):
            removed = folder.rename(folder.with_name(_TAKEN + secrets.token_hex(8)))  # takes no room of a full disk
            shutil.rmtree(removed)
    finally:
        os.close(lock)


async def _to_its_end(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in a thread; a cancelled caller waits for it as well, as what it uses must not be closed meanwhile."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait((running,))
        raise


def _parent() -> Path:
    return cache_folder().expanduser().absolute() / "received"


def _folder_for(model: Path, num_bytes: int) -> Path:
    parent = _parent()
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_abandoned(parent)
        if shutil.disk_usage(parent).free < num_bytes:
            raise ResourceExhausted(f"{parent} has no room for {num_bytes / 1e9:.2f} GB of weights; free some space")
        folder = Path(tempfile.mkdtemp(prefix=_TAKEN, dir=parent))
        for path in model.iterdir():
            if path.is_file() and not _WEIGHTS.fullmatch(path.name):
                (folder / path.name).symlink_to(path.resolve())
    except OSError as error:
        raise ResourceExhausted(f"{parent} cannot be written ({error.strerror})") from error
    return folder


def _remove_abandoned(parent: Path) -> None:
    """Remove what processes left behind that were killed, while they received or later."""
    for path in (*parent.glob(f"{_TAKEN}*"), *parent.glob(f"{_KEPT}*")):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime <= ABANDONED_S:
                continue
            if path.name.startswith(_KEPT):
                _remove_unheld(path)
            else:
                shutil.rmtree(path, ignore_errors=True)
