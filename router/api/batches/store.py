"""The folder of files and batches: one folder for each tenant in it, with state files that are replaced as a whole.

FOLDER/<hash of the tenant>/files/file-….json      what is known of a file; without it the file does not exist for clients
FOLDER/<hash of the tenant>/files/file-….jsonl     its bytes
FOLDER/<hash of the tenant>/batches/batch_….json   the state of a batch
FOLDER/<hash of the tenant>/batches/batch_….cancel a client has cancelled the batch, at this file's time
FOLDER/<hash of the tenant>/batches/batch_….lock   locked (flock) by the process that works the batch; its end unlocks it
FOLDER/uploads/…                                   uploads that are not complete

No name comes from a client. All calls block: they run in threads.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.errors import MeshError, NotFound
from router.api.batches.records import BatchRecord, FileRecord
from router.api.http.types import Body, checked

_ID = re.compile(r"(file-|batch_)[0-9a-f]{24}")
_FILES, _BATCHES, _UPLOADS = "files", "batches", "uploads"
ABANDONED_S = 24 * 3600
"""An upload, or a file without a record, that was not written for this long belongs to no process any more."""
KEPT_S = 30 * 24 * 3600
"""How long the record of a batch is kept after its end."""

R = TypeVar("R", FileRecord, BatchRecord)
logger = logging.getLogger(__name__)


class BrokenState(MeshError):
    """Report a state file that cannot be used; the message names the file, what is wrong and what to do."""


class Store:
    """Read and write one folder. Several processes may do so at the same time."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def open(self) -> None:
        """Make the folder, and try to write into it. Raises ConfigError."""
        try:
            os.makedirs(self._folder / _UPLOADS, mode=0o700, exist_ok=True)
            probe = self.new_upload()
            probe.write_bytes(b"probe")
            probe.unlink()
        except OSError as error:
            problem = f"{self._folder} cannot be written: {error.strerror or error}"
            raise ConfigError("--http-batch-folder", problem, "give a folder that this user may write, with free space") from None

    def free_bytes(self) -> int:
        """Return how much room the folder's disk has for this user."""
        found = os.statvfs(self._folder)
        return found.f_bavail * found.f_frsize

    def new_upload(self) -> Path:
        """Return the path of a new temporary file."""
        return self._folder / _UPLOADS / secrets.token_hex(12)

    # Files.

    def data_path(self, tenant: str, file_id: str) -> Path:
        """Return where the bytes of a file are. Raises NotFound for what is no id."""
        return self._path(tenant, _FILES, file_id, ".jsonl")

    def write_file(self, record: FileRecord) -> None:
        """Make a file, whose bytes are in place, visible to clients."""
        self._write(self._path(record.tenant, _FILES, record.id, ".json"), record)

    def take_upload(self, upload: Path, record: FileRecord) -> None:
        """Make a complete upload a file."""
        path = self.data_path(record.tenant, record.id)
        self._make(path.parent)
        os.replace(upload, path)
        self.write_file(record)

    def file(self, tenant: str, file_id: str) -> FileRecord:
        """Return a file's record. Raises NotFound, BrokenState."""
        return self._read(FileRecord, self._path(tenant, _FILES, file_id, ".json"), "file", file_id)

    def file_ids(self, tenant: str) -> list[str]:
        """Return the ids of a tenant's files, oldest first."""
        return self._ids(self._tenant(tenant) / _FILES)

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file. Raises NotFound."""
        path = self._path(tenant, _FILES, file_id, ".json")
        try:
            path.unlink()
        except FileNotFoundError:
            raise _missing("file", file_id) from None
        self.data_path(tenant, file_id).unlink(missing_ok=True)

    # Batches.

    def write_batch(self, record: BatchRecord) -> None:
        """Replace the state of a batch. The caller holds its lock, or is creating it."""
        self._write(self._path(record.tenant, _BATCHES, record.id, ".json"), record)

    def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """Return the state of a batch; one that is being cancelled says so. Raises NotFound, BrokenState."""
        record = self._read(BatchRecord, self._path(tenant, _BATCHES, batch_id, ".json"), "batch", batch_id)
        return self.seen(record)

    def batch_ids(self, tenant: str) -> list[str]:
        """Return the ids of a tenant's batches, oldest first."""
        return self._ids(self._tenant(tenant) / _BATCHES)

    def cancel(self, record: BatchRecord) -> None:
        """Record that a client has cancelled the batch, for the process that works it."""
        self._path(record.tenant, _BATCHES, record.id, ".cancel").touch(mode=0o600)

    def seen(self, record: BatchRecord) -> BatchRecord:
        """Return the state with a client's wish to cancel, if there is one."""
        cancelled_at = self.cancelled_at(record)
        if record.has_ended or cancelled_at is None:
            return record
        return record.but(status="cancelling", cancelling_at=cancelled_at)

    def cancelled_at(self, record: BatchRecord) -> int | None:
        """Return when a client cancelled the batch; None: no client has."""
        try:
            return int(self._path(record.tenant, _BATCHES, record.id, ".cancel").stat().st_mtime)
        except FileNotFoundError:
            return None

    def lock(self, record: BatchRecord) -> int | None:
        """Return a file descriptor that holds the batch's lock until it is closed; None where another process works the batch."""
        path = self._path(record.tenant, _BATCHES, record.id, ".lock")
        held = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(held)
            return None
        return held

    def unfinished(self, tenant: str | None, ended: set[str]) -> Iterator[BatchRecord]:
        """Yield the batches of a tenant (None: of all) that have not ended. `ended` holds the ids of those that are known to have
        ended, or to be broken, and is added to."""
        folders = self._tenants() if tenant is None else [self._tenant(tenant)]
        for folder in folders:
            for batch_id in self._ids(folder / _BATCHES):
                if batch_id in ended:
                    continue
                record = self._record(folder / _BATCHES / f"{batch_id}.json", batch_id)
                if record is None or record.has_ended:
                    ended.add(batch_id)
                else:
                    yield self.seen(record)

    def _record(self, path: Path, batch_id: str) -> BatchRecord | None:
        try:
            return self._read(BatchRecord, path, "batch", batch_id)
        except NotFound:
            return None
        except BrokenState as error:
            logger.error("%s", error)
            return None

    # What is not needed any more.

    def sweep(self, now: float) -> None:
        """Delete files that have expired, records of batches that ended long ago, and what killed processes left. `now`: Unix
        seconds."""
        for upload in (self._folder / _UPLOADS).iterdir():
            self._drop_if_abandoned(upload, now)
        for folder in self._tenants():
            used = self._sweep_batches(folder / _BATCHES, now)
            self._sweep_files(folder / _FILES, used, now)

    def _sweep_batches(self, folder: Path, now: float) -> set[str]:
        """Return the ids of the files that unfinished batches need."""
        used: set[str] = set()
        for batch_id in self._ids(folder):
            record = self._record(folder / f"{batch_id}.json", batch_id)
            if record is None:
                continue
            if record.ended_at is None:
                used |= {record.input_file_id, record.output_file_id or "", record.error_file_id or ""}
            elif record.ended_at + KEPT_S < now:
                for suffix in (".json", ".cancel", ".lock"):
                    (folder / f"{batch_id}{suffix}").unlink(missing_ok=True)
        return used

    def _sweep_files(self, folder: Path, used: set[str], now: float) -> None:
        known = set(self._ids(folder))
        for file_id in known - used:
            with suppress(MeshError):
                record = self._read(FileRecord, folder / f"{file_id}.json", "file", file_id)
                if record.expires_at < now:
                    self.delete_file(record.tenant, file_id)
        for path in folder.glob("*.jsonl"):
            if path.stem not in known | used:
                self._drop_if_abandoned(path, now)

    def _drop_if_abandoned(self, path: Path, now: float) -> None:
        with suppress(FileNotFoundError):
            if path.stat().st_mtime + ABANDONED_S < now:
                path.unlink()

    # Paths, and state files.

    def _tenant(self, tenant: str) -> Path:
        return self._folder / f"t{hashlib.sha256(tenant.encode()).hexdigest()[:32]}"

    def _tenants(self) -> list[Path]:
        return [path for path in self._folder.iterdir() if path.name != _UPLOADS and path.is_dir()]

    def _path(self, tenant: str, kind: str, wanted_id: str, suffix: str) -> Path:
        prefix = "file-" if kind == _FILES else "batch_"
        if not (_ID.fullmatch(wanted_id) and wanted_id.startswith(prefix)):
            raise _missing("file" if kind == _FILES else "batch", wanted_id)
        return self._tenant(tenant) / kind / f"{wanted_id}{suffix}"

    def _ids(self, folder: Path) -> list[str]:
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            return []
        return sorted(name.removesuffix(".json") for name in names if name.endswith(".json") and _ID.fullmatch(name[:-5]))

    def _read(self, kind: type[R], path: Path, word: str, wanted_id: str) -> R:
        try:
            values = json.loads(path.read_bytes())
            if not isinstance(values, dict):
                raise ValueError("it is not a JSON object")
            return checked(kind, values)
        except FileNotFoundError:
            raise _missing(word, wanted_id) from None
        except (MeshError, ValueError, RecursionError) as error:
            where = path.relative_to(self._folder)
            what = f"the state file {where} of the batch folder is broken ({error})"
            raise BrokenState(f"{what}; restore it from a backup, or move it away", field=f"{word}_id") from None

    def _write(self, path: Path, record: Body) -> None:
        """Replace a state file atomically, also across a power failure."""
        self._make(path.parent)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            with open(partial, "xb", opener=_private) as file:
                file.write(record.model_dump_json(exclude_none=True).encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
            sync_folder(path.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _make(self, folder: Path) -> None:
        os.makedirs(folder, mode=0o700, exist_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _missing(word: str, wanted_id: str) -> NotFound:
    return NotFound(f"{word}_id: there is no {word} {wanted_id[:80]!r}", field=f"{word}_id")


def now_s() -> int:
    """Return the time in Unix seconds."""
    return int(time.time())
