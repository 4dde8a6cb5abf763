"""A Redis server in the simulated world: RESP2 over simulated sockets, with the commands that the product sends.

Its keys expire by its wall clock, as Redis' do. Lua does not run here: the two scripts of the registry are told by their text and
done in Python; `test_redis.py` compares them with a redis-server. `disk` is what a restart finds: a copy that is made every
SAVE_PERIOD_S, or nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import fnmatch
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pdmesh.runtime.registry import registry

SAVE_PERIOD_S = 1.0
HEAD = re.compile(rb"^PDM1:(\d+):([0-9a-fA-F]+):")
DAY_US = 86_400_000_000
OK, PONG = "+OK\r\n", "+PONG\r\n"


class CommandError(Exception):
    """The error reply to a command."""


@dataclass
class Stream:
    """A Redis stream: entries by id, in order."""

    entries: list[tuple[tuple[int, int], list[bytes]]] = field(default_factory=list)
    last: tuple[int, int] = (0, 0)


@dataclass
class Keys:
    """All keys: values are bytes, hashes or streams; `expires` holds wall-clock milliseconds."""

    values: dict[bytes, Any] = field(default_factory=dict)
    expires: dict[bytes, int] = field(default_factory=dict)

    def get(self, key: bytes) -> Any:
        if self.expires.get(key, 1 << 62) <= time.time_ns() // 1_000_000:
            self.delete(key)
        return self.values.get(key)

    def put(self, key: bytes, value: Any, ttl_ms: int | None) -> None:
        self.values[key] = value
        self.expires.pop(key, None)
        if ttl_ms is not None:
            self.expires[key] = time.time_ns() // 1_000_000 + ttl_ms

    def delete(self, key: bytes) -> int:
        self.expires.pop(key, None)
        return int(self.values.pop(key, None) is not None)


class RedisServer:
    """One process of a Redis. `delay_s`: how long each command waits before it is done."""

    def __init__(self, disk: Keys | None) -> None:
        self.keys = copy.deepcopy(disk) if disk is not None else Keys()
        self.disk = disk if disk is not None else Keys()
        self.delay_s = 0.0
        self._subscribers: dict[bytes, list[asyncio.StreamWriter]] = {}
        self._added = asyncio.Event()

    async def run(self, host: str, port: int) -> None:
        """Serve, and save from time to time."""
        await asyncio.start_server(self._serve, host, port)
        while True:
            await asyncio.sleep(SAVE_PERIOD_S)
            self.disk = copy.deepcopy(self.keys)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (command := await _read_command(reader)) is not None:
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(await self._answer(command, writer))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            for subscribers in self._subscribers.values():
                with contextlib.suppress(ValueError):
                    subscribers.remove(writer)
            writer.close()

    async def _answer(self, command: list[bytes], writer: asyncio.StreamWriter) -> bytes:
        name, *arguments = command
        try:
            if name.upper() == b"SUBSCRIBE":
                return self._subscribe(arguments, writer)
            if name.upper() == b"XREAD":
                return encode(await self._xread(arguments))
            handle: Callable[..., Any] | None = getattr(self, f"do_{name.decode().lower()}", None)
            if handle is None:
                raise CommandError(f"ERR unknown command '{name.decode()}'")
            return encode(handle(*arguments))
        except CommandError as error:
            return f"-{error}\r\n".encode()

    # Connections and channels

    def do_ping(self, *_: bytes) -> str:
        return PONG

    def do_client(self, *_: bytes) -> str:
        return OK

    def do_select(self, _: bytes) -> str:
        return OK

    def do_publish(self, channel: bytes, message: bytes) -> int:
        subscribers = list(self._subscribers.get(channel, ()))
        for writer in subscribers:
            writer.write(encode([b"message", channel, message]))
        return len(subscribers)

    def _subscribe(self, channels: list[bytes], writer: asyncio.StreamWriter) -> bytes:
        for channel in channels:
            self._subscribers.setdefault(channel, []).append(writer)
        return b"".join(encode([b"subscribe", channel, number]) for number, channel in enumerate(channels, 1))

    def do_unsubscribe(self, *channels: bytes) -> list[Any]:
        return [b"unsubscribe", channels[0] if channels else None, 0]

    # Keys

    def do_type(self, key: bytes) -> str:
        value = self.keys.get(key)
        kind = {type(None): "none", bytes: "string", dict: "hash", Stream: "stream"}[type(value)]
        return f"+{kind}\r\n"

    def do_del(self, *keys: bytes) -> int:
        return sum(self.keys.delete(key) for key in keys)

    def do_pexpire(self, key: bytes, ttl_ms: bytes) -> int:
        if self.keys.get(key) is None:
            return 0
        self.keys.put(key, self.keys.get(key), int(ttl_ms))
        return 1

    def do_scan(self, cursor: bytes, *options: bytes) -> list[Any]:
        pattern = b"*"
        for option, value in zip(options[::2], options[1::2], strict=True):
            if option.upper() == b"MATCH":
                pattern = value
        found = [key for key in list(self.keys.values) if self.keys.get(key) is not None and _matches(key, pattern)]
        return [b"0", found]

    def do_getrange(self, key: bytes, first: bytes, last: bytes) -> bytes:
        return (self._string(key) or b"")[int(first) : int(last) + 1]

    def do_get(self, key: bytes) -> bytes | None:
        return self._string(key)

    def do_hgetall(self, key: bytes) -> list[bytes]:
        return [part for pair in self._hash(key).items() for part in pair]

    def do_hset(self, key: bytes, *pairs: bytes) -> int:
        stored = self._hash(key)
        before = len(stored)
        stored.update(zip(pairs[::2], pairs[1::2], strict=True))
        self.keys.values[key] = stored
        return len(stored) - before

    def do_eval(self, script: bytes, _: bytes, key: bytes, *arguments: bytes) -> int:
        if script == registry._PUT.encode():
            return self._put(key, *arguments)
        if script == registry._REMOVE.encode():
            return self._remove(key, *arguments)
        raise CommandError("ERR the simulation does not know this script")

    def _put(self, key: bytes, generation: bytes, epoch: bytes, payload: bytes, ttl_ms: bytes) -> int:
        now = time.time_ns() // 1000
        found, holder = self._holder(key)
        if found > now + DAY_US:
            found, holder = 0, None
        mine = int(generation)
        if holder == epoch:
            mine = found
        elif mine == 0:
            mine = max(now, found + 1)
        elif found > mine:
            return 0
        self.keys.put(key, b"PDM1:%016d:%s:%s" % (mine, epoch, payload), int(ttl_ms))
        return mine

    def _remove(self, key: bytes, epoch: bytes) -> int:
        return self.keys.delete(key) if self._holder(key)[1] == epoch else 0

    def _holder(self, key: bytes) -> tuple[int, bytes | None]:
        value = self.keys.get(key)
        head = HEAD.match(value[:64]) if isinstance(value, bytes) else None
        return (int(head[1]), head[2]) if head is not None else (0, None)

    # Streams

    def do_xadd(self, key: bytes, *arguments: bytes) -> bytes:
        rest, limit = list(arguments), 1 << 30
        if rest[0].upper() == b"MAXLEN":
            limit = int(rest[2] if rest[1] in (b"~", b"=") else rest[1])
            rest = rest[3:] if rest[1] in (b"~", b"=") else rest[2:]
        stream, entry = self._stream(key) or Stream(), _entry_id(rest[0])
        if entry <= stream.last:
            raise CommandError("ERR The ID specified in XADD is equal or smaller than the target stream top item")
        stream.entries.append((entry, rest[1:]))
        stream.last = entry
        del stream.entries[:-limit]
        self.keys.values[key] = stream
        self._added.set()
        return rest[0]

    def do_xrevrange(self, key: bytes, _last: bytes, _first: bytes, *options: bytes) -> list[Any]:
        stream = self._stream(key) or Stream()
        newest = stream.entries[::-1][: int(options[1]) if options else None]
        return [_shown(entry) for entry in newest]

    async def _xread(self, arguments: list[bytes]) -> list[Any] | None:
        names = [argument.upper() for argument in arguments]
        count = int(arguments[names.index(b"COUNT") + 1]) if b"COUNT" in names else 1 << 30
        wait_s = int(arguments[names.index(b"BLOCK") + 1]) / 1000 if b"BLOCK" in names else 0.0
        keys = arguments[names.index(b"STREAMS") + 1 :]
        positions = dict(zip(keys[: len(keys) // 2], keys[len(keys) // 2 :], strict=True))
        deadline = time.monotonic() + wait_s
        while True:
            self._added.clear()
            if found := self._after(positions, count):
                return found
            if (left := deadline - time.monotonic()) <= 0:
                return None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._added.wait()

    def _after(self, positions: dict[bytes, bytes], count: int) -> list[Any]:
        found = []
        for key, position in positions.items():
            stream = self._stream(key)
            newer = [entry for entry in stream.entries if entry[0] > _entry_id(position)] if stream is not None else []
            if newer:
                found.append([key, [_shown(entry) for entry in newer[:count]]])
        return found

    def _string(self, key: bytes) -> bytes | None:
        return self._typed(key, bytes)  # type: ignore[no-any-return]

    def _hash(self, key: bytes) -> dict[bytes, bytes]:
        return self._typed(key, dict) or {}

    def _stream(self, key: bytes) -> Stream | None:
        return self._typed(key, Stream)  # type: ignore[no-any-return]

    def _typed(self, key: bytes, kind: type) -> Any:
        value = self.keys.get(key)
        if value is not None and not isinstance(value, kind):
            raise CommandError("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value


def encode(value: Any) -> bytes:
    """Return a reply: text is a status as it is, bytes are a bulk string."""
    if isinstance(value, str):
        return value.encode()
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%s\r\n" % (len(value), value)
    return b"*%d\r\n" % len(value) + b"".join(map(encode, value))


async def _read_command(reader: asyncio.StreamReader) -> list[bytes] | None:
    header = await reader.readline()
    if not header:
        return None
    command = []
    for _ in range(int(header[1:])):
        size = int((await reader.readline())[1:])
        command.append((await reader.readexactly(size + 2))[:-2])
    return command


def _matches(key: bytes, pattern: bytes) -> bool:
    return fnmatch.fnmatchcase(key.decode("latin-1"), pattern.decode("latin-1"))


def _entry_id(text: bytes) -> tuple[int, int]:
    first, _, second = text.partition(b"-")
    return int(first), int(second or 0)


def _shown(entry: tuple[tuple[int, int], list[bytes]]) -> list[Any]:
    (first, second), fields = entry
    return [b"%d-%d" % (first, second), fields]
