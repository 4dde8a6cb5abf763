"""`pdmesh keys`: makes, lists and revokes the API keys that routers require."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.registry.records import InvalidRecord
from pdmesh.terminal import show, table
from router.auth import api_keys as auth_api_keys
from router.auth.api_keys import REDIS_SCHEMES, ApiKey, KeyProblem, KeyTable, RedisKeys, hash_of, new_key

DAY_S = 86_400


@dataclass(frozen=True)
class Options:
    """API keys: pdmesh keys new NAME --tenant TENANT --api-keys FILE, then pdmesh keys list, or pdmesh keys revoke NAME."""

    action: Literal["new", "list", "revoke"] = field(
        default="list", metadata={"help": "what to do, also as a bare word", "positional": True}
    )
    name: str = field(default="", metadata={"help": "of the key, also as a bare word", "positional": True})
    api_keys: str = field(
        default="", metadata={"help": "file with the keys, or the URL of a Redis that holds them", "secret": True}
    )
    mesh: str = field(default="default", metadata={"help": "name of the mesh in that Redis"})
    tenant: str = field(default="", metadata={"help": "tenant that requests with the key belong to; empty: the default tenant"})
    admin: bool = field(default=False, metadata={"help": "the key may ask for the status of the mesh"})
    days: int = field(default=0, metadata={"help": "how long it is valid; 0: until it is revoked"})
    json: bool = field(default=False, metadata={"help": "write JSON"})

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        if not self.api_keys:
            raise ValueError("api_keys: is missing; name the routers' file, or redis://host:port/0")
        if self.action != "list" and not self.name:
            raise ValueError(f"name: is missing; write pdmesh keys {self.action} NAME")
        if self.days < 0:
            raise ValueError("days: must not be negative; give 0 for a key without an end")
        if self.action == "new":
            _key_of(self, "", 0)


def run(options: Options) -> int:
    """Run the command; return 0 when it is done; 1 when it is not, 3 when Redis does not answer."""
    try:
        if options.api_keys.startswith(REDIS_SCHEMES):
            return asyncio.run(_in_redis(options))
        return _in_file(options, Path(options.api_keys))
    except (KeyProblem, OSError, ConfigError, InvalidRecord) as error:
        return _failed(str(error))


def _in_file(options: Options, path: Path) -> int:
    if options.action == "list":
        return _show(options, auth_api_keys.read_key_file(path))
    if options.action == "revoke":
        auth_api_keys.update(path, lambda keys: _without(keys, options.name))
        return _revoked(options)
    shown = new_key()
    auth_api_keys.update(path, lambda keys: KeyTable([*keys, _key_of(options, shown, int(time.time()))]))
    return _made(options, shown)


async def _in_redis(options: Options) -> int:
    store = RedisKeys(options.api_keys, options.mesh)
    try:
        keys = await store.read()
        if keys is None:
            return _failed("Redis does not answer", code=3)
        if options.action == "list":
            return _show(options, keys)
        if options.action == "revoke":
            done = await store.remove(_named(keys, options.name))
            return _revoked(options) if done else _failed("Redis does not answer: the key may still be good", code=3)
        shown = new_key()
        key = _key_of(options, shown, int(time.time()))
        KeyTable([*keys, key])  # rejects an existing name
        return _made(options, shown) if await store.add(key) else _failed("Redis does not answer", code=3)
    finally:
        await store.close()


def _key_of(options: Options, shown: str, now: int) -> ApiKey:
    expires = now + options.days * DAY_S if options.days else None
    return ApiKey(hash_of(shown), options.name, options.tenant, now, expires, options.admin)


def _named(keys: KeyTable, name: str) -> ApiKey:
    for key in keys:
        if key.name == name:
            return key
    raise KeyProblem(f"name: there is no key {name!r}; pdmesh keys list shows those that are there")


def _without(keys: KeyTable, name: str) -> KeyTable:
    revoked = _named(keys, name)
    return KeyTable(key for key in keys if key is not revoked)


def _made(options: Options, shown: str) -> int:
    """Write the key to stdout, alone, for a file or a variable; it cannot be shown again."""
    if options.json:
        print(json.dumps({"name": options.name, "tenant": options.tenant, "key": shown}))
        return 0
    print("give this to the client; it is stored nowhere and cannot be shown again:", file=sys.stderr)
    print(shown)
    return 0


def _revoked(options: Options) -> int:
    print(f"{options.name} is revoked; routers that are running refuse it within seconds", file=sys.stderr)
    return 0


def _show(options: Options, keys: KeyTable) -> int:
    if options.json:
        print(json.dumps([{name: value for name, value in asdict(key).items() if name != "hash"} for key in keys]))
        return 0
    rows = [(key.name, key.tenant or "(default)", "yes" if key.admin else "", _day(key.created), _end(key)) for key in keys]
    show(table(("name", "tenant", "admin", "created", "expires"), rows))
    return 0


def _end(key: ApiKey) -> str:
    if key.expires is None:
        return "never"
    return _day(key.expires) if key.is_good(time.time()) else f"{_day(key.expires)} (has)"


def _day(seconds: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))


def _failed(problem: str, code: int = 1) -> int:
    print(f"pdmesh keys: {problem}", file=sys.stderr)
    return code
