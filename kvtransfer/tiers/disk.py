"""The tier on disk: a bounded folder of block files, of this worker alone or of several on one host.

The folder is the truth: what lies in it is found at the start, and again from time to time, since other workers write and remove
files as well. Its size is that of all identities' files in it, older models' included; the bound is kept by whichever worker
writes. A disk that is full, read-only or broken is a smaller cache: one warning, and it is tried again later.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from kvtransfer.framing import room_for
from kvtransfer.tiers.base import BlockBytes, IndexedTier
from kvtransfer.tiers.block_file import (
    HEADER_BYTES,
    PARTIAL,
    BadBlockFile,
    BlockHeader,
    is_storable,
    name_of,
    partial_path,
    relative_path,
)
from kvtransfer.tiers.coding import BlockForm, CannotDecode, is_installed
from pdmesh.engine.kv_cache.published_blocks import BlockName
from pdmesh.runtime import failpoints

PARTIAL_S = 600.0
"""A partial file that is older was left by a process that died."""
RESCAN_S = 30.0
AGAIN_S = 60.0
"""How long nothing is written after the disk has refused."""
FULL_SHARE = 0.9
"""On a full disk the bound becomes this share of what is stored, as other programs need room as well."""
CREATE_TRIES = 3
TOUCH_S = 60.0
"""A file's time of use is written at most once in so many seconds."""

logger = logging.getLogger(__name__)


class DiskTier(IndexedTier):
    """Hold blocks in files. Satisfies `Tier`. Times are those of the system's clock, as files have them."""

    name = "disk"

    def __init__(self, folder: Path, max_bytes: int, form: BlockForm, clock: Callable[[], float] = time.time) -> None:
        """Find what the folder holds. Raises ValueError where not one block fits, OSError for a folder that cannot be made or
        read."""
        if max_bytes < form.max_bytes:
            raise ValueError(f"kv_disk_gb: {max_bytes} bytes are less than a block of {form.block_bytes}")
        super().__init__(max_bytes, clock)
        self._folder, self._form = folder, form
        self._own = folder / form.identity.hex()
        self._writer = secrets.token_hex(4)  # process ids of containers that share the folder may be equal
        self._serial = itertools.count()
        self._others: list[tuple[float, int, Path]] = []  # files of other identities: last used, bytes, path; the oldest last
        self._wanted_bytes = max_bytes
        self._not_before = self._scanned = float("-inf")
        self._touched: dict[BlockName, float] = {}
        self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.rescan()

    # What is in the folder.

    def rescan(self) -> None:
        """Look what the folder holds now. Raises OSError."""
        self._scanned = time.monotonic()
        found = {name: (used, size) for name, used, size in self._own_files()}
        others = sorted(self._other_files(), reverse=True)
        with self._lock:
            for name in [each for each in self._index if each not in found]:
                self._forget(name)
            for name, (used, size) in found.items():
                if name not in self._index:
                    self._index.add(name, size, used)
                    self._changes.append(name)
            self._others = others
            self._index.max_bytes = max(0, self._wanted_bytes - sum(size for _, size, _ in others))

    def _own_files(self) -> Iterator[tuple[BlockName, float, int]]:
        now = self._clock()
        for root in _entries(self._own):
            files = _entries(Path(root.path))
            if not files:
                with contextlib.suppress(OSError):
                    os.rmdir(root.path)
            for file in files:
                name = name_of(root.name, file.name)
                with contextlib.suppress(FileNotFoundError):  # another worker has removed it
                    status = file.stat()
                    if name is not None:
                        if self._is_whole(name, Path(file.path), status.st_size):
                            yield name, status.st_mtime, status.st_size
                    elif file.name.endswith(PARTIAL) and status.st_mtime < now - PARTIAL_S:
                        os.unlink(file.path)

    def _is_whole(self, name: BlockName, path: Path, size: int) -> bool:
        """Return whether a file has the length that it should, which a compressed one's header says; a bad one is removed."""
        if size == self._form.max_bytes or name in self._index:
            return True
        try:
            with path.open("rb") as file:
                header = BlockHeader.unpack(file.read(HEADER_BYTES))
            if size != HEADER_BYTES + header.num_stored:
                raise BadBlockFile(f"it has {size} bytes, not {HEADER_BYTES + header.num_stored}")
        except BadBlockFile as error:
            self._remove_bad(name, str(error))
            return False
        return is_installed()

    def _other_files(self) -> Iterator[tuple[float, int, Path]]:
        for identity in _entries(self._folder):
            if identity.name == self._own.name or not identity.is_dir():
                continue
            for root in _entries(Path(identity.path)):
                for file in _entries(Path(root.path)):
                    with contextlib.suppress(FileNotFoundError):
                        status = file.stat()
                        if name_of(root.name, file.name) is not None:
                            yield status.st_mtime, status.st_size, Path(file.path)

    def _forget(self, name: BlockName) -> None:
        """Drop a block from the index, under the lock."""
        if self._index.remove(name):
            self._changes.append(name)
        self._touched.pop(name, None)

    # Writing.

    def lacks(self, names: Iterable[BlockName]) -> list[BlockName]:
        if time.monotonic() < self._not_before:
            return []
        return [name for name in super().lacks(names) if is_storable(name)]

    def write(self, name: BlockName, block: BlockBytes, keep_s: float) -> None:
        try:
            if time.monotonic() > self._scanned + RESCAN_S:
                self.rescan()
            pieces = self._form.pack(name, block)
            size = sum(piece.nbytes for piece in pieces)
            if self._make_room(name, size):
                self._write(name, pieces)
                self._written(name, size, keep_s)
        except OSError as error:
            self._refused(error)

    def _make_room(self, name: BlockName, size: int) -> bool:
        with self._lock:
            while self._others and self._index.num_bytes + size > self._index.max_bytes:
                _, freed, path = self._others.pop()
                self._index.max_bytes += freed
                path.unlink(missing_ok=True)
            victims = self._index.victims(size, name, self._clock())
            self._changes += victims
            has_room = self._index.num_bytes + size <= self._index.max_bytes
        for victim in victims:
            self._touched.pop(victim, None)
            self._unlink(victim)
        return has_room

    def _write(self, name: BlockName, pieces: list[memoryview]) -> None:
        path = self._own / relative_path(name)
        partial = partial_path(path, f"{self._writer}-{next(self._serial)}")
        file = self._create(partial)
        try:
            try:
                _write_all(file, pieces)
                failpoints.hit("tier.write")
            finally:
                os.close(file)
            os.rename(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def _create(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for _ in range(CREATE_TRIES):
            with contextlib.suppress(FileNotFoundError):  # its root's folder, which another worker may just have removed
                return os.open(path, flags, 0o600)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, flags, 0o600)

    def _written(self, name: BlockName, size: int, keep_s: float) -> None:
        with self._lock:
            self._index.add(name, size, self._clock() + keep_s)
            self._changes.append(name)
            self.counts.num_written += 1

    def _refused(self, error: OSError) -> None:
        """Write nothing for some time, and less on a disk that is full."""
        self.counts.num_failed += 1
        self._not_before = time.monotonic() + AGAIN_S
        what = "nothing is written to it for a minute"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with self._lock:
                self._wanted_bytes = int(FULL_SHARE * self._index.num_bytes)
                self._index.max_bytes = min(self._index.max_bytes, self._wanted_bytes)
            what = f"it is used for {self._wanted_bytes / 1e9:.2f} GB from now on"
        logger.warning("the folder for KV, %s, refuses: %s; %s", self._folder, error.strerror or error, what)

    # Reading.

    def lend(self, name: BlockName) -> BlockBytes | None:
        with self._lock:
            if not self._index.hold(name):
                return None
        block: BlockBytes | None = None
        try:
            block = self._read(name)
        finally:
            if block is None:
                with self._lock:
                    self._index.let_go(name)
        return block

    def _read(self, name: BlockName) -> BlockBytes | None:
        path = self._own / relative_path(name)
        try:
            block = self._form.unpack(name, _read_file(path, self._form.max_bytes))
        except FileNotFoundError:  # another worker has removed it
            with self._lock:
                self._forget(name)
            return None
        except OSError as error:
            self.counts.num_failed += 1
            logger.warning("%s cannot be read: %s", path, error.strerror or error)
            with self._lock:
                self._forget(name)
            return None
        except BadBlockFile as error:
            self._remove_bad(name, str(error))
            return None
        except CannotDecode:  # another worker's, which it can read
            with self._lock:
                self._forget(name)
            return None
        self.counts.num_read += 1
        self._note_use(name, path)
        return block

    def _note_use(self, name: BlockName, path: Path) -> None:
        """Say in the file's times that it was used, for other workers and later ones."""
        now = self._clock()
        if now > self._touched.get(name, 0.0) + TOUCH_S:
            self._touched[name] = now
            with contextlib.suppress(OSError):
                os.utime(path)

    def give_back(self, name: BlockName, *, is_damaged: bool) -> None:
        with self._lock:
            self._index.let_go(name)
        if is_damaged:
            self._remove_bad(name, "its content's checksum is wrong")

    def _remove_bad(self, name: BlockName, problem: str) -> None:
        self.counts.num_corrupt += 1
        logger.warning("%s is not used and is removed: %s", self._own / relative_path(name), problem)
        with self._lock:
            self._forget(name)
        self._unlink(name)

    def _unlink(self, name: BlockName) -> None:
        with contextlib.suppress(OSError):
            (self._own / relative_path(name)).unlink(missing_ok=True)

    def close(self) -> None:
        """Do nothing: the files stay."""


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _write_all(file: int, parts: list[memoryview]) -> None:
    while parts:
        written = os.writev(file, parts)
        while parts and written >= parts[0].nbytes:
            written -= parts.pop(0).nbytes
        if parts:
            parts[0] = parts[0][written:]


def _read_file(path: Path, max_bytes: int) -> memoryview:
    """Return what a file holds. Raises OSError, or BadBlockFile for a longer file."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        if size > max_bytes:
            raise BadBlockFile(f"it has {size} bytes, not {max_bytes} or less")
        whole = room_for(size)
        position = 0
        while position < size:
            got = os.preadv(file, [whole[position:]], position)
            if not got:
                raise BadBlockFile(f"it ends after {position} bytes")
            position += got
        return whole
    finally:
        os.close(file)
