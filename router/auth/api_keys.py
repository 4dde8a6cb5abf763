"""API keys: made, kept as hashes, looked up. Pure but for the randomness of a new one.

A key is 256 random bits, so that SHA-256 without salt or stretching is the right hash: nobody finds a preimage by trying, and a
lookup must cost microseconds, not the tenth of a second that passwords need. The lookup is by hash: how long it takes says
nothing about the keys there are, because who tries cannot choose the hash of what he sends bit by bit.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields

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
