"""How a router follows its keys, whatever stands where they should: in a file, and in Redis."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmesh.runtime.registry.redis_link import open_redis
from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from router.auth import api_keys
from router.auth.api_keys import FULL_PERIOD_S, ApiKey, KeyStore, KeyTable, RedisKeys, hash_of, open_store
from tests.router.api_keys import add_key
from tests.support.waiting import eventually

GOOD = ApiKey(hash_of("k"), "name", "tenant", created=1)
HOSTILE = [b"[" * 200_000, b'{"keys":' * 50_000, b"caf\xe9", b"\xff\xfe", b"9" * 5000, b'{"keys": [' + b"[" * 100_000]


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
async def test_a_hostile_file_changes_nothing_and_ends_nothing(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api_keys, "PERIOD_S", 0.001)
    path = tmp_path / "keys.json"
    add_key(path, "one")
    store = open_store(str(path), "default")
    assert store is not None
    await store.start()
    path.write_bytes(content)
    await eventually(lambda: "keys.json" in caplog.text)
    assert store.find("one") is not None
    path.unlink()
    add_key(path, "two")
    await eventually(lambda: store.find("two") is not None)
    assert store.find("one") is None  # revoked, and refused
    await store.stop()


async def test_following_goes_on_whatever_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "PERIOD_S", 0.001)
    problems: list[BaseException] = [RuntimeError("odd"), RecursionError(), MemoryError()]

    async def read() -> KeyTable:
        if problems:
            raise problems.pop()
        return KeyTable([GOOD])

    store = KeyStore(read)
    await store.start()
    await eventually(lambda: store._table is not None)
    assert store.find("k") == GOOD
    await store.stop()


async def test_keys_in_redis_are_read_when_they_have_changed() -> None:
    now = [0.0]
    async with EmbeddedRedis() as redis:
        writer, reader = RedisKeys(redis.url, "mesh"), RedisKeys(redis.url, "mesh", clock=lambda: now[0])
        assert len(await reader.read_changed() or ()) == 0
        assert await reader.read_changed() is None
        await writer.add(GOOD)
        assert len(await reader.read_changed() or ()) == 1
        assert await reader.read_changed() is None
        await writer.remove(GOOD)
        emptied = await reader.read_changed()
        assert emptied is not None and len(emptied) == 0
        client = open_redis(redis.url, 1.0)
        await client.hset("pdmesh:mesh:keys", GOOD.hash, GOOD.to_json())  # past the counter
        await client.hset("pdmesh:mesh:keys", "deep", "[" * 100_000)
        assert await reader.read_changed() is None
        now[0] += FULL_PERIOD_S
        assert len(await reader.read_changed() or ()) == 1
        await client.flushall()
        emptied = await reader.read_changed()
        assert emptied is not None and len(emptied) == 0
        for closing in (client.aclose, writer.close, reader.close):
            await closing()


async def test_keys_in_redis_outlive_redis() -> None:
    async with EmbeddedRedis() as redis:
        keys = RedisKeys(redis.url, "mesh")
        store = KeyStore(keys.read, keys.close)
        await store.refresh()
        assert store.find("k") is None
        assert await keys.add(GOOD)
        await store.refresh()
        assert store.find("k") == GOOD
        await redis.stop()
        await store.refresh()
        assert store.find("k") == GOOD
        assert not await keys.remove(GOOD)
    await store.stop()


async def test_a_revoked_key_of_redis_is_gone() -> None:
    async with EmbeddedRedis() as redis:
        keys = RedisKeys(redis.url, "mesh")
        store = KeyStore(keys.read, keys.close)
        await keys.add(GOOD)
        await store.refresh()
        await keys.remove(GOOD)
        await store.refresh()
        assert store.find("k") is None
        await store.stop()
