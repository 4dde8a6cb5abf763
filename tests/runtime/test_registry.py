"""The registry against a real Redis: ownership by generation, garbage, outages."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.registry.records import InvalidRecord
from pdmesh.runtime.registry.redis_link import RedisLink
from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from pdmesh.runtime.registry.registry import Registry, router_announcer, worker_announcer
from pdmesh.v1.worker_pb2 import ROLE_DECODE, ROLE_PREFILL, WorkerInfo
from tests.runtime.test_records import record, worker
from tests.support.waiting import eventually

KEY = "pdmesh:default:worker:"


@pytest.fixture
async def registry(redis_server: EmbeddedRedis) -> AsyncIterator[Registry]:
    client = Registry(redis_server.url, ttl_s=60)
    yield client
    await client.stop()


@pytest.fixture
async def other(redis_server: EmbeddedRedis) -> AsyncIterator[Registry]:
    """Another process's client."""
    client = Registry(redis_server.url, ttl_s=60)
    yield client
    await client.stop()


@pytest.fixture
async def redis(redis_server: EmbeddedRedis) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_server.url, protocol=2) as client:
        yield client


async def test_a_worker_is_found_until_it_deregisters(registry: Registry, other: Registry) -> None:
    info = worker()
    assert await registry.list_workers() == []
    assert await registry.register(info)
    assert await other.list_workers() == [info]
    info.roles[:] = [ROLE_DECODE]
    assert await registry.renew(info)
    assert [list(found.roles) for found in await other.list_workers()] == [[ROLE_DECODE]]
    assert await registry.deregister(info)
    assert not await registry.deregister(info)
    assert await other.list_workers() == []


async def test_a_record_lapses(redis_server: EmbeddedRedis, other: Registry, redis: Redis) -> None:
    brief = Registry(redis_server.url, ttl_s=0.2)
    await brief.register(worker())
    assert 0 < await redis.pttl(f"{KEY}w1") <= 200
    deadline = time.monotonic() + 10
    while await other.list_workers():
        assert time.monotonic() < deadline
    await brief.stop()


async def test_meshes_do_not_see_each_other(redis_server: EmbeddedRedis, registry: Registry) -> None:
    elsewhere = Registry(redis_server.url, "elsewhere")
    await elsewhere.register(worker())
    assert await registry.list_workers() == []
    await elsewhere.stop()


async def test_an_older_process_cannot_touch_the_record_of_a_newer_one(
    registry: Registry, other: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = worker(epoch=2**64 - 1), worker(epoch=1, address="127.0.0.1:6000")
    assert await registry.register(old)
    assert await other.register(new)
    assert not await registry.renew(old)
    assert not await registry.renew(old)
    assert caplog.text.count("belongs to a newer process") == 1
    assert not await registry.deregister(old)
    assert await registry.list_workers() == [new]
    assert await other.renew(new)


async def test_the_newer_process_prevails_after_redis_lost_everything(registry: Registry, other: Registry, redis: Redis) -> None:
    old, new = worker(epoch=2**64 - 1), worker(epoch=1, address="127.0.0.1:6000")
    await registry.register(old)
    await other.register(new)
    await redis.flushall()
    assert await registry.renew(old)
    assert await other.renew(new)
    assert not await registry.renew(old)
    assert await registry.list_workers() == [new]


async def test_a_third_process_prevails_over_both(redis_server: EmbeddedRedis, registry: Registry, other: Registry) -> None:
    await registry.register(worker(epoch=3))
    await other.register(worker(epoch=2))
    third = Registry(redis_server.url)
    assert await third.register(worker(epoch=1))
    assert not await registry.renew(worker(epoch=3))
    assert not await other.renew(worker(epoch=2))
    await third.stop()


async def test_a_process_that_registers_again_keeps_its_place(registry: Registry) -> None:
    info = worker()
    await registry.register(info)
    assert await registry.register(info)
    assert await registry.renew(info)


async def test_routers_register_too(registry: Registry, other: Registry) -> None:
    assert await registry.register_router("r1", "127.0.0.1:50051", 5)
    assert await other.list_routers() == {"r1": "127.0.0.1:50051"}
    assert await other.register_router("r1", "127.0.0.1:50052", 6)
    assert not await registry.register_router("r1", "127.0.0.1:50051", 5)
    assert not await registry.deregister_router("r1", 5)
    assert await other.deregister_router("r1", 6)
    assert await registry.list_routers() == {}


async def test_what_no_reader_would_accept_is_not_written(registry: Registry) -> None:
    with pytest.raises(InvalidRecord, match="address"):
        await registry.register(worker(address="nowhere"))
    with pytest.raises(InvalidRecord, match="router_id"):
        await registry.register_router("r 1", "127.0.0.1:1", 5)


async def test_garbage_is_skipped_counted_and_logged_once_with_its_key(
    registry: Registry, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    await registry.register(worker("good"))
    await redis.set(f"{KEY}text", "hello")
    await redis.set(f"{KEY}huge", b"PDM1:" + b"x" * 5_000_000)
    await redis.set(f"{KEY}other", record(worker("w1").SerializeToString()))
    await redis.set(f"{KEY}cut", record(worker("cut").SerializeToString()[:-4]))
    await redis.set(f"{KEY}lied", record(worker("lied").SerializeToString(), epoch=9))
    await redis.set(KEY.encode() + b"\xff\xfe", "hello")
    await redis.set(KEY, "hello")
    await redis.lpush(f"{KEY}list", "a")
    await redis.hset(f"{KEY}hash", "a", "b")
    await redis.sadd("pdmesh:default:router:set", "a")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert [info.worker_id for info in await registry.list_workers()] == ["good"]
    assert registry.num_invalid_records == 10
    messages = [message for message in caplog.messages if "is ignored" in message]
    assert len(messages) == 10
    for name in ("text", "huge", "other", "cut", "lied", r"\xff\xfe", "list", "hash", "router:set"):
        assert sum(name in message for message in messages) >= 1, name
    assert registry.connected


@pytest.mark.parametrize("kind", ["text", "list", "future"])
async def test_a_worker_takes_its_key_back_from_garbage(registry: Registry, redis: Redis, kind: str) -> None:
    if kind == "list":
        await redis.lpush(f"{KEY}w1", "a")
    else:
        value = b"hello" if kind == "text" else record(b"", epoch=9, generation=9_999_999_999_999_999)
        await redis.set(f"{KEY}w1", value)
    assert await registry.register(worker())
    assert await registry.list_workers() == [worker()]
    assert await redis.pttl(f"{KEY}w1") > 0


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_nothing_in_redis_breaks_a_reader(data: st.DataObject) -> None:
    suffix = st.binary(max_size=20) | st.sampled_from([b"w1", b"worker:x", b""])
    value = st.binary(max_size=200) | st.binary(max_size=100).map(record) | st.just(record(worker().SerializeToString()))
    content = data.draw(st.dictionaries(suffix, value, max_size=5))

    async def read() -> None:
        async with EmbeddedRedis() as server, Redis.from_url(server.url, protocol=2) as redis:
            for name, text in content.items():
                await redis.set(KEY.encode() + name, text)
            registry = Registry(server.url)
            found = await registry.list_workers()
            assert [info.worker_id for info in found] in ([], ["w1"])
            assert registry.connected
            await registry.stop()

    asyncio.run(read())


async def test_a_watcher_hears_the_first_state_and_changes_only(registry: Registry, other: Registry) -> None:
    heard: list[list[str]] = []
    registry.start(lambda workers: heard.append([info.worker_id for info in workers]), poll_period_s=0.01)
    await eventually(lambda: heard == [[]])
    await other.register(worker("a"))
    await eventually(lambda: heard == [[], ["a"]])
    await other.renew(worker("a"))
    await other.register(worker("b"))
    await eventually(lambda: heard == [[], ["a"], ["a", "b"]])
    await other.deregister(worker("a"))
    await eventually(lambda: heard[-1] == ["b"])
    assert len(heard) == 4


async def test_a_listener_that_fails_does_not_end_the_watch(registry: Registry, other: Registry) -> None:
    heard: list[int] = []

    def listen(workers: list[WorkerInfo]) -> None:
        heard.append(len(workers))
        raise RuntimeError("listener broken on purpose")

    registry.start(listen, poll_period_s=0.01)
    await eventually(lambda: heard == [0])
    await other.register(worker())
    await eventually(lambda: heard == [0, 1])


async def test_while_redis_hangs_calls_are_quick_and_the_snapshot_stays(redis_server: EmbeddedRedis) -> None:
    registry = Registry(redis_server.url, ttl_s=60, timeout_s=0.2)
    info = worker()
    await registry.register(info)
    assert await registry.list_workers() == [info]
    os.kill(redis_server.pid, signal.SIGSTOP)
    started = time.monotonic()
    assert await registry.list_workers() == [info]
    assert not registry.connected
    assert not await registry.renew(info)  # during the back-off: at once
    assert not await registry.register(info)
    assert not await registry.deregister(info)
    assert time.monotonic() - started < 5
    age_s = registry.age_s()
    assert age_s is not None
    assert age_s >= 0.2
    os.kill(redis_server.pid, signal.SIGCONT)
    deadline = time.monotonic() + 15
    while not await registry.renew(info):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    assert registry.connected
    await registry.stop()


async def test_redis_may_come_later_and_go_and_come_again(caplog: pytest.LogCaptureFixture) -> None:
    server = EmbeddedRedis()
    url = await server.start()
    port = server.port
    await server.stop()
    registry = Registry(url, ttl_s=60)
    heard: list[int] = []
    registry.start(lambda workers: heard.append(len(workers)), poll_period_s=0.01)
    announcer = worker_announcer(Registry(url, ttl_s=0.3), worker)
    announcer.start()
    assert await registry.list_workers() == []
    assert registry.age_s() is None
    assert not registry.connected
    for _ in range(2):
        server = EmbeddedRedis(port)
        await server.start()
        await eventually(lambda: registry.connected and list(registry.snapshot.workers) == ["w1"])
        await server.stop()
        await eventually(lambda: not registry.connected)
        assert list(registry.snapshot.workers) == ["w1"]
    await announcer.stop()
    await registry.stop()
    assert sum("does not serve" in message for message in caplog.messages if "registry" not in message) < 10


async def test_an_announcer_renews_follows_changes_and_withdraws(redis_server: EmbeddedRedis, registry: Registry) -> None:
    info = worker()
    writer = Registry(redis_server.url, ttl_s=1.5)
    announcers = worker_announcer(writer, lambda: info), router_announcer(writer, "r1", "127.0.0.1:1", 5)
    for announcer in announcers:
        announcer.start()
    registry.start(lambda workers: None, poll_period_s=0.01)
    await eventually(lambda: registry.snapshot.workers and registry.snapshot.routers)
    since = time.monotonic()
    while time.monotonic() < since + 2.0:  # longer than a record lives without renewal
        assert registry.snapshot.workers
        assert registry.snapshot.routers
        await asyncio.sleep(0.02)
    info.roles[:] = [ROLE_PREFILL]
    announcers[0].renew_now()
    await eventually(lambda: list(registry.snapshot.workers["w1"].roles) == [ROLE_PREFILL])
    for announcer in announcers:
        await announcer.stop()
        await announcer.stop()
    assert await registry.list_workers() == []
    assert await registry.list_routers() == {}
    await writer.stop()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b":abc\r\n", b"*-7\r\n$x\r\n", b"\x00\xff" * 50])
async def test_something_on_the_port_that_is_no_redis(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    registry = Registry(f"redis://127.0.0.1:{port}", timeout_s=0.5)
    assert not await registry.register(worker())
    assert await registry.list_workers() == []
    assert not registry.connected
    await registry.stop()
    server.close()


@pytest.mark.parametrize("url", ["", "http://127.0.0.1", "redis://host:port", "127.0.0.1:6379"])
def test_a_malformed_url_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match="--redis"):
        Registry(url)


def test_a_wrong_name_of_a_mesh_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"--mesh: .*'a b' is not"):
        Registry("redis://127.0.0.1:1", "a b")


def test_a_password_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        Registry("http://user:geheim@host")
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize("answer", [None, "late"])
async def test_a_cancellation_that_the_client_library_loses_still_counts(answer: str | None) -> None:
    link = RedisLink("redis://127.0.0.1:1")

    async def lose(_: object) -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if answer is None:
                raise ConnectionError("lost") from None
        return "late"

    call = asyncio.create_task(link.call(lose))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await link.close()


async def test_a_watch_stops_while_it_connects(redis_server: EmbeddedRedis) -> None:
    for number in range(30):
        registry = Registry(redis_server.url)
        registry.start(lambda _: None, poll_period_s=0.0005)
        await asyncio.sleep(0.0002 * number)
        await asyncio.wait_for(registry.stop(), 5)


async def test_during_the_back_off_nothing_is_tried() -> None:
    now = 0.0
    num_connections = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    registry = Registry(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", clock=lambda: now)
    assert not await registry.renew(worker())
    before = num_connections
    assert before > 0
    assert not await registry.renew(worker())
    assert await registry.list_workers() == []
    assert num_connections == before
    now = 0.11
    assert not await registry.renew(worker())
    assert num_connections > before
    await registry.stop()
    server.close()
