"""What routers tell each other: messages, whose word counts how long, and parts of a limit that are a whole together."""

from __future__ import annotations

import json
import math
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.v1 import worker_pb2
from router import peer_message, tenants_file
from router.decode_link import LinkSettings
from router.peer_message import (
    AGES_MS,
    MAX_COUNT,
    MAX_PER_WORKER,
    MAX_TENANTS,
    PeerMessage,
    UnreadableMessage,
    decode,
    encode,
    named,
    total,
)
from router.peers import (
    ALONE_AFTER_S,
    JOINING_S,
    JOINING_SHARE,
    MAX_SILENCE_S,
    RETURN_GRACE_S,
    SENT_SILENCE_S,
    DemandMeter,
    Peers,
    part,
)
from router.tenant_limits import TenantLimits
from router.tenants import Tenants, at_share
from router.tenants_file import TenantsProblem, TenantTable
from router.worker import Dispatched, Incarnation, Worker
from runtime.config import ConfigError

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
    assert len(data) <= peer_message.MAX_BYTES
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
    links = LinkSettings("r")
    worker = Worker(W[0], channel, links, report_period_ms=200, static=True, on_change=nothing, on_view=nothing)
    load = worker_pb2.LoadReport(epoch=7)
    worker._up(Incarnation(worker_pb2.WorkerInfo(epoch=7), load, time.monotonic() - 1.0))
    return worker


def _pass_on(here: Worker, there: Worker, now: float) -> None:
    message = decode(encode(PeerMessage("r", 1, {W: here.sent_lately(now)}), now), now)
    there.heard(list(message.sent.get(W, ())))


def _seen(worker: Worker) -> tuple[int, int, int, int]:
    view = worker.view
    assert view is not None
    return (view.dispatched_seqs, view.dispatched_blocks, view.dispatched_decodes, view.dispatched_context)


def test_a_long_name_is_the_same_tenant_to_all() -> None:
    long = "\u4e2d" * 128
    assert named(long) != named(long[:-1]) and named("#" + "0" * 24) != "#" + "0" * 24 and named("") == ""
    peers = _peers()
    for router, demand in (("me", 10.0), ("a", 30.0)):
        peers.heard(decode(encode(PeerMessage(router, 1, demand={long: demand}), 0.0), 0.0), 0.0)
    assert peers.share(long, JOINING_S) == pytest.approx(0.05 + 0.9 / 4)


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
    assert len(encode(got, 0.0)) <= peer_message.MAX_BYTES  # by chance it was a message


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
        decode(b" " * (peer_message.MAX_BYTES + 1), 0.0)


def _peers(now: float = 0.0) -> Peers:
    peers = Peers("me", 1, now)
    peers.heard(PeerMessage("me", 1), now)
    return peers


def test_what_others_sent_counts_while_they_are_heard() -> None:
    peers = _peers()
    mine = PeerMessage("me", 1, {W: (Dispatched(9),)})
    peers.heard(mine, 0.0)
    peers.heard(PeerMessage("a", 1, {W: (Dispatched(1),)}), 0.0)
    peers.heard(PeerMessage("b", 1, {W: (Dispatched(2),)}), 0.0)
    assert total(peers.sent(0.1)[W], None).seqs == 3 and peers.num_others == 2
    peers.heard(PeerMessage("a", 1, {W: (Dispatched(5),)}), 0.4)  # replaces what it said before
    assert total(peers.sent(0.4)[W], None).seqs == 7
    assert total(peers.sent(0.1 + SENT_SILENCE_S)[W], None).seqs == 5  # b says nothing any more
    assert peers.sent(0.5 + SENT_SILENCE_S) == {}


def test_the_part_of_a_router_that_is_gone_returns_within_a_second() -> None:
    peers = _peers()
    peers.heard(PeerMessage("a", 1, demand={"t": 30}), 0.0)
    now = 0.0
    while now < 1.0:
        now = round(now + 0.1, 3)
        peers.heard(PeerMessage("me", 1, demand={"t": 10}), now)
        peers.tick(now)
        if JOINING_S <= now <= MAX_SILENCE_S:
            assert peers.share("t", now) == pytest.approx(0.05 + 0.9 / 4)
    assert peers.share("t", now) == 1.0


def test_without_messages_the_last_part_holds_and_so_it_does_when_they_pass_again() -> None:
    peers = _peers()
    peers.heard(PeerMessage("a", 1), 0.0)
    for now in (0.5, 1.0, 60.0):
        peers.tick(now)
        assert peers.share("t", now) == 0.5 and peers.sent(now) == {}
    for step in range(20):  # its own messages come back first
        now = 60.0 + step / 10
        peers.heard(PeerMessage("me", 1), now)
        peers.tick(now)
        assert peers.share("t", now) == 0.5
    now = 60.0 + RETURN_GRACE_S + MAX_SILENCE_S + 0.1  # the other one ended meanwhile
    peers.heard(PeerMessage("me", 1), now)
    peers.tick(now)
    peers.heard(PeerMessage("me", 1), now + 0.1)
    peers.tick(now + 0.1)


def test_a_router_that_starts() -> None:
    alone = Peers("me", 1, 0.0)
    assert alone.share("t", 0.0) == JOINING_SHARE and alone.share("t", ALONE_AFTER_S + 0.1) == 1.0
    joins = _peers(5.0)
    assert joins.share("t", 5.0) == JOINING_SHARE
    joins.heard(PeerMessage("a", 1), 5.1)
    assert joins.share("t", 5.0 + JOINING_S) == 0.5


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=8))
def test_parts_are_one_together_and_everybody_has_some(demands: list[float]) -> None:
    parts = [part(own, demands) for own in demands]
    assert sum(parts) == pytest.approx(1.0)
    assert all(given_out >= 0.1 / len(demands) - 1e-12 for given_out in parts)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1000)), min_size=1, max_size=10), st.integers(0, 3))
def test_three_routers_give_out_the_limit_within_a_tenth(changes: list[tuple[int, float]], delay: int) -> None:
    """Demand jumps about; messages arrive up to three tenths of a second late, another at each. Over the whole time the routers'
    parts are at most 1 on average, but for what a jump costs until it is known everywhere."""
    routers = [Peers(name, 1, 0.0) for name in "abc"]
    demands = [1.0, 1.0, 1.0]
    history: list[list[PeerMessage]] = []
    given_out, steps = 0.0, 0
    for number, (who, demand) in enumerate(changes):
        demands[who] = demand
        for _ in range(10):  # a second between jumps
            history.append([PeerMessage(name, 1, demand={"t": demands[index]}) for index, name in enumerate("abc")])
            now = len(history) / 10
            for listener, peers in enumerate(routers):
                for speaker in range(3):
                    late = 0 if speaker == listener else min(len(history) - 1, (delay + listener) % 4)
                    peers.heard(history[-1 - late][speaker], now)
                peers.tick(now)
            if number > 0:
                given_out += sum(peers.share("t", now) for peers in routers)
                steps += 1
    if steps:
        assert given_out / steps <= 1.0 + 0.1 * 3  # three tenths late in each second: at most one more during them


def test_demand_fades() -> None:
    meter = DemandMeter()
    meter.asked("t", 100, 1.0)
    assert meter.rates(1.0)["t"] == 100 and meter.rates(2.0)["t"] == 50
    assert meter.rates(60.0) == {}


class _Unlistable(OrderedDict[str, tuple[float, float]]):
    """Nobody walks through it."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("a request must cost the same with any number of tenants")

    items = keys = values = __iter__  # type: ignore[assignment]


def test_demand_costs_the_same_with_any_number_of_tenants() -> None:
    meter = DemandMeter()
    meter._levels = _Unlistable()
    for number in range(3 * MAX_TENANTS):
        meter.asked(f"t{number}", 5, number / 1000)
        meter.asked("often", 1, number / 1000)
    assert len(meter._levels) == MAX_TENANTS
    meter._levels = OrderedDict(dict.items(meter._levels))
    rates = meter.rates(3.0)
    assert rates["often"] > 500 and f"t{3 * MAX_TENANTS - 1}" in rates and "t0" not in rates


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 1000)), max_size=20))
def test_demand_is_what_was_asked_and_has_faded(steps: list[tuple[float, float]]) -> None:
    meter, now, expected = DemandMeter(), 0.0, 0.0
    for wait_s, tokens in steps:
        now, expected = now + wait_s, expected * 2**-wait_s + tokens
        meter.asked("t", tokens, now)
    assert meter.rates(now).get("t", 0.0) == pytest.approx(expected, abs=0.02)


FILE = """
[default]
weight = 2
[tenants.search]
weight = 4.5
max_inflight = 10
tokens_per_s = 1000
[tenants."odd name"]
tokens_per_s = 10.5
burst_tokens = 20
"""


def test_the_tenants_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(FILE)
    tenants = Tenants(str(path))
    assert tenants.limits_of("search") == TenantLimits(4.5, 10, 1000, 10_000)
    assert tenants.limits_of("odd name") == TenantLimits(1.0, None, 10.5, 20)
    assert tenants.limits_of("anybody") == tenants.limits_of("") == TenantLimits(2)
    tenants.share = lambda tenant: 0.25
    assert tenants.limits_of("search") == TenantLimits(4.5, 2, 250, 2500)
    path.write_text("[tenants.search]\nweight = -1")
    tenants.refresh()
    assert tenants.limits_of("search").weight == 4.5
    path.write_text("[tenants.search]\nweight = 3.0")
    tenants.refresh()
    assert tenants.limits_of("search") == TenantLimits(3.0)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.toml", b"[default]\nweight=1.0\n# caf\xe9\n"),
        ("t.toml", b"a = " + b"[" * 100_000),
        ("t.json", b"[" * 200_000),
        ("t.json", b'{"tenants": {"a": {"weight": ' + b"9" * 5000 + b"}}}"),
    ],
)
def test_a_hostile_file_changes_nothing_and_is_named(
    tmp_path: Path, name: str, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / name
    path.write_text('{"default": {"weight": 3}}' if name == "t.json" else "[default]\nweight = 3")
    tenants = Tenants(str(path))
    path.write_bytes(content)
    tenants.refresh()
    assert tenants.limits_of("a").weight == 3 and name in caplog.text and "Traceback" not in caplog.text
    with pytest.raises(TenantsProblem, match=name):
        tenants_file.read(path)


def test_json_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_text('{"tenants": {"a": {"weight": 2}}}')
    assert tenants_file.read(path) == TenantTable(tenants={"a": TenantLimits(2)})


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[tenants.a]\nweight = 0", "tenants.a.weight"),
        ("[tenants.a]\nweight = nan", "tenants.a.weight"),
        ('[tenants.a]\nweight = "1"', "tenants.a.weight"),
        ("[tenants.a]\nmax_inflight = 1.5", "tenants.a.max_inflight"),
        ("[tenants.a]\nmax_inflight = true", "tenants.a.max_inflight"),
        ("[tenants.a]\nburst_tokens = 5", "tenants.a.burst_tokens"),
        ("[tenants.a]\nrate = 5", "tenants.a.rate"),
        ("[tenants]\na = 5", "tenants.a"),
        ("[default]\ntokens_per_s = -1", "default.tokens_per_s"),
        ("[tenant.a]", "tenant"),
        ("tenants = 1", "tenants"),
        ("[", ""),
    ],
)
def test_a_wrong_file_names_the_field(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(TenantsProblem, match=f"tenants.toml: {field}"):
        tenants_file.read(path)
    with pytest.raises(ConfigError, match="--tenants"):
        Tenants(str(path))


@given(st.integers(1, 1000), st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_places_of_all_routers_exceed_the_limit_by_one_each_at_most(limit: int, demands: list[float]) -> None:
    parts = [at_share(TenantLimits(max_inflight=limit), part(own, demands)).max_inflight or 0 for own in demands]
    assert min(parts) >= 1 and sum(parts) <= limit + len(demands) - 1
