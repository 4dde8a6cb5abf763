"""The tier in a store that workers share, on a real Redis: what one wrote another finds; what is damaged or foreign never comes
back; a store that stops, hangs, is full or is no Redis is a smaller cache."""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import pytest
from redis import Redis

from kvtransfer.tiers.backends import redis_blocks, store
from kvtransfer.tiers.backends.block_file import HEADER_BYTES
from kvtransfer.tiers.backends.coding import BlockForm
from kvtransfer.tiers.backends.redis_blocks import RedisBlocks
from kvtransfer.tiers.backends.store import StoreTier
from kvtransfer.tiers.opening import open_tiers
from kvtransfer.tiers.settings import TierConfig
from pdmesh.engine.kv_cache.published_blocks import BlockName
from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from pdmesh.v1 import common_pb2
from tests.kvtransfer.tiers.blocks import FORM, IDENTITY, SIZE, block, chain

VALUE = SIZE + HEADER_BYTES


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedRedis]:
    async with EmbeddedRedis() as server:
        yield server


Open = Callable[..., StoreTier]


@pytest.fixture
def opened(server: EmbeddedRedis) -> Iterator[Open]:
    tiers: list[StoreTier] = []

    def open_one(max_blocks: int = 10, identity: bytes = IDENTITY, mesh: str = "m", url: str = "", width: int = 0) -> StoreTier:
        blocks = RedisBlocks(url or server.url, mesh, timeout_s=0.3)
        tiers.append(StoreTier(blocks, max_blocks * VALUE, BlockForm(identity, SIZE, width), shown_url="redis://shown"))
        return tiers[-1]

    yield open_one
    for tier in tiers:
        tier.check()
        tier.close()


@pytest.fixture
def redis(server: EmbeddedRedis) -> Iterator[Redis]:
    with Redis.from_url(server.url, protocol=2) as client:
        yield client


def write(tier: StoreTier, names: Sequence[BlockName], keep_s: float = 0.0) -> None:
    tier.write_batch([(name, block(number), keep_s) for number, name in enumerate(names)])


def key_of(name: BlockName, identity: bytes = IDENTITY) -> str:
    return f"pdmesh:m:kv:{identity.hex()}:{name.root.hex()}:{name.block_hash.hex()}"


def stored(redis: Redis) -> set[bytes]:
    return {bytes(key) for key in redis.scan_iter(b"pdmesh:m:kv:*")} - {b"pdmesh:m:kv:used", b"pdmesh:m:kv:sizes"}


def size_of(redis: Redis) -> int:
    """Bytes of the blocks, which what is kept of them has to agree with."""
    keys = stored(redis)
    total = sum(redis.strlen(key) for key in keys)
    sizes = {name: int(size) for name, size in redis.hgetall("pdmesh:m:kv:sizes").items()}
    assert sizes.pop(b"", 0) == total == sum(sizes.values())
    names = {key.removeprefix(b"pdmesh:m:kv:") for key in keys}
    assert set(sizes) == names == set(redis.zrange("pdmesh:m:kv:used", 0, -1))
    return total


async def test_what_one_worker_wrote_another_finds(opened: Open) -> None:
    ours, theirs, names = opened(), opened(), chain(4)
    write(ours, names[:3])
    assert ours.holds(names) == [True, True, True, False] and ours.take_changes() == names[:3]
    assert theirs.holds(names) == [False] * 4
    theirs.find(names)
    assert theirs.holds(names) == [True, True, True, False] and theirs.take_changes() == names[:3]
    assert [bytes(each.content) for each in theirs.lend_batch(names)] == [bytes(block(number).content) for number in range(3)]
    assert [each.crc for each in theirs.lend_batch(names[:2])] == [block(0).crc, block(1).crc]
    assert theirs.counts.num_read == 5 and ours.counts.num_written == 3


async def test_what_is_there_is_not_written_again(opened: Open) -> None:
    ours, theirs, names = opened(), opened(), chain(3)
    write(ours, names[:2])
    assert theirs.lacks(names) == names  # as far as it knows
    write(theirs, names)
    assert (ours.counts.num_written, theirs.counts.num_written) == (2, 1)
    assert theirs.lacks(names) == [] and theirs.num_blocks == 3 and theirs.num_bytes == 3 * VALUE


async def test_models_and_meshes_do_not_mix(opened: Open) -> None:
    [name] = chain(1)
    write(opened(), [name])
    for other in (opened(identity=b"other mo"), opened(mesh="other")):
        other.find([name])
        assert other.holds([name]) == [False] and other.lend(name) is None
        assert other.counts.num_corrupt == other.counts.num_failed == 0


async def test_the_bound_is_one_of_all_workers_that_write_at_once(opened: Open, redis: Redis) -> None:
    workers = [opened(max_blocks=7) for _ in range(3)]
    over = []

    def work(tier: StoreTier, number: int) -> None:
        for start in range(20):
            write(tier, chain(3, b"root %d %d" % (number, start)))
            if tier.num_bytes > 7 * VALUE or redis.memory_usage("pdmesh:m:kv:used") is None:
                over.append(tier.num_bytes)

    threads = [threading.Thread(target=work, args=(tier, number)) for number, tier in enumerate(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not over and size_of(redis) == 7 * VALUE
    assert [tier.counts.num_failed for tier in workers] == [0, 0, 0]
    assert all(tier.num_blocks <= 14 for tier in workers)
    assert sum(tier.counts.num_written for tier in workers) > 100


async def test_the_least_recently_used_goes_first_and_a_chain_from_its_end(opened: Open, redis: Redis) -> None:
    tier, other = opened(max_blocks=6), opened(max_blocks=6)
    first, second = chain(3, b"a"), chain(3, b"b")
    write(tier, first)
    write(tier, second)
    other.find(first)  # is a use, though another worker's
    write(tier, chain(1, b"c"))
    assert stored(redis) == {key_of(name).encode() for name in (*first, *second[:2], *chain(1, b"c"))}
    assert tier.holds(second) == [True, True, False]
    write(other, chain(3, b"c"))
    assert stored(redis) == {key_of(name).encode() for name in (*first, *chain(3, b"c"))}
    assert tier.holds(second[:2]) == [True, True] and tier.lend_batch(second) == []  # it learns when it asks
    assert tier.holds(second[:1]) == [False]


async def test_uses_of_blocks_that_the_pool_has_are_told(opened: Open, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "TOUCH_S", 0.0)
    tier = opened(max_blocks=4)
    used, unused = chain(2, b"a"), chain(2, b"b")
    write(tier, used)
    write(tier, unused)
    tier.touch(reversed(used))
    write(tier, chain(1, b"c"))
    assert stored(redis) == {key_of(name).encode() for name in (*used, unused[0], *chain(1, b"c"))}


async def test_what_a_session_keeps_outlasts_what_is_used_later_with_all_before_it(opened: Open, redis: Redis) -> None:
    tier = opened(max_blocks=4)
    [first, second], others = chain(2, b"a"), chain(4, b"b")
    write(tier, [first])
    write(tier, [second], keep_s=600.0)
    write(tier, others)
    assert stored(redis) == {key_of(name).encode() for name in (first, second, *others[:2])}
    assert redis.ttl(key_of(first)) > redis_blocks.KEEP_S + 500 and redis.ttl(key_of(others[0])) <= redis_blocks.KEEP_S


async def test_the_block_before_is_not_given_up_for_one(opened: Open, redis: Redis) -> None:
    tier, names = opened(max_blocks=2), chain(4)
    write(tier, names)
    assert stored(redis) == {key_of(name).encode() for name in names[:2]} and tier.holds(names) == [True, True, False, False]


async def test_everything_expires_and_what_has_is_not_counted(opened: Open, redis: Redis) -> None:
    tier, names = opened(), chain(3)
    write(tier, names)
    assert all(0 < redis.ttl(key) <= redis_blocks.KEEP_S for key in redis.keys("*")) and len(redis.keys("*")) == 5
    redis.delete(key_of(names[1]))  # as if it had expired, or Redis had evicted it
    tier.find(names)
    assert tier.holds(names) == [True, False, True] and size_of(redis) == 2 * VALUE
    redis.delete(key_of(names[0]), key_of(names[2]))
    redis.zadd("pdmesh:m:kv:used", {key_of(name).removeprefix("pdmesh:m:kv:"): 1.0 for name in names[::2]})
    write(tier, chain(1, b"b"))
    assert size_of(redis) == VALUE


@pytest.mark.parametrize("lost", ["used", "sizes"])
async def test_a_lost_key_begins_anew(opened: Open, redis: Redis, lost: str) -> None:
    tier, names = opened(), chain(3)
    write(tier, names)
    redis.delete(f"pdmesh:m:kv:{lost}")
    write(opened(), names)
    assert size_of(redis) == 3 * VALUE


def packed(name: BlockName, seed: int = 0, identity: bytes = IDENTITY) -> bytes:
    return b"".join(BlockForm(identity, SIZE).pack(name, block(seed)))


NAME, OTHER = chain(2)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"garbage",
        packed(NAME)[:-1],
        packed(NAME)[: HEADER_BYTES - 3],
        packed(NAME) + b"more",
        bytes(VALUE),
        random.Random(1).randbytes(VALUE),
        packed(OTHER),
        packed(NAME, identity=b"other mo"),
        b"X" + packed(NAME)[1:],
        ["a", "list"],
    ],
    ids=["empty", "text", "cut", "no header", "longer", "zeros", "random", "another block", "another model", "magic", "a list"],
)
async def test_damaged_and_foreign_values_are_never_lent_and_are_removed(
    opened: Open, redis: Redis, value: bytes | list[str], caplog: pytest.LogCaptureFixture
) -> None:
    tier = opened()
    write(tier, [NAME, OTHER])
    redis.delete(key_of(NAME))
    if isinstance(value, list):
        redis.rpush(key_of(NAME), *value)
    else:
        redis.set(key_of(NAME), value)
    with caplog.at_level(logging.WARNING):
        assert tier.lend_batch([NAME, OTHER]) == []
    assert tier.counts.num_corrupt == (value != b"") and tier.counts.num_failed == 0
    assert ("is not used and is removed" in caplog.text) == (value != b"")
    assert tier.holds([NAME, OTHER]) == [False, True]
    if value:
        assert not redis.exists(key_of(NAME)) and size_of(redis) == VALUE
    write(tier, [NAME])
    assert bytes(tier.lend_batch([NAME])[0].content) == bytes(block(0).content)
    if value:
        assert size_of(redis) == 2 * VALUE


async def test_a_damaged_content_is_lent_with_the_sum_that_it_should_have(opened: Open, redis: Redis) -> None:
    tier, other = opened(), opened()
    write(tier, [NAME])
    other.find([NAME])
    redis.setrange(key_of(NAME), HEADER_BYTES + 17, b"damage")
    [lent] = tier.lend_batch([NAME])
    assert lent.crc == block(0).crc and bytes(lent.content) != bytes(block(0).content)
    tier.give_back(NAME, is_damaged=True)
    assert tier.counts.num_corrupt == 1 and tier.holds([NAME]) == [False] and tier.take_changes() == [NAME, NAME]
    tier.find([NAME])
    assert tier.holds([NAME]) == [False] and not redis.exists(key_of(NAME)) and size_of(redis) == 0


async def test_a_store_that_ends_and_begins_again(
    opened: Open, server: EmbeddedRedis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, names = opened(), chain(3)
    write(tier, names)
    tier.take_changes()
    port = server.port
    await server.stop()
    with caplog.at_level(logging.WARNING):
        assert tier.lend_batch(names) == []
        assert not tier.is_available and tier.lacks(names) == []
        for _ in range(3):  # later tries fail as well
            monkeypatch.setattr(tier, "_not_before", 0.0)
            tier.find(names)
            write(tier, names)
    assert len(caplog.records) == 1 and "redis://shown does not serve" in caplog.text
    assert tier.holds(names) == [False] * 3 and set(tier.take_changes()) == set(names)
    async with EmbeddedRedis(port):
        monkeypatch.setattr(tier, "_not_before", 0.0)
        tier.find(names)
        assert tier.is_available and tier.holds(names) == [False] * 3  # it is an empty one
        write(tier, names)
        assert len(tier.lend_batch(names)) == 3


async def test_a_store_that_begins_again_unnoticed(opened: Open, server: EmbeddedRedis) -> None:
    tier, names = opened(), chain(3)
    write(tier, names)
    port = server.port
    await server.stop()
    async with EmbeddedRedis(port):
        assert tier.lend_batch(names) == [] and tier.holds(names[:1]) == [False]
        write(tier, names)
        assert len(tier.lend_batch(names)) == 3 and tier.counts.num_failed == 0


async def test_a_store_that_hangs(
    opened: Open, server: EmbeddedRedis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, names = opened(), chain(3)
    write(tier, names[:2])
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with caplog.at_level(logging.WARNING):
            write(tier, names)
            assert tier.lend_batch(names) == [] and tier.counts.num_failed == 1  # it is not asked again
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert len(caplog.records) == 1
    monkeypatch.setattr(tier, "_not_before", 0.0)
    write(tier, names)
    assert [bytes(each.content) for each in tier.lend_batch(names)] == [bytes(block(number).content) for number in range(3)]


async def test_closing_ends_a_call_that_waits(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        blocks = RedisBlocks(f"redis://127.0.0.1:{listening.getsockname()[1]}/0", "m", timeout_s=100.0)
        tier = StoreTier(blocks, 10 * VALUE, FORM, shown_url="")
        thread = threading.Thread(target=lambda: tier.find(chain(1)), daemon=True)
        thread.start()
        connection, _ = listening.accept()
        with connection, caplog.at_level(logging.WARNING):
            assert connection.recv(1)
            tier.close()
            thread.join(20.0)
            assert not thread.is_alive() and not caplog.records
        tier.find(chain(1))
        assert tier.lend(chain(1)[0]) is None and tier.lacks(chain(1)) == []


async def test_a_full_store_is_a_smaller_cache_and_one_warning(
    opened: Open, redis: Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, names = opened(max_blocks=1000), chain(20)
    write(tier, names)
    redis.config_set("maxmemory", 1)
    with caplog.at_level(logging.WARNING):
        write(tier, chain(5, b"b"))
        assert tier.lacks(chain(5, b"b")) == []  # nothing is tried for a while
    assert len(caplog.records) == 1 and "it has no memory left, and is used for 0.00 GB" in caplog.text
    assert tier.counts.num_failed == 1 and tier.is_available
    assert size_of(redis) == 18 * VALUE == tier.max_bytes and tier.num_bytes == 18 * VALUE
    tier.find(names)
    assert tier.holds(names) == [True] * 18 + [False] * 2 and len(tier.lend_batch(names)) == 18
    redis.config_set("maxmemory", 0)
    monkeypatch.setattr(tier, "_write_not_before", 0.0)
    write(tier, chain(2, b"b"))
    assert tier.holds(chain(2, b"b")) == [True, True] and size_of(redis) == 18 * VALUE


async def test_a_store_that_was_full_is_used_for_more_again(opened: Open, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, names = opened(max_blocks=6), chain(12)
    redis.config_set("maxmemory", 1)
    write(tier, names)
    assert tier.max_bytes == 2 * VALUE
    redis.config_set("maxmemory", 0)
    for again in ("_write_not_before", "_grow_at"):
        monkeypatch.setattr(tier, again, 0.0)
    monkeypatch.setattr(store, "AGAIN_S", 0.0)
    assert tier.lacks(names) == names
    write(tier, names)
    assert tier.max_bytes == 6 * VALUE == size_of(redis)


async def test_a_value_of_a_later_version_is_left_alone(opened: Open, redis: Redis) -> None:
    tier, [name] = opened(), chain(1)
    write(tier, [name])
    value = redis.get(key_of(name))
    assert isinstance(value, bytes)
    later = value[:8] + b"\x03\x00" + value[10:]
    redis.set(key_of(name), later)
    assert tier.lend(name) is None and tier.counts.num_corrupt == 0 and redis.get(key_of(name)) == later


async def test_a_store_that_refuses_is_read_all_the_same(opened: Open, redis: Redis, caplog: pytest.LogCaptureFixture) -> None:
    tier, names = opened(), chain(4)
    write(tier, names[:2])
    redis.acl_setuser("default", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-set"])
    with caplog.at_level(logging.WARNING):
        write(tier, names)
        write(tier, names)
    assert len(caplog.records) == 1 and "it refuses (" in caplog.text and tier.lacks(names) == []
    assert tier.is_available and len(tier.lend_batch(names[:2])) == 2 and tier.counts.num_failed == 1


async def test_a_store_that_takes_long_to_write_to_is_left_alone_for_a_while(
    opened: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "WRITE_LIMIT_S", 0.0)
    tier = opened()
    with caplog.at_level(logging.WARNING):
        write(tier, chain(3))
    assert tier.counts.num_written == 0 and tier.lacks(chain(3)) == [] and tier.is_available
    assert len(caplog.records) == 1 and "0 blocks took more than 0 s; nothing is written to it for a minute" in caplog.text


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"+OK\r\n" * 50, b"*2\r\n$3\r\nab", b"\x00\xff\r\n" * 9, b""]
)
async def test_something_that_is_no_redis(opened: Open, answer: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        tier, names = opened(url=f"redis://127.0.0.1:{listening.getsockname()[1]}/0"), chain(3)
        with caplog.at_level(logging.WARNING):
            tier.find(names)
            write(tier, names)
            assert tier.lend_batch(names) == [] and tier.holds(names) == [False] * 3
        assert len(caplog.records) == 1 and tier.counts.num_failed == 1 and not tier.is_available
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("url", ["http://host", "redis://:s3cr3t/x@host:6379/0", "host:6379"])
def test_a_url_that_is_none_is_refused_without_its_password(url: str) -> None:
    config = TierConfig(kv_store=url)
    with pytest.raises(ValueError, match=r"kv_store: .*give redis://host:port/0") as refused:
        open_tiers(config, common_pb2.Identity(), common_pb2.KVLayout(), SIZE, "m")
    assert "s3cr3t" not in str(refused.value) and refused.value.__cause__ is None


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bound_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"kv_store_gb: .* is not a positive number"):
        TierConfig(kv_store_gb=value).validate()


def test_a_bound_below_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_store_gb: 100 bytes are less"):
        StoreTier(RedisBlocks("redis://host/0", "m", 1.0), 100, FORM, shown_url="")
