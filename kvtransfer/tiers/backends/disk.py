"""The tier on disk: a bounded folder of block files, of this worker alone or of several on one host.

The folder is the truth: what lies in it is found at the start, and again from time to time, since other workers write and remove
files as well. Its size is that of all identities' files in it, older models' included; the bound is kept by whichever worker
writes. A disk that is full, read-only or broken is a smaller cache: one warning, and it is tried again later. What is in the
folder and is not the tier's, or cannot be read, is passed over.

The lock is taken on the event loop as well, so no file is touched under it, and not many blocks are given up at once.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from kvtransfer.tiers.backends.block_file import (
    HEADER_BYTES,
    PARTIAL,
    BadBlockFile,
    BlockHeader,
    UnknownVersion,
    header_of,
    is_storable,
    name_of,
    partial_path,
    read_file,
    relative_path,
    write_all,
)
from kvtransfer.tiers.backends.coding import BlockForm, CannotDecode, is_installed
from kvtransfer.tiers.backends.index import MOST_VICTIMS
from kvtransfer.tiers.base import BlockBytes, IndexedTier
from pdmesh.engine.kv_cache.published_blocks import BlockName
from pdmesh.runtime import failpoints

PARTIAL_S = 600.0
"""A partial file that is older was left by a process that died; so was an empty folder of another identity."""
RESCAN_S = 30.0
AGAIN_S = 60.0
"""How long nothing is written after the disk has refused."""
FULL_SHARE = 0.9
"""On a full disk the bound becomes this share of what is stored, as other programs need room as well."""
LEAST_BLOCKS = 2
"""It never becomes less than so many blocks, if it was not before: from none it would not grow again."""
GROWTH = 1.1
"""It grows so much for each `AGAIN_S` after which a write succeeds, up to what was asked for."""
CREATE_TRIES = 3
TOUCH_S = 60.0
"""A file's time of use is written at most once in so many seconds."""

_IDENTITY = re.compile(r"[0-9a-f]{16}")

logger = logging.getLogger(__name__)


class DiskTier(IndexedTier):
    """Hold blocks in files. Satisfies `Tier`. Times are those of the system's clock, as files have them."""

    name = "disk"
    may_be_shared = True

    def __init__(self, folder: Path, max_bytes: int, form: BlockForm, clock: Callable[[], float] = time.time) -> None:
        """Find what the folder holds. Raises ValueError where not one block fits, OSError where the identity's own folder cannot
        be made or read."""
        if max_bytes < form.max_bytes:
            raise ValueError(f"kv_disk_gb: {max_bytes} bytes are less than a block of {form.block_bytes}")
        super().__init__(max_bytes, clock)
        self._folder, self._form = folder, form
        self._own = folder / form.identity.hex()
        self._writer = secrets.token_hex(4)  # process ids of containers that share the folder may be equal
        self._serial = itertools.count()
        self._others: list[tuple[float, int, Path]] = []  # files of other identities: last used, bytes, path; the oldest last
        self._others_bytes = 0  # of these and of `_stuck`
        self._stuck: dict[Path, int] = {}  # those of them that could not be removed, and their bytes
        self._unreadable: dict[BlockName, tuple[float, int]] = {}  # own files that only others can read: last used, bytes
        self._foreign: set[BlockName] = set()  # those of them that look like readable ones
        self._wanted_bytes = self._configured_bytes = max_bytes
        self._not_before = self._scanned = float("-inf")
        self._grow_at = float("inf")
        self._touched: dict[BlockName, float] = {}
        self._has_warned = False
        self._make_folder(self._own)
        self._warn_of_others()
        self.rescan()

    @property
    def max_bytes(self) -> int:
        """Return what other identities leave of the bound."""
        return max(0, self._index.max_bytes)

    def _make_folder(self, folder: Path) -> None:
        """Make a folder of the tier, and those above it, for this user alone. Raises OSError, also for a symlink in it."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in (self._own, folder):
            each.mkdir(mode=0o700, exist_ok=True)
            if each.is_symlink():
                raise NotADirectoryError(errno.ENOTDIR, f"{each} is a symlink, which is not followed: remove it")

    def _warn_of_others(self) -> None:
        for folder in (self._folder, self._own):
            status = folder.stat()
            owner = f"belongs to user {status.st_uid}" if status.st_uid not in (0, os.geteuid()) else ""
            writers = "may be written to by others" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""
            if problem := " and ".join(filter(None, (owner, writers))):
                text = "the folder for KV, %s, %s: whoever writes files there can give this worker wrong KV, since checksums"
                logger.warning(
                    text + " find damage, not malice; use a folder of the worker's own user, with mode 0700", folder, problem
                )
                return

    # What is in the folder.

    def rescan(self) -> None:
        """Look what the folder holds now. Raises OSError where its own files cannot be listed."""
        self._scanned = time.monotonic()
        self._unreadable.clear()
        found = {name: (used, size) for name, used, size in self._own_files()}
        others = sorted(self._other_files(), reverse=True)
        others_bytes = sum(size for _, size, _ in others)
        self._stuck = {path: size for _, size, path in others if path in self._stuck}
        others = [each for each in others if each[2] not in self._stuck]
        with self._lock:
            for name in [each for each in self._index if each not in found]:
                self._forget(name)
            for name, (used, size) in found.items():
                if name not in self._index:
                    self._index.add(name, size, used)
                    self._changes.append(name)
            self._others, self._others_bytes = others, others_bytes
            self._set_bound()

    def refresh(self) -> None:
        try:
            self._rescan_if_due()
        except OSError as error:
            self._refused(error)

    def _rescan_if_due(self) -> None:
        if time.monotonic() > self._scanned + RESCAN_S:
            self.rescan()

    def _set_bound(self) -> None:
        """Say what the others leave to the index, under the lock; less than nothing where they have more than the bound."""
        self._index.max_bytes = self._wanted_bytes - self._others_bytes

    def _own_files(self) -> Iterator[tuple[BlockName, float, int]]:
        with contextlib.suppress(FileNotFoundError):  # it was removed; it is made again for the next file
            for root in _listed(self._own):
                with self._passing_over(root.path):
                    yield from self._files_of(root)

    def _files_of(self, root: os.DirEntry[str]) -> Iterator[tuple[BlockName, float, int]]:
        files = _entries(root)
        if not files:
            with contextlib.suppress(OSError):
                os.rmdir(root.path)
        for file in files:
            with self._passing_over(file.path):
                status = file.stat(follow_symlinks=False)
                name = name_of(root.name, file.name)
                if name is None or not stat.S_ISREG(status.st_mode):
                    self._remove_old(file, status)
                elif self._is_whole(name, Path(file.path), status):
                    yield name, status.st_mtime, status.st_size

    @contextlib.contextmanager
    def _passing_over(self, path: str) -> Iterator[None]:
        """Leave out what cannot be read, with one warning for all of it."""
        try:
            yield
        except FileNotFoundError:  # another worker has removed it
            pass
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("the folder for KV: %s is passed over, as is what else cannot be read: %s", path, error.strerror)

    def _remove_old(self, file: os.DirEntry[str], status: os.stat_result) -> None:
        """Remove a partial file that no process writes any more."""
        if file.name.endswith(PARTIAL) and stat.S_ISREG(status.st_mode) and status.st_mtime < self._clock() - PARTIAL_S:
            os.unlink(file.path)

    def _is_whole(self, name: BlockName, path: Path, status: os.stat_result) -> bool:
        """Return whether a file has the length that it should, which a compressed one's header says; a bad one is removed."""
        size = status.st_size
        if name in self._index or (size == self._form.max_bytes and name not in self._foreign):
            return True
        try:
            header = BlockHeader.unpack(header_of(path))
            if size != HEADER_BYTES + header.num_stored:
                raise BadBlockFile(f"it has {size} bytes, not {HEADER_BYTES + header.num_stored}")
            is_readable = not header.width or is_installed()
        except BadBlockFile as error:
            self._remove_bad(name, str(error))
            return False
        except UnknownVersion:
            is_readable = False
        if is_readable:
            self._foreign.discard(name)
        else:
            self._unreadable[name] = (status.st_mtime, size)
        return is_readable

    def _other_files(self) -> Iterator[tuple[float, int, Path]]:
        """Find the files that only others can read, which count and go first."""
        for name, (used, size) in self._unreadable.items():
            yield used, size, self._own / relative_path(name)
        with self._passing_over(str(self._folder)):
            for identity in _listed(self._folder):
                if identity.name == self._own.name or not _IDENTITY.fullmatch(identity.name):
                    continue
                with self._passing_over(identity.path):
                    for root in _entries(identity):
                        with self._passing_over(root.path):
                            yield from self._others_of(root)

    def _others_of(self, root: os.DirEntry[str]) -> Iterator[tuple[float, int, Path]]:
        files = _entries(root)
        if not files and root.stat(follow_symlinks=False).st_mtime < self._clock() - PARTIAL_S:
            with contextlib.suppress(OSError):
                os.rmdir(root.path)
        for file in files:
            with self._passing_over(file.path):
                status = file.stat(follow_symlinks=False)
                if name_of(root.name, file.name) is None or not stat.S_ISREG(status.st_mode):
                    self._remove_old(file, status)
                else:
                    yield status.st_mtime, status.st_size, Path(file.path)

    def _forget(self, name: BlockName) -> None:
        """Drop a block from the index, under the lock."""
        if self._index.remove(name):
            self._changes.append(name)
        self._touched.pop(name, None)

    # Writing.

    def lacks(self, names: Iterable[BlockName]) -> list[BlockName]:
        room = self._wanted_bytes - sum(list(self._stuck.values()))
        if time.monotonic() < self._not_before or room < self._form.max_bytes:
            return []
        return [name for name in super().lacks(names) if is_storable(name)]

    def write(self, name: BlockName, block: BlockBytes, keep_s: float) -> None:
        try:
            self._rescan_if_due()
            pieces = self._form.pack(name, block)
            size = sum(piece.nbytes for piece in pieces)
            if self._make_room(name, size):
                self._write(name, pieces)
                self._written(name, size, keep_s)
        except OSError as error:
            self._refused(error)

    def _make_room(self, name: BlockName, size: int) -> bool:
        """Remove others' files, then own blocks, until a block fits; False: it does not. The lock is held for a limited number of
        them, and for none of the removing."""
        while True:
            with self._lock:
                others = self._take_others(size)
                victims: list[BlockName] = []
                if not self._others:
                    fits = size <= self._index.max_bytes
                    victims = self._index.victims(size if fits else 0, name, self._clock())
                self._changes += victims
                has_room = self._index.num_bytes + size <= self._index.max_bytes
            are_gone = self._remove_others(others)
            for victim in victims:
                self._touched.pop(victim, None)
                self._unlink(victim)
            if are_gone and (has_room or not (others or victims)):
                return has_room

    def _take_others(self, size: int) -> list[tuple[int, Path]]:
        """Take the oldest files of others out of the account, under the lock."""
        taken: list[tuple[int, Path]] = []
        while self._others and self._index.num_bytes + size > self._index.max_bytes and len(taken) < MOST_VICTIMS:
            _, freed, path = self._others.pop()
            taken.append((freed, path))
            self._others_bytes -= freed
            self._set_bound()
        return taken

    def _remove_others(self, others: list[tuple[int, Path]]) -> bool:
        """Remove files; those that cannot be count on, and are not tried again. Return whether all are gone."""
        stuck: dict[Path, int] = {}
        for size, path in others:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                stuck[path] = size
                if not self._stuck:
                    self._warn_of_stuck(path, error)
                self._stuck[path] = size
        with self._lock:
            self._others_bytes += sum(stuck.values())
            self._set_bound()
        return not stuck

    def _warn_of_stuck(self, path: Path, error: OSError) -> None:
        text = "the folder for KV: %s cannot be removed, nor perhaps others: %s; what stays counts against the bound"
        logger.warning(text, path, error.strerror)

    def _write(self, name: BlockName, pieces: list[memoryview]) -> None:
        path = self._own / relative_path(name)
        partial = partial_path(path, f"{self._writer}-{next(self._serial)}")
        file = self._create(partial)
        try:
            try:
                write_all(file, pieces)
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
            self._make_folder(path.parent)
        return os.open(path, flags, 0o600)

    def _written(self, name: BlockName, size: int, keep_s: float) -> None:
        with self._lock:
            self._index.add(name, size, self._clock() + keep_s)
            self._changes.append(name)
            self.counts.num_written += 1
            self._foreign.discard(name)
            if name in self._unreadable:
                self._replaced(name)
            if time.monotonic() >= self._grow_at:
                self._grow()

    def _replaced(self, name: BlockName) -> None:
        """Take a file that only others could read out of theirs, under the lock: it is this tier's own now."""
        path = self._own / relative_path(name)
        _, size = self._unreadable.pop(name)
        others = [each for each in self._others if each[2] != path]
        if len(others) < len(self._others) or self._stuck.pop(path, None) is not None:
            self._others, self._others_bytes = others, self._others_bytes - size
            self._set_bound()

    def _grow(self) -> None:
        """Come nearer to the bound that was asked for, under the lock: a full disk does not stay full."""
        self._wanted_bytes = min(self._configured_bytes, int(GROWTH * self._wanted_bytes) + self._form.max_bytes)
        is_whole = self._wanted_bytes == self._configured_bytes
        self._grow_at = float("inf") if is_whole else time.monotonic() + AGAIN_S
        self._set_bound()

    def _refused(self, error: OSError) -> None:
        """Write nothing for some time, and less on a disk that is full."""
        self.counts.num_failed += 1
        self._not_before = time.monotonic() + AGAIN_S
        what = "nothing is written to it for a minute"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with self._lock:
                stored = self._index.num_bytes + self._others_bytes
                wanted = max(int(FULL_SHARE * stored), LEAST_BLOCKS * self._form.max_bytes)
                self._wanted_bytes = min(self._wanted_bytes, wanted)
                self._grow_at = self._not_before
                self._set_bound()
            what = f"it is used for {self._wanted_bytes / 1e9:.2f} GB, and slowly for more again"
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
            block = self._form.unpack(name, read_file(path, self._form.max_bytes))
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
            self._foreign.add(name)
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

    def look(self, names: Iterable[BlockName]) -> None:
        for name in self.lacks(names):
            path = self._own / relative_path(name)
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                if stat.S_ISREG(status.st_mode) and self._is_whole(name, path, status):
                    with self._lock:
                        self._index.add(name, status.st_size, status.st_mtime)
                        self._changes.append(name)

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


def _listed(folder: str | Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def _entries(folder: os.DirEntry[str]) -> list[os.DirEntry[str]]:
    """Return what is in a folder; a symlink to one, or something else, is none. Raises OSError."""
    return _listed(folder.path) if folder.is_dir(follow_symlinks=False) else []
