"""Streams of block changes on a real Redis: written once, read in order, garbage named and never raised."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from pdmesh.runtime.registry import block_stream
from pdmesh.runtime.registry.block_stream import MAX_NAMES, BlockStream, InvalidChange, decode_change
from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from pdmesh.v1.worker_pb2 import BlockChange

EPOCH = 0xABC
SOURCE = ("w", EPOCH)


def change(sequence: int, *stored: int, epoch: int = EPOCH) -> BlockChange:
    return BlockChange(epoch=epoch, sequence=sequence, stored=stored)


async def test_reads_what_was_appended_once_and_from_where_one_is(redis_server: EmbeddedRedis) -> None:
    stream = BlockStream(redis_server.url)
    for sequence in (1, 2, 2, 3):
        assert await stream.append("w", change(sequence, sequence + 100))
    entries = await stream.read({SOURCE: 1, ("other", 5): 0})
    assert entries is not None
    assert [(each.source, each.sequence, each.change) for each in entries] == [
        (SOURCE, 2, change(2, 102)),
        (SOURCE, 3, change(3, 103)),
    ]
    await stream.stop()


async def test_streams_are_short_and_lapse(redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_stream, "MAX_ENTRIES", 10)
    stream, redis = BlockStream(redis_server.url), Redis.from_url(redis_server.url)
    for sequence in range(1, 401):
        await stream.append("w", change(sequence))
    assert await redis.xlen(stream.key(SOURCE)) < 200
    assert 0 < await redis.pttl(stream.key(SOURCE)) <= block_stream.STREAM_TTL_S * 1000
    await redis.aclose()
    await stream.stop()


async def test_what_others_wrote_there_is_named_and_hides_nobody(redis_server: EmbeddedRedis) -> None:
    stream, redis = BlockStream(redis_server.url), Redis.from_url(redis_server.url)
    await redis.set(stream.key(("text", 1)), "garbage")
    await redis.xadd(stream.key(("fields", 1)), {"x": "y"}, id="1-1")
    await redis.xadd(stream.key(("bytes", 1)), {"c": b"\xff\xff\xff"}, id="1-1")
    await redis.xadd(stream.key(("epoch", 1)), {"c": change(1, epoch=2).SerializeToString()}, id="1-1")
    await redis.xadd(stream.key(("id", 1)), {"c": change(1, epoch=1).SerializeToString()})
    await stream.append("w", change(1))
    sources = [(name, 1) for name in ("text", "fields", "bytes", "epoch", "id")] + [SOURCE]
    entries = await stream.read(dict.fromkeys(sources, 0))
    assert entries is not None
    problems = {each.source[0]: each.problem for each in entries}
    assert problems["fields"] == "field c is missing"
    assert problems["bytes"].startswith("field c is no BlockChange")
    assert problems["epoch"].startswith("epoch 0000000000000002 is not")
    assert problems["id"].startswith("sequence 1 is not the entry's")
    assert problems["w"] == ""
    await redis.aclose()
    await stream.stop()


async def test_the_writer_clears_what_others_wrote(redis_server: EmbeddedRedis) -> None:
    stream, redis = BlockStream(redis_server.url), Redis.from_url(redis_server.url)
    await redis.set(stream.key(SOURCE), "garbage")
    assert await stream.append("w", change(1))
    await redis.xadd(stream.key(SOURCE), {"x": "y"}, id="9999-1")
    assert await stream.append("w", change(2))
    entries = await stream.read({SOURCE: 0})
    assert entries is not None
    assert [each.change for each in entries] == [change(2)]
    await redis.aclose()
    await stream.stop()


async def test_redis_down_is_no_error(redis_server: EmbeddedRedis) -> None:
    await redis_server.stop()
    stream = BlockStream(redis_server.url)
    assert not await stream.append("w", change(1))
    assert await stream.read({SOURCE: 0}) is None
    await stream.stop()


@given(st.one_of(st.none(), st.integers(), st.binary(max_size=200)))
def test_any_payload_is_a_change_or_refused(payload: object) -> None:
    try:
        decoded = decode_change(payload, EPOCH, 1)
    except InvalidChange as error:
        assert str(error).startswith(("field c", "epoch", "sequence", "stored", "tier_stored"))
    else:
        assert (decoded.epoch, decoded.sequence) == (EPOCH, 1)


def test_huge_lists_are_refused() -> None:
    with pytest.raises(InvalidChange, match="stored and evicted are 65537 names"):
        decode_change(change(1, *range(MAX_NAMES + 1)).SerializeToString(), EPOCH, 1)
    full = change(1, *range(MAX_NAMES))
    full.tier_stored.extend(range(MAX_NAMES))  # the bounds of pool and tiers are apart
    assert len(decode_change(full.SerializeToString(), EPOCH, 1).tier_stored) == MAX_NAMES
    full.tier_evicted.append(1)
    with pytest.raises(InvalidChange, match="tier_stored and tier_evicted are 65537 names"):
        decode_change(full.SerializeToString(), EPOCH, 1)
    with pytest.raises(InvalidChange, match="bytes, more than"):
        decode_change(b"x" * (block_stream.MAX_BYTES + 1), EPOCH, 1)
