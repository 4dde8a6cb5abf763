"""Silence, absence and heartbeats of an outbox, with time passed in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from decode_service.ports import StreamSettings
from decode_service.token_stream import MAX_TICK_S, TokenStreams
from pdmesh.runtime.errors import Aborted, Unavailable
from pdmesh.v1 import decode_pb2, worker_pb2

SETTINGS = StreamSettings(stream_timeout_s=0.3, grace_s=0.5, report_period_s=0.2)
FIRST = decode_pb2.AttachRequest(router_id="a")


@pytest.fixture
def outboxes() -> TokenStreams:
    return TokenStreams(SETTINGS, epoch=7, num_steps=lambda: 3, load_report=lambda: worker_pb2.LoadReport(worker_id="w"))


def tick_until(outboxes: TokenStreams, start: float, end: float, step: float = 0.02) -> None:
    now = start
    while now < end:
        outboxes.tick(now)
        now += step


async def test_silence_closes_a_stream(outboxes: TokenStreams) -> None:
    outbox = outboxes.of("a")
    stream = outbox.open(FIRST).stream
    tick_until(outboxes, 0.0, 0.25)
    assert not stream.closed
    stream.heard()
    tick_until(outboxes, 0.25, 0.5)
    assert not stream.closed
    tick_until(outboxes, 0.5, 0.7)
    assert stream.closed
    assert isinstance(stream.error, Unavailable)
    assert outbox.stream is None


async def test_own_stall_is_not_the_routers_silence(outboxes: TokenStreams) -> None:
    stream = outboxes.of("a").open(FIRST).stream
    outboxes.tick(0.0)
    outboxes.tick(100.0)
    assert stream.silence_s == MAX_TICK_S
    assert not stream.closed


async def test_an_absent_router_is_forgotten_after_the_grace_period(outboxes: TokenStreams) -> None:
    outbox = outboxes.of("a")
    tick_until(outboxes, 0.0, 0.4)
    assert outboxes.of("a") is outbox
    tick_until(outboxes, 0.4, 0.7)
    assert outboxes.of("a") is not outbox


async def test_heartbeats_while_nothing_happens(outboxes: TokenStreams) -> None:
    outbox = outboxes.of("a")
    stream = outbox.open(FIRST).stream
    frames = outboxes.frames(outbox, stream)
    first = await anext(frames)
    assert (first.epoch, first.num_steps, first.HasField("load")) == (7, 3, False)
    waiting = asyncio.ensure_future(anext(frames))
    await asyncio.sleep(0)
    tick_until(outboxes, 0.0, 0.08)
    await asyncio.sleep(0)
    assert not waiting.done()
    tick_until(outboxes, 0.08, 0.15)
    beat = await waiting
    assert not beat.HasField("load")
    stream.heard()
    waiting = asyncio.ensure_future(anext(frames))
    await asyncio.sleep(0)
    tick_until(outboxes, 0.15, 0.4)
    assert (await waiting).load.worker_id == "w"


async def test_taken_over_and_closed(outboxes: TokenStreams) -> None:
    outbox = outboxes.of("a")
    former = outbox.open(FIRST).stream
    frames = outboxes.frames(outbox, former)
    await anext(frames)
    latter = outbox.open(FIRST).stream
    with pytest.raises(Aborted):
        await anext(frames)
    outbox.close(former)
    assert outbox.stream is latter
    outboxes.close()
    last = [frame async for frame in _until_error(outboxes.frames(outbox, latter))]
    assert len(last) == 1  # what was due goes out before the end
    assert outboxes.is_closing


async def _until_error(frames: AsyncIterator[decode_pb2.Frame]) -> AsyncIterator[decode_pb2.Frame]:
    try:
        async for frame in frames:
            yield frame
    except Unavailable:
        return
