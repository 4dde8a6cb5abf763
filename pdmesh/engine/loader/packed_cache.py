"""The cache of packed weights: packing takes seconds at each start, mapping what an earlier start packed takes milliseconds, and
all workers of a host share the pages.

    $PDMESH_CACHE/packed/MODEL-FORM-KEY.packed     the weights (packed_file.py); never changed, only replaced by a rename
    $PDMESH_CACHE/packed/MODEL-FORM-KEY.json       the stat of the file when its content was found whole; its time: the last use
    $PDMESH_CACHE/packed/.MODEL-FORM-KEY.lock      held by the process that packs

KEY is a hash of everything that decides the bytes: the model's hash with its overrides, the format of the weights, the dtype of
the rest, the sources that read, quantize and lay out, and torch's version. So a file is right or has another name. A file that is
damaged, cut off or foreign is packed anew and replaced. A folder that cannot be written, or a full disk, costs one warning, and
each start packs. So does another process that packs the same and does not come to an end: it is waited for, but not for ever.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TextIO

import torch

from pdmesh.engine.backend_selection import Numerics
from pdmesh.engine.kernels.cpu.model import PackedWeights
from pdmesh.engine.loader import packed_file
from pdmesh.engine.loader.hash import cache_folder
from pdmesh.engine.loader.packed_file import NotShared, UnusableFile
from pdmesh.engine.models.config import ModelConfig

Progress = Callable[[float, str], None]

MIN_BYTES = 32 * 2**20
"""Less is packed anew: it takes no longer than to find and check a file."""
_MOST_BYTES = 64 * 10**9
_SUFFIX = ".packed"
_ABANDONED_S = 24 * 3600.0
_UNUSED_S = 30 * 24 * 3600.0
"""Files that were not used for so long are removed: of models that are gone, and of earlier versions of pdmesh."""
# Packing takes some seconds for a GB on two idle cores; this is ten times as much: what takes longer hangs.
_WAIT_S, _WAIT_S_PER_GB = 60.0, 30.0
_WAIT_STEP_S, _WAIT_LOG_S = 0.1, 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackedCache:
    """Keep packed weights in `folder`. `max_bytes` bounds all of them together; None: half of what the disk has for them, 64 GB
    at most. Weights below `min_bytes` are not kept. `wait_s`: seconds to wait for another process that packs the same, before
    this one packs for itself alone; None: by the size of the weights. `shares_small`: weights in small pages are shared, too."""

    folder: Path
    max_bytes: int | None = None
    min_bytes: int = MIN_BYTES
    wait_s: float | None = None
    shares_small: bool = False

    @staticmethod
    def configured(setting: str, pages: str = "large") -> PackedCache | None:
        """Return the cache of EngineConfig.packed_cache and packed_pages; None: it is off."""
        if setting == "off":
            return None
        most = None if setting == "auto" else int(float(setting) * 1e9)
        return PackedCache(cache_folder().expanduser().absolute() / "packed", most, shares_small=pages == "shared")

    def load(
        self, name: Name, config: ModelConfig, num_bytes: int, pack: Callable[[Progress], PackedWeights], progress: Progress
    ) -> PackedWeights:
        """Return the weights of `name`, about `num_bytes`: mapped, or made by `pack` and kept for others."""
        if num_bytes < self.min_bytes:
            return pack(progress)
        if (kept := self._find(name, config)) is not None:
            return kept
        with contextlib.ExitStack() as stack:
            try:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                wait_s = _WAIT_S + _WAIT_S_PER_GB * num_bytes / 1e9 if self.wait_s is None else self.wait_s
                stack.enter_context(_exclusive(self._lock(name), wait_s, lambda text: progress(0.0, text)))
            except _HeldTooLong as error:
                _warn(str(error))
                return self._find(name, config, level=logging.DEBUG) or pack(progress)
            except OSError as error:
                _warn(f"{self.folder} cannot be written ({error.strerror})")
                return pack(progress)
            # The process that was waited for may have packed the same.
            return self._find(name, config, level=logging.DEBUG) or self._kept(name, config, pack(progress), progress)

    def _kept(self, name: Name, config: ModelConfig, weights: PackedWeights, progress: Progress) -> PackedWeights:
        """Return the weights from the file that they are written to; the very ones where they cannot be kept."""
        size = packed_file.num_bytes(weights)
        try:
            if not self._make_room(name, size):
                return weights
            self._write(name, weights, progress)
        except OSError as error:
            _warn(f"{self.folder} cannot hold {size / 1e9:.2f} GB more ({error.strerror or error})")
            return weights
        kept = replace(weights, file=(str(self._path(name)), name.key))
        with contextlib.suppress(NotShared):
            return self._find(name, config, copies=False) or kept
        return kept

    def _find(
        self, name: Name, config: ModelConfig, *, level: int = logging.WARNING, copies: bool = True
    ) -> PackedWeights | None:
        """Return the weights of the file, where it is there and right; `level` is that of the message that it is not right.
        Raises NotShared like `packed_file.read`."""
        path, seen = self._path(name), self._seen(name)
        try:
            began = time.monotonic()
            known = _read_stamp(seen)
            opened = packed_file.read(
                *(path, name.key, config),
                is_known=lambda found: _stamp(found) == known,
                copies=copies,
                shares_small=self.shares_small,
            )
            self._remember(opened.found, seen)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except UnusableFile as error:
            logger.log(level, "%s; the weights are packed anew", error)
            return None
        except OSError as error:
            logger.log(level, "%s cannot be read (%s); the weights are packed anew", path, error)
            return None
        where = "shared with other workers of this host" if opened.is_shared else "copied: files have no large pages here"
        logger.info("packed weights from %s in %.0f ms, %s", path, 1e3 * (time.monotonic() - began), where)
        return opened.weights

    def _write(self, name: Name, weights: PackedWeights, progress: Progress) -> None:
        """Write and rename. What processes left behind that were killed meanwhile is removed: this process has the lock."""
        for left_behind in self.folder.glob(f".{name.text}.writing-*"):
            left_behind.unlink(missing_ok=True)
        handle, written = tempfile.mkstemp(dir=self.folder, prefix=f".{name.text}.writing-")
        try:
            with os.fdopen(handle, "wb", buffering=0) as file:
                packed_file.write(file, weights, name.key, progress)
                os.fchmod(file.fileno(), 0o400)  # a change would reach every process that has it mapped
            os.replace(written, self._path(name))
        except BaseException:
            Path(written).unlink(missing_ok=True)
            raise
        _write_stamp(self._seen(name), self._path(name).stat())

    def _remember(self, found: os.stat_result, seen: Path) -> None:
        """Note the use, and that the content of the file with this stat was found whole."""
        with contextlib.suppress(OSError):
            if _read_stamp(seen) == _stamp(found):
                os.utime(seen)
            else:
                _write_stamp(seen, found)

    def _make_room(self, name: Name, size: int) -> bool:
        """Remove the files that were not used for _UNUSED_S, then those whose use is longest ago, until one of `size` more fits;
        return whether it does."""
        self._remove_abandoned()
        others, unused_at = [entry for entry in entries(self.folder) if entry.path != self._path(name)], time.time() - _UNUSED_S
        for entry in [entry for entry in others if entry.used_at < unused_at]:
            entry.remove()
            others.remove(entry)
        used = sum(entry.num_bytes for entry in others)
        most = self.max_bytes
        if most is None:
            most = min(_MOST_BYTES, (shutil.disk_usage(self.folder).free + used) // 2)
        if size > most:
            _warn(
                f"{size / 1e9:.2f} GB of weights do not fit in {most / 1e9:.2f} GB; give --packed-cache more, or free some space"
            )
            return False
        for entry in sorted(others, key=lambda entry: entry.used_at):
            if used + size <= most:
                break
            entry.remove()
            used -= entry.num_bytes
        return True

    def _remove_abandoned(self) -> None:
        for left_behind in self.folder.glob(".*.writing-*"):
            with contextlib.suppress(OSError):
                if time.time() - left_behind.stat().st_mtime > _ABANDONED_S:
                    left_behind.unlink()

    def _path(self, name: Name) -> Path:
        return self.folder / f"{name.text}{_SUFFIX}"

    def _seen(self, name: Name) -> Path:
        return self.folder / f"{name.text}.json"

    def _lock(self, name: Name) -> Path:
        return self.folder / f".{name.text}.lock"


@dataclass(frozen=True)
class Name:
    """Name packed weights: `key` is a hex SHA-256 of all that decides their bytes, `text` is for people and begins with it."""

    text: str
    key: str

    @staticmethod
    def of(weights_hash: str, numerics: Numerics) -> Name:
        """Return the name. `weights_hash` is the model's, with its overrides."""
        form = f"{numerics.weights}g{numerics.group}" if numerics.group else numerics.weights
        parts = (weights_hash, form, str(numerics.dtype), sys.byteorder, torch.__version__, _sources())
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        return Name(f"{weights_hash[:12]}-{form}-{key[:16]}", key)


@cache
def _sources() -> str:
    """Return a hash of the sources that decide the bytes: what is changed there needs no revision that somebody has to raise."""
    engine = Path(__file__).parents[1]
    layout = [engine / "kernels" / "cpu" / name for name in ("library.py", "model.py")]
    paths = sorted([*(engine / "loader").rglob("*.py"), *(engine / "models").rglob("*.py"), *layout])
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(engine).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


# The files of the folder


@dataclass(frozen=True)
class Entry:
    """A file of packed weights, the bytes that it takes, and when it was last used (seconds since 1970)."""

    path: Path
    num_bytes: int
    used_at: float

    def remove(self) -> None:
        """Remove it. A process that has it mapped keeps its pages."""
        for path in (self.path.with_suffix(".json"), self.path):  # not the lock: another process may hold it
            with contextlib.suppress(OSError):
                path.unlink()


def entries(folder: Path) -> Sequence[Entry]:
    """Return the packed weights in a folder; none where there is none."""
    found = []
    for path in folder.glob(f"[!.]*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            stat, seen = path.stat(), path.with_suffix(".json")
            found.append(Entry(path, stat.st_size, seen.stat().st_mtime if seen.exists() else stat.st_mtime))
    return found


def is_whole(path: Path, found: os.stat_result) -> bool:
    """Return whether the content of the file of packed weights with this stat was found whole before."""
    return _stamp(found) == _read_stamp(path.with_suffix(".json"))


def _stamp(found: os.stat_result) -> list[int]:
    """Return what changes whenever a file's content is written, or another file takes its place."""
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _read_stamp(path: Path) -> object:
    """Return the stamp in the file; None for any other content."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content.get("file") if isinstance(content, dict) else None


def _write_stamp(path: Path, found: os.stat_result) -> None:
    handle, written = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.stamp.writing-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"file": _stamp(found)}, file)
        os.replace(written, path)
    except BaseException:
        Path(written).unlink(missing_ok=True)
        raise


class _HeldTooLong(Exception):
    """Another process holds the lock for longer than this one may wait. The message says which, and what to do."""


@contextlib.contextmanager
def _exclusive(path: Path, wait_s: float, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock. The kernel releases it when its holder dies. Raises _HeldTooLong after `wait_s`, OSError where it cannot be
    had at all."""
    with path.open("a+") as file:
        _lock_within(file, wait_s, say)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")  # for those that wait
        file.flush()
        yield


def _lock_within(file: TextIO, wait_s: float, say: Callable[[str], None]) -> None:
    began = time.monotonic()
    next_log_s = 0.0
    while not _is_locked(file):
        if (waited_s := time.monotonic() - began) >= wait_s:
            raise _HeldTooLong(f"{_holder(file)} has packed the same weights for over {wait_s:.0f} s; if it hangs, end it")
        if waited_s >= next_log_s:
            say(f"waiting for {_holder(file)} that packs the same weights")
            logger.info(
                "%s packs the same weights (lock %s): waited %.0f s, after %.0f s they are packed here",
                *(_holder(file), file.name, waited_s, wait_s),
            )
            next_log_s += _WAIT_LOG_S
        time.sleep(min(_WAIT_STEP_S, wait_s))


def _is_locked(file: TextIO) -> bool:
    """Try to take the lock; return whether this process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(file: TextIO) -> str:
    """Return the process that holds the lock, as it wrote itself there: by its number within its own container."""
    file.seek(0)
    number = file.read(20).strip()
    return f"process {number}" if number.isdecimal() else "another process"


def _warn(problem: str) -> None:
    logger.warning("packed weights are not kept for the next start: %s; --packed-cache=off does not try", problem)
