"""API keys: records and tables of them, in a file or in Redis, and the store that a router asks.

A key is 256 random bits, so SHA-256 without salt or stretching is the right hash: a preimage cannot be found by trying, and a
lookup must cost microseconds, not the tenth of a second that passwords need. The lookup is by hash, so its duration says nothing
about the stored keys: a client cannot choose the hash of what it sends bit by bit.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

from redis.asyncio import Redis

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.errors import Unavailable
from pdmesh.runtime.files import Stamp, stamp_of
from pdmesh.runtime.registry import records
from pdmesh.runtime.registry.redis_link import RedisLink

PREFIX = "pdm_"
NUM_BYTES = 32
MAX_KEYS = 100_000
MAX_NAME_CHARS = 64
MAX_TENANT_CHARS = 128

_HASH = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(rf"[A-Za-z0-9_.@-]{{1,{MAX_NAME_CHARS}}}")


class KeyProblem(ValueError):
    """Report a record, or a table of records, that cannot be used; the message names the field."""


@dataclass(frozen=True)
class ApiKey:
    """Hold the record of a key. `created` and `expires` are Unix seconds; `expires` None: never. `admin`: the key may see all
    tenants."""

    hash: str
    name: str
    tenant: str
    created: int
    expires: int | None = None
    admin: bool = False

    def __post_init__(self) -> None:
        """Check all fields. Raises KeyProblem."""
        _require(isinstance(self.hash, str) and bool(_HASH.fullmatch(self.hash)), "hash", "must be 64 hexadecimal digits")
        _require(isinstance(self.name, str) and bool(_NAME.fullmatch(self.name)), "name", "must be 1 to 64 of [A-Za-z0-9_.@-]")
        tenant_fits = isinstance(self.tenant, str) and len(self.tenant) <= MAX_TENANT_CHARS and self.tenant.isprintable()
        _require(tenant_fits, "tenant", f"must be printable, with at most {MAX_TENANT_CHARS} characters")
        _require(_is_time(self.created), "created", "must be Unix seconds")
        _require(self.expires is None or _is_time(self.expires), "expires", "must be Unix seconds, or null for never")
        _require(isinstance(self.admin, bool), "admin", "must be true or false")

    def is_good(self, now: float) -> bool:
        """Return whether the key has not expired at `now`, Unix seconds."""
        return self.expires is None or now < self.expires

    def to_json(self) -> str:
        """Return the record as one line, which does not contain the key itself."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_value(cls, value: object) -> ApiKey:
        """Return the record that JSON gave. Raises KeyProblem naming the field."""
        if not isinstance(value, Mapping):
            raise KeyProblem("a key must be a table with hash, name, tenant and created")
        known = {field.name for field in fields(cls)}
        for name in value:
            _require(name in known, str(name)[:40], f"unknown; known are {', '.join(sorted(known))}")
        for name in ("hash", "name", "tenant", "created"):
            _require(name in value, name, "is missing")
        return cls(**value)


class KeyTable:
    """Hold keys by hash. Immutable."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        """Build the table. Raises KeyProblem for two keys of one name, or too many keys."""
        self._by_hash: dict[str, ApiKey] = {}
        names: set[str] = set()
        for key in keys:
            _require(key.name not in names, "name", f"{key.name!r} is there twice")
            names.add(key.name)
            self._by_hash[key.hash] = key
        _require(len(self._by_hash) <= MAX_KEYS, "keys", f"there are more than {MAX_KEYS}")

    def __len__(self) -> int:
        return len(self._by_hash)

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(sorted(self._by_hash.values(), key=lambda key: (key.tenant, key.name)))

    def find(self, shown: str) -> ApiKey | None:
        """Return the record of the key that a client presents, expired or not; None: there is none."""
        return self._by_hash.get(hash_of(shown))


def new_key() -> str:
    """Return a new key, to be shown once. Its prefix lets scanners find keys that were committed to a repository."""
    return PREFIX + secrets.token_urlsafe(NUM_BYTES)


def hash_of(key: str) -> str:
    """Return what is stored of a key: SHA-256, in hexadecimal digits."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _is_time(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**40


def _require(condition: bool, name: str, problem: str) -> None:
    if not condition:
        raise KeyProblem(f"{name}: {problem}")


# API keys in a file: {"keys": [{"hash": …, "name": …, "tenant": …, "created": …}, …]}.
#
# `pdmesh keys` writes it atomically, under a lock that serializes writers; only its owner can read it.

MODE = 0o600


def read_key_file(path: Path) -> KeyTable:
    """Return the keys in a file. Raises OSError, and KeyProblem naming key and field."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise KeyProblem(f"{path} is no JSON: {error}") from error
    listed = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(listed, list):
        raise KeyProblem(f"{path}: keys: must be a list")
    return KeyTable(_parsed(path, number, value) for number, value in enumerate(listed))


def update(path: Path, change: Callable[[KeyTable], KeyTable]) -> KeyTable:
    """Replace the file's table by `change` of it; a file that does not exist is an empty table. Raises as `read_key_file`."""
    with _locked(path):
        table = change(read_key_file(path) if path.exists() else KeyTable())
        _write(path, json.dumps({"keys": [json.loads(key.to_json()) for key in table]}, indent=1) + "\n")
        return table


def _parsed(path: Path, number: int, value: object) -> ApiKey:
    try:
        return ApiKey.from_value(value)
    except KeyProblem as error:
        raise KeyProblem(f"{path}: keys[{number}].{error}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock, which is a file of its own because the key file is replaced."""
    lock = os.open(path.with_name(f".{path.name}.lock"), os.O_CREAT | os.O_RDWR, MODE)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _write(path: Path, text: str) -> None:
    """Replace the file atomically, also across a power failure; mkstemp makes files that only their owner can read."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


# API keys in Redis: one Redis hash per mesh, from a key's SHA-256 to its record, and a counter of changes.

FULL_PERIOD_S = 30.0
_UNREAD = b"unread"

logger = logging.getLogger(__name__)


class RedisKeys:
    """Read and write the keys of one mesh. Close it after use."""

    def __init__(self, url: str, mesh: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the client. Raises ConfigError for a malformed URL, InvalidRecord for an invalid name of a mesh."""
        self._link = RedisLink(url)
        self._name = f"pdmesh:{records.check_id('mesh', mesh)}:keys"
        self._version_name = f"{self._name}:version"
        self._version: bytes | None = _UNREAD
        self._full_at = 0.0
        self._clock = clock

    async def read(self) -> KeyTable | None:
        """Return all keys; None: Redis does not answer. Invalid records are left out, and logged."""
        found = await self._link.call(self._read_all)
        if found is None:
            return None
        self._version, records_read = found
        # Not on the event loop: a hundred thousand keys take a second.
        return await asyncio.to_thread(_table, self._name, list(records_read.values()))

    async def read_changed(self) -> KeyTable | None:
        """Return as `read`, but None also when nothing has changed. A change that was not counted is noticed after
        `FULL_PERIOD_S`."""
        now = self._clock()
        version = await self._link.call(lambda redis: redis.get(self._version_name))
        if self._version != _UNREAD and version == self._version and now < self._full_at:
            return None
        table = await self.read()
        if table is not None:
            self._full_at = now + FULL_PERIOD_S
        return table

    async def add(self, key: ApiKey) -> bool:
        """Add a key. False: Redis does not answer."""

        async def put(redis: Redis) -> bool:
            both: Any  # its commands return the pipeline itself here, unlike their declared types
            async with redis.pipeline(transaction=True) as both:
                await both.hset(self._name, key.hash, key.to_json()).incr(self._version_name).execute()
            return True

        return bool(await self._link.call(put))

    async def remove(self, key: ApiKey) -> bool:
        """Remove a key. False: Redis does not answer."""

        async def delete(redis: Redis) -> bool:
            both: Any
            async with redis.pipeline(transaction=True) as both:
                await both.hdel(self._name, key.hash).incr(self._version_name).execute()
            return True

        return bool(await self._link.call(delete))

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()

    async def _read_all(self, redis: Redis) -> tuple[bytes | None, dict[bytes, bytes]]:
        """Read the version and the keys in one transaction: a change after it shows in the next version."""
        both: Any
        async with redis.pipeline(transaction=True) as both:
            version, found = await both.get(self._version_name).hgetall(self._name).execute()
        return version, cast("dict[bytes, bytes]", found)


def _table(name: str, values: list[bytes]) -> KeyTable:
    keys: dict[str, ApiKey] = {}
    for number, value in enumerate(values):
        try:
            key = ApiKey.from_value(json.loads(value))
            keys.setdefault(key.name, key)
        except (KeyProblem, ValueError, RecursionError) as error:
            logger.error("entry %d of %s in Redis is no API key: %s", number, name, error)
    return KeyTable(keys.values())


# The keys that a router knows: read at start, followed in the background, looked up without waiting.
#
# The keys read last stay valid while their source is unavailable or broken, such as a Redis that is down or a half-written file.
# A revoked key works for at most `PERIOD_S` more, while the source can be read.

PERIOD_S = 1.0
REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
RETRY_DELAY_S = 1.0

Read = Callable[[], Awaitable[KeyTable | None]]


class KeyStore:
    """Hold one router's keys. `read` returns the table; None: it has not changed."""

    def __init__(self, read: Read, close: Callable[[], Awaitable[None]] | None = None) -> None:
        self._read = read
        self._close = close
        self._table: KeyTable | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read for the first time, then follow in the background."""
        await self.refresh()
        self._task = asyncio.create_task(self._follow(), name="follow API keys")

    async def stop(self) -> None:
        """Stop following."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._close is not None:
            await self._close()

    def find(self, shown: str) -> ApiKey | None:
        """Return the record of the key that a client presents, if it is valid now. Raises Unavailable while no keys could be read
        at all."""
        if self._table is None:
            raise Unavailable("the API keys cannot be read yet; retry later", retry_delay_s=RETRY_DELAY_S)
        key = self._table.find(shown)
        return key if key is not None and key.is_good(time.time()) else None

    async def refresh(self) -> None:
        """Read the source again."""
        try:
            table = await self._read()
        except (OSError, KeyProblem) as error:
            logger.error("the API keys cannot be read: %s; those read before stand", error)
            return
        except Exception:  # else revoked keys would stay valid for ever
            logger.exception("reading the API keys failed; those read before stand")
            return
        if table is not None:
            self._table = table

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.refresh()


def open_store(source: str, mesh: str) -> KeyStore | None:
    """Return the store for `source`: a file, or the URL of a Redis; None for an empty one: no keys are required. Raises
    ConfigError if it cannot be read now."""
    if not source:
        return None
    if source.startswith(REDIS_SCHEMES):
        keys = RedisKeys(source, mesh)
        return KeyStore(keys.read_changed, keys.close)
    reader = _FileReader(Path(source))
    try:
        read_key_file(reader.path)
    except (OSError, KeyProblem) as error:
        raise ConfigError("--api-keys", f"{error}", "make one with: pdmesh keys new NAME --api-keys FILE") from error
    return KeyStore(reader.read)


class _FileReader:
    """Read a file when it has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: Stamp | None = None

    async def read(self) -> KeyTable | None:
        stamp = stamp_of(self.path)
        if stamp == self._stamp:
            return None
        self._stamp = stamp  # also for an invalid file, so that it is reported once
        return await asyncio.to_thread(read_key_file, self.path)
