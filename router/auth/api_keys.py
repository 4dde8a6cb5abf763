"""API keys: made, kept as hashes, looked up. Pure but for the randomness of a new one.

A key is 256 random bits, so that SHA-256 without salt or stretching is the right hash: nobody finds a preimage by trying, and a
lookup must cost microseconds, not the tenth of a second that passwords need. The lookup is by hash: how long it takes says
nothing about the keys there are, because who tries cannot choose the hash of what he sends bit by bit.
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
    """A record, or a table of them, that cannot be used; the message names the field."""


@dataclass(frozen=True)
class ApiKey:
    """What is known of a key. `created` and `expires` are Unix seconds; `expires` None: never. `admin` may see all tenants."""

    hash: str
    name: str
    tenant: str
    created: int
    expires: int | None = None
    admin: bool = False

    def __post_init__(self) -> None:
        """Raises KeyProblem."""
        _require(isinstance(self.hash, str) and bool(_HASH.fullmatch(self.hash)), "hash", "must be 64 hexadecimal digits")
        _require(isinstance(self.name, str) and bool(_NAME.fullmatch(self.name)), "name", "must be 1 to 64 of [A-Za-z0-9_.@-]")
        tenant_fits = isinstance(self.tenant, str) and len(self.tenant) <= MAX_TENANT_CHARS and self.tenant.isprintable()
        _require(tenant_fits, "tenant", f"must be printable, with at most {MAX_TENANT_CHARS} characters")
        _require(_is_time(self.created), "created", "must be Unix seconds")
        _require(self.expires is None or _is_time(self.expires), "expires", "must be Unix seconds, or null for never")
        _require(isinstance(self.admin, bool), "admin", "must be true or false")

    def is_good(self, now: float) -> bool:
        """Whether it has not expired at `now`, Unix seconds."""
        return self.expires is None or now < self.expires

    def to_json(self) -> str:
        """One line, without anything that would let somebody in."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_value(cls, value: object) -> ApiKey:
        """From what JSON gave. Raises KeyProblem naming the field."""
        if not isinstance(value, Mapping):
            raise KeyProblem("a key must be a table with hash, name, tenant and created")
        known = {field.name for field in fields(cls)}
        for name in value:
            _require(name in known, str(name)[:40], f"unknown; known are {', '.join(sorted(known))}")
        for name in ("hash", "name", "tenant", "created"):
            _require(name in value, name, "is missing")
        return cls(**value)


class KeyTable:
    """Keys by hash. Immutable."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        """Raises KeyProblem for two keys of one name, or too many."""
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
        """The key that a client shows, expired or not; None: there is none."""
        return self._by_hash.get(hash_of(shown))


def new_key() -> str:
    """A key to be shown once. Its prefix lets scanners of repositories find one that got there."""
    return PREFIX + secrets.token_urlsafe(NUM_BYTES)


def hash_of(key: str) -> str:
    """What is stored of a key: SHA-256, in hexadecimal digits."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _is_time(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**40


def _require(condition: bool, name: str, problem: str) -> None:
    if not condition:
        raise KeyProblem(f"{name}: {problem}")


# API keys in a file: {"keys": [{"hash": …, "name": …, "tenant": …, "created": …}, …]}.
#
# Written by `pdmesh keys`: atomically, under a lock that serializes writers, readable by its owner alone.


MODE = 0o600


def read_key_file(path: Path) -> KeyTable:
    """Raises OSError, and KeyProblem naming key and field."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise KeyProblem(f"{path} is no JSON: {error}") from error
    listed = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(listed, list):
        raise KeyProblem(f"{path}: keys: must be a list")
    return KeyTable(_parsed(path, number, value) for number, value in enumerate(listed))


def update(path: Path, change: Callable[[KeyTable], KeyTable]) -> KeyTable:
    """Replace the file's table by `change` of it; a file that is not there is an empty table. Raises as `read`."""
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
    """The lock is a file of its own: the file itself is replaced."""
    lock = os.open(path.with_name(f".{path.name}.lock"), os.O_CREAT | os.O_RDWR, MODE)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _write(path: Path, text: str) -> None:
    """All or nothing, also when the power goes; mkstemp makes files that only their owner reads."""
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


# API keys in Redis: one hash per mesh, from a key's SHA-256 to its record, and a number that counts changes of it.


FULL_PERIOD_S = 30.0
_UNREAD = b"unread"

logger = logging.getLogger(__name__)


class RedisKeys:
    """The keys of one mesh. Close it after use."""

    def __init__(self, url: str, mesh: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError for a malformed URL, InvalidRecord for a mesh's name."""
        self._link = RedisLink(url)
        self._name = f"pdmesh:{records.check_id('mesh', mesh)}:keys"
        self._version_name = f"{self._name}:version"
        self._version: bytes | None = _UNREAD
        self._full_at = 0.0
        self._clock = clock

    async def read(self) -> KeyTable | None:
        """All of them; None: Redis does not answer. What is no record is left out, and logged."""
        found = await self._link.call(self._read_all)
        if found is None:
            return None
        self._version, records_read = found
        # Not on the event loop: a hundred thousand keys take it a second.
        return await asyncio.to_thread(_table, self._name, list(records_read.values()))

    async def read_changed(self) -> KeyTable | None:
        """As `read`; None also when nothing has changed since. Who writes without counting is noticed after `FULL_PERIOD_S`."""
        now = self._clock()
        version = await self._link.call(lambda redis: redis.get(self._version_name))
        if self._version != _UNREAD and version == self._version and now < self._full_at:
            return None
        table = await self.read()
        if table is not None:
            self._full_at = now + FULL_PERIOD_S
        return table

    async def add(self, key: ApiKey) -> bool:
        """False: Redis does not answer."""

        async def put(redis: Redis) -> bool:
            both: Any  # its commands return itself here, which its types do not say
            async with redis.pipeline(transaction=True) as both:
                await both.hset(self._name, key.hash, key.to_json()).incr(self._version_name).execute()
            return True

        return bool(await self._link.call(put))

    async def remove(self, key: ApiKey) -> bool:
        """False: Redis does not answer."""

        async def delete(redis: Redis) -> bool:
            both: Any
            async with redis.pipeline(transaction=True) as both:
                await both.hdel(self._name, key.hash).incr(self._version_name).execute()
            return True

        return bool(await self._link.call(delete))

    async def close(self) -> None:
        """Closes the connection."""
        await self._link.close()

    async def _read_all(self, redis: Redis) -> tuple[bytes | None, dict[bytes, bytes]]:
        """The version comes with the keys, in one transaction: what changes after it is seen the next time."""
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


# The keys that a router knows: read when it starts, followed in the background, asked without waiting.
#
# What was read last stands while its source is away or broken: a Redis that is down, or a file half written by hand, locks nobody
# out and lets nobody in. A revoked key works for at most `PERIOD_S` after that, while the source can be read.


PERIOD_S = 1.0
REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
RETRY_DELAY_S = 1.0

Read = Callable[[], Awaitable[KeyTable | None]]


class KeyStore:
    """One router's keys. `read` gives the table; None: as it was."""

    def __init__(self, read: Read, close: Callable[[], Awaitable[None]] | None = None) -> None:
        self._read = read
        self._close = close
        self._table: KeyTable | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read for the first time, then follow."""
        await self.refresh()
        self._task = asyncio.create_task(self._follow(), name="follow API keys")

    async def stop(self) -> None:
        """Ends the following."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._close is not None:
            await self._close()

    def find(self, shown: str) -> ApiKey | None:
        """The key that a client shows, if it is good now. Raises Unavailable while no keys could be read at all."""
        if self._table is None:
            raise Unavailable("the API keys cannot be read yet; retry later", retry_delay_s=RETRY_DELAY_S)
        key = self._table.find(shown)
        return key if key is not None and key.is_good(time.time()) else None

    async def refresh(self) -> None:
        """Take what the source has now."""
        try:
            table = await self._read()
        except (OSError, KeyProblem) as error:
            logger.error("the API keys cannot be read: %s; those read before stand", error)
            return
        except Exception:  # who stopped to look would let revoked keys in for as long as he lives
            logger.exception("reading the API keys failed; those read before stand")
            return
        if table is not None:
            self._table = table

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.refresh()


def open_store(source: str, mesh: str) -> KeyStore | None:
    """`source`: a file, or the URL of a Redis; empty: nobody needs a key. Raises ConfigError for what cannot be read now."""
    if not source:
        return None
    if source.startswith(REDIS_SCHEMES):
        keys = RedisKeys(source, mesh)
        return KeyStore(keys.read_changed, keys.close)
    reader = _FileReader(Path(source))
    try:
        read_key_file(reader.path)
    except (OSError, KeyProblem) as error:
        raise ConfigError("--api-keys", f"{error}", "make one with: pdmesh keys new --keys FILE --name NAME") from error
    return KeyStore(reader.read)


class _FileReader:
    """Reads a file when it has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: Stamp | None = None

    async def read(self) -> KeyTable | None:
        stamp = stamp_of(self.path)
        if stamp == self._stamp:
            return None
        self._stamp = stamp  # also of a file that is wrong: it is reported once
        return await asyncio.to_thread(read_key_file, self.path)
