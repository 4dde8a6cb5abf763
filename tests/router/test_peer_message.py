"""What routers tell each other: bounded messages, read back as they were meant, and garbage that is refused."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.v1 import worker_pb2
from router.fleet import peers
from router.fleet.decode_stream import StreamSettings
from router.fleet.incarnation import Incarnation
from router.fleet.peers import (
    AGES_MS,
    MAX_COUNT,
    MAX_PER_WORKER,
    MAX_TENANTS,
    PeerMessage,
    UnreadableMessage,
    decode,
    encode,
    total,
)
from router.fleet.worker import Dispatched, Worker

W = ("10.0.0.1:1", 7)
counts = st.integers(-1000, 1000)
ages = st.one_of(st.none(), st.floats(0, 3), st.floats(0, 100))
dispatched = st.builds(
    Dispatched, counts, counts, counts, counts, counts, ages.map(lambda age: None if age is None else 1000 - age)
)


def _figures(sent: Dispatched) -> tuple[int, ...]:
    return (sent.seqs, sent.blocks, sent.tokens, sent.decodes, sent.context)


@given(st.lists(dispatched, max_size=30))
def test_a_message_loses_nothing_but_detail(all_sent: list[Dispatched]) -> None:
    """Sums stay, of what was sent and of what has ended; nothing gets older than it is, on a clock of the receiver's own."""
    message = PeerMessage("r", 5, {W: tuple(all_sent)}, {"a": 2.5})
    got = decode(encode(message, now=1000.0), now=3.0)
    assert (got.router_id, got.run, got.demand) == ("r", 5, {"a": 2.5})
    found = got.sent.get(W, ())
    assert len(found) <= MAX_PER_WORKER
    assert _figures(total(found, None)) == _figures(total(all_sent, None))
    ages = [0.0 if sent.arrived_at is None else 1000 - sent.arrived_at for sent in all_sent]
    for sent in found:
        assert sent.arrived_at is not None
        assert any(abs(3.0 - age - sent.arrived_at) <= 0.0011 for age in ages)
    old = [sent for sent, age in zip(all_sent, ages, strict=True) if age > AGES_MS[-1] / 1000 + 0.001]
    if len(old) == len(all_sent):
        assert all(sent.arrived_at is not None and sent.arrived_at < 3.0 - AGES_MS[-1] / 1000 for sent in found)


def test_what_has_ended_takes_away_what_was_sent() -> None:
    sent, ended = Dispatched(1, 3, 100, 1, 100, arrived_at=9.9), Dispatched(-1, -3, 0, -1, -100, arrived_at=10.0)
    got = decode(encode(PeerMessage("r", 1, {W: (sent, ended)}), 10.0), 10.0).sent[W]
    assert _figures(total(got, None)) == (0, 0, 100, 0, 0)
    (left,) = decode(encode(PeerMessage("r", 1, {W: (ended,)}), 10.0), 10.0).sent[W]
    assert _figures(left) == (-1, -3, 0, -1, -100)
    undone = Dispatched(-1, -3, -100, -1, -100, arrived_at=9.9)
    assert decode(encode(PeerMessage("r", 1, {W: (sent, undone)}), 10.0), 10.0).sent == {}


def _crowd(num_workers: int, address: str, count: int) -> dict[tuple[str, int], tuple[Dispatched, ...]]:
    sent = tuple(Dispatched(count, count, -count, count, count, arrived_at=-age / 5) for age in range(20))
    return {(f"{address}{number}:50061", 2**64 - 1 - number): sent for number in range(num_workers)}


@pytest.mark.parametrize(
    ("num_workers", "address", "count", "least"),
    [(2000, "10.0.0.", 30, 2000), (4096, "10.0.0.", 30, 3000), (9000, "h" * 300, 10**12, 400), (3, "\u4e2d" * 80, 5, 3)],
)
def test_the_greatest_messages_can_be_read(num_workers: int, address: str, count: int, least: int) -> None:
    names = [character * 120 + str(number) for number in range(700) for character in ('"', "\u4e2d", "\udc80")]
    message = PeerMessage("r" * 64, 2**63, _crowd(num_workers, address, count), dict.fromkeys(names, 1e15 / 3))
    data = encode(message, 0.0)
    assert len(data) <= peers.MAX_BYTES
    got = decode(data, 0.0)
    assert len(got.sent) >= least and len(got.demand) == MAX_TENANTS
    assert all(sent.seqs == min(20 * count, MAX_COUNT) for sent in (total(found, None) for found in got.sent.values()))


async def test_what_a_worker_was_given_and_gave_back_reaches_another_router() -> None:
    """The whole way: dispatched, released, told, read, counted; and gone when the worker's own report is of later."""
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        here, there = _worker(channel), _worker(channel)
        began = time.monotonic()
        ended, running = Dispatched(1, 3, 0, 1, 100, arrived_at=began - 0.05), Dispatched(1, 5, 0, 1, 70, arrived_at=began)
        here.dispatched(ended)
        here.dispatched(running)
        _pass_on(here, there, began)
        assert _seen(there) == (2, 8, 2, 170)
        here.released(ended, began)
        _pass_on(here, there, began)
        assert _seen(there) == (1, 5, 1, 70)
        here._dispatched.remove(ended)  # its report came between
        _pass_on(here, there, began)
        assert _seen(there) == (0, 2, 0, -30)
        there._report(worker_pb2.LoadReport(epoch=7))
        _pass_on(here, there, began - 0.01)
        assert _seen(there) == (0, 0, 0, 0)


def _worker(channel: grpc.aio.Channel) -> Worker:
    nothing = lambda: None  # noqa: E731
    links = StreamSettings("r")
    worker = Worker(W[0], channel, links, report_period_ms=200, static=True, on_change=nothing, on_view=nothing)
    load = worker_pb2.LoadReport(epoch=7)
    worker._up(Incarnation(worker_pb2.WorkerInfo(epoch=7), load, time.monotonic() - 1.0))
    return worker


def _pass_on(here: Worker, there: Worker, now: float) -> None:
    message = decode(encode(PeerMessage("r", 1, {W: here.sent_lately(now)}), now), now)
    there.received(list(message.sent.get(W, ())))


def _seen(worker: Worker) -> tuple[int, int, int, int]:
    view = worker.view
    assert view is not None
    return (view.dispatched_seqs, view.dispatched_blocks, view.dispatched_decodes, view.dispatched_context)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([10**400, -(10**400)]),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)
_nearly = st.fixed_dictionaries(
    {},
    optional={
        "router": st.just("r") | _json,
        "run": st.just("5") | _json,
        "workers": st.lists(st.tuples(st.just("a"), st.just("1"), st.lists(st.lists(_json, min_size=6, max_size=6)))) | _json,
        "demand": st.dictionaries(st.text(), _json) | _json,
    },
)


@given(st.binary(max_size=200) | st.one_of(_json, _nearly).map(lambda value: json.dumps(value).encode()))
def test_garbage_is_unreadable_and_no_more(data: bytes) -> None:
    try:
        got = decode(data, 0.0)
    except UnreadableMessage:
        return
    assert len(encode(got, 0.0)) <= peers.MAX_BYTES  # by chance it was a message


@pytest.mark.parametrize("digits", [400, 5000])
def test_numbers_of_any_length_are_refused(digits: int) -> None:
    number = b"9" * digits
    for data in (
        b'{"router":"r","run":"1","workers":[],"demand":{"t":' + number + b"}}",
        b'{"router":"r","run":"1","workers":[["a","1",[[' + number + b',0,0,0,0,0]]]],"demand":{}}',
        b'{"router":"r","run":"1","workers":[["a","1",[[0,-' + number + b',0,0,0,0]]]],"demand":{}}',
        b"[" * 200_000,
    ):
        with pytest.raises(UnreadableMessage):
            decode(data, 0.0)


@pytest.mark.parametrize(
    "change",
    [
        {"router": None, "run": 5},
        {"workers": [["a", "1", [[-1, 0, 0, 0, 0, 0]]]]},
        {"workers": [["a", "1", [[0, 10**10, 0, 0, 0, 0]]]]},
        {"workers": [["a", "1", [[0, -(10**10), 0, 0, 0, 0]]]]},
        {"workers": [[["a"], "1", []]]},
        {"workers": [["a", "1", [[0, 0]]]]},
        {"workers": [["a", "1", [[math.inf, 0, 0, 0, 0, 0]]]]},
        {"demand": {"a": -1}},
        {"demand": []},
    ],
)
def test_wrong_fields(change: dict[str, Any]) -> None:
    good = json.loads(encode(PeerMessage("r", 5), 0.0))
    assert decode(json.dumps(good).encode(), 0.0) == PeerMessage("r", 5)
    with pytest.raises(UnreadableMessage):
        decode(json.dumps({**good, **change}).encode(), 0.0)
    with pytest.raises(UnreadableMessage):
        decode(b" " * (peers.MAX_BYTES + 1), 0.0)
