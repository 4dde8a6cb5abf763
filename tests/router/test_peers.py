"""What a router knows of the others: whose word counts how long, and parts of a limit that are a whole together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet.peers import (
    ALONE_AFTER_S,
    JOINING_S,
    JOINING_SHARE,
    MAX_SILENCE_S,
    MAX_TENANTS,
    RETURN_GRACE_S,
    SENT_SILENCE_S,
    DemandMeter,
    PeerMessage,
    Peers,
    decode,
    encode,
    named,
    part,
    total,
)
from router.fleet.worker import Dispatched

W = ("10.0.0.1:1", 7)


def _peers(now: float = 0.0) -> Peers:
    peers = Peers("me", 1, now)
    peers.received(PeerMessage("me", 1), now)
    return peers


def test_what_others_sent_counts_while_they_are_heard() -> None:
    peers = _peers()
    mine = PeerMessage("me", 1, {W: (Dispatched(9),)})
    peers.received(mine, 0.0)
    peers.received(PeerMessage("a", 1, {W: (Dispatched(1),)}), 0.0)
    peers.received(PeerMessage("b", 1, {W: (Dispatched(2),)}), 0.0)
    assert total(peers.sent(0.1)[W], None).seqs == 3 and peers.num_others == 2
    peers.received(PeerMessage("a", 1, {W: (Dispatched(5),)}), 0.4)  # replaces what it said before
    assert total(peers.sent(0.4)[W], None).seqs == 7
    assert total(peers.sent(0.1 + SENT_SILENCE_S)[W], None).seqs == 5  # b says nothing any more
    assert peers.sent(0.5 + SENT_SILENCE_S) == {}


def test_the_part_of_a_router_that_is_gone_returns_within_a_second() -> None:
    peers = _peers()
    peers.received(PeerMessage("a", 1, demand={"t": 30}), 0.0)
    now = 0.0
    while now < 1.0:
        now = round(now + 0.1, 3)
        peers.received(PeerMessage("me", 1, demand={"t": 10}), now)
        peers.tick(now)
        if JOINING_S <= now <= MAX_SILENCE_S:
            assert peers.share("t", now) == pytest.approx(0.05 + 0.9 / 4)
    assert peers.share("t", now) == 1.0


def test_without_messages_the_last_part_holds_and_so_it_does_when_they_pass_again() -> None:
    peers = _peers()
    peers.received(PeerMessage("a", 1), 0.0)
    for now in (0.5, 1.0, 60.0):
        peers.tick(now)
        assert peers.share("t", now) == 0.5 and peers.sent(now) == {}
    for step in range(20):  # its own messages come back first
        now = 60.0 + step / 10
        peers.received(PeerMessage("me", 1), now)
        peers.tick(now)
        assert peers.share("t", now) == 0.5
    now = 60.0 + RETURN_GRACE_S + MAX_SILENCE_S + 0.1  # the other one ended meanwhile
    peers.received(PeerMessage("me", 1), now)
    peers.tick(now)
    peers.received(PeerMessage("me", 1), now + 0.1)
    peers.tick(now + 0.1)


def test_a_router_that_starts() -> None:
    alone = Peers("me", 1, 0.0)
    assert alone.share("t", 0.0) == JOINING_SHARE and alone.share("t", ALONE_AFTER_S + 0.1) == 1.0
    joins = _peers(5.0)
    assert joins.share("t", 5.0) == JOINING_SHARE
    joins.received(PeerMessage("a", 1), 5.1)
    assert joins.share("t", 5.0 + JOINING_S) == 0.5


def test_a_long_name_is_the_same_tenant_to_all() -> None:
    long = "\u4e2d" * 128
    assert named(long) != named(long[:-1]) and named("#" + "0" * 24) != "#" + "0" * 24 and named("") == ""
    peers = _peers()
    for router, demand in (("me", 10.0), ("a", 30.0)):
        peers.received(decode(encode(PeerMessage(router, 1, demand={long: demand}), 0.0), 0.0), 0.0)
    assert peers.share(long, JOINING_S) == pytest.approx(0.05 + 0.9 / 4)


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
                    peers.received(history[-1 - late][speaker], now)
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
