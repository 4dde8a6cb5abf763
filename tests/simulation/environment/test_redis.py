"""The simulated Redis answers as a redis-server does, byte for byte, to what the product sends; the registry works on it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from pdmesh.runtime.registry import registry
from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from pdmesh.runtime.registry.registry import Registry
from tests.simulation.environment.redis import RedisServer, encode

PUT, REMOVE = registry._PUT.encode(), registry._REMOVE.encode()
FIRST, SECOND = b"00000000000000aa", b"00000000000000bb"
COMMANDS: list[list[bytes]] = [
    [b"PING"],
    [b"SELECT", b"0"],
    [b"GET", b"absent"],
    [b"TYPE", b"absent"],
    [b"HSET", b"h", b"a", b"1", b"b", b"2"],
    [b"HSET", b"h", b"a", b"3"],
    [b"HGETALL", b"h"],
    [b"HGETALL", b"absent"],
    [b"GET", b"h"],
    [b"TYPE", b"h"],
    [b"XADD", b"s", b"MAXLEN", b"~", b"256", b"1-1", b"c", b"x"],
    [b"XADD", b"s", b"MAXLEN", b"~", b"256", b"1-1", b"c", b"x"],
    [b"XADD", b"s", b"MAXLEN", b"~", b"256", b"3-1", b"c", b"y"],
    [b"PEXPIRE", b"s", b"60000"],
    [b"PEXPIRE", b"absent", b"60000"],
    [b"XREVRANGE", b"s", b"+", b"-", b"COUNT", b"1"],
    [b"XREVRANGE", b"absent", b"+", b"-", b"COUNT", b"1"],
    [b"XREAD", b"COUNT", b"64", b"BLOCK", b"10", b"STREAMS", b"s", b"absent", b"0-1", b"0-1"],
    [b"XREAD", b"COUNT", b"1", b"STREAMS", b"s", b"0-1"],
    [b"XADD", b"h", b"1-1", b"c", b"x"],
    [b"PUBLISH", b"channel", b"to none"],
    [b"SCAN", b"0", b"MATCH", b"h*", b"COUNT", b"1000"],
    [b"DEL", b"h", b"absent"],
    [b"EVAL", PUT, b"1", b"w", b"5000", FIRST, b"other than a record", b"60000"],
    [b"GETRANGE", b"w", b"0", b"9"],
    [b"EVAL", PUT, b"1", b"w", b"4000", SECOND, b"an older process", b"60000"],
    [b"EVAL", PUT, b"1", b"w", b"7000", SECOND, b"a newer one", b"60000"],
    [b"EVAL", PUT, b"1", b"w", b"1", SECOND, b"its own again", b"60000"],
    [b"EVAL", REMOVE, b"1", b"w", FIRST],
    [b"GETRANGE", b"w", b"0", b"200"],
    [b"EVAL", REMOVE, b"1", b"w", SECOND],
    [b"GETRANGE", b"w", b"0", b"200"],
    [b"HSET", b"w", b"a", b"garbage"],
    [b"EVAL", PUT, b"1", b"w", b"5000", FIRST, b"over garbage", b"60000"],
    [b"GETRANGE", b"w", b"0", b"200"],
    [b"EVAL", PUT, b"1", b"v", b"8000000000000000", FIRST, b"from the far future", b"60000"],
    [b"EVAL", PUT, b"1", b"v", b"6000", SECOND, b"believed", b"60000"],
    [b"GETRANGE", b"v", b"0", b"200"],
]


@contextlib.asynccontextmanager
async def simulated() -> AsyncIterator[int]:
    """Serve the simulated Redis on a real socket; yield its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    task = asyncio.create_task(RedisServer(None).run("127.0.0.1", port))
    try:
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                assert not task.done()
                await asyncio.sleep(0)
                continue
            writer.close()
            break
        yield port
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def replies(port: int) -> list[bytes]:
    """Return the reply to each command."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = []
    for command in COMMANDS:
        writer.write(encode(command))
        found.append(await _reply(reader))
    writer.close()
    return found


async def _reply(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readline()
    size = int(line[1:]) if line[:1] in b"$*" else -1
    if line[:1] == b"$" and size >= 0:
        return line + await reader.readexactly(size + 2)
    if line[:1] == b"*":
        return line + b"".join([await _reply(reader) for _ in range(size)])
    return line


@pytest.mark.timeout(60)
async def test_it_answers_as_redis_does() -> None:
    async with EmbeddedRedis() as server, simulated() as port:
        right, ours = await replies(server.port), await replies(port)
    assert len(ours) == len(COMMANDS)
    for command, expected, got in zip(COMMANDS, right, ours, strict=True):
        if expected.startswith(b"-"):
            assert got.split(b" ")[0] == expected.split(b" ")[0], command
        else:
            # Redis says "no entries" as a null array, which the client reads as it does the null string
            assert got.replace(b"$-1\r\n", b"*-1\r\n") == expected.replace(b"$-1\r\n", b"*-1\r\n"), command


async def test_a_router_registers_and_is_ousted() -> None:
    async with simulated() as port:
        older, newer = Registry(f"redis://127.0.0.1:{port}/0"), Registry(f"redis://127.0.0.1:{port}/0")
        assert await older.register_router("r", "host:1", 1)
        assert await newer.register_router("r", "host:2", 2)
        assert not await older.register_router("r", "host:1", 1)
        assert await older.list_routers() == {"r": "host:2"}
        assert not await older.deregister_router("r", 1)
        assert await newer.deregister_router("r", 2)
        assert await newer.list_routers() == {}
        await older.stop()
        await newer.stop()
