"""Splits of traffic: which revision a request goes to, what routers share of that, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from pdmesh.commands.rollout import PARTS, Options, parse, stepped, wrong
from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from pdmesh.v1 import mesh_pb2
from router.fleet.rollouts import MAX_WEIGHT, TrafficSplits, checked, choose
from router.routing.filters import RoutingRequest, compatible, same_kind
from router.routing.fleet_snapshot import FleetSnapshot
from tests.router.fleets import worker
from tests.support.certificates import new_secret

KEYS = [f"request {number}" for number in range(4000)]
BOTH = {"blue": 90, "green": 10}


def chosen(weights: dict[str, int], able: frozenset[str] = frozenset({"blue", "green"})) -> dict[str, str | None]:
    return {key: choose(checked(weights.items()), key, able.__contains__) for key in KEYS}


def test_shares_are_those_of_the_weights() -> None:
    counts = Counter(chosen(BOTH).values())
    assert counts["green"] / len(KEYS) == pytest.approx(0.1, abs=0.02)
    assert counts["blue"] + counts["green"] == len(KEYS)
    assert set(chosen({"blue": 0, "green": 1}).values()) == {"green"}
    assert set(chosen({}).values()) == {None}


def test_a_key_keeps_its_revision_while_its_weight_grows() -> None:
    few, more = chosen({"blue": 75, "green": 25}), chosen({"blue": 50, "green": 50})
    assert chosen({"blue": 75, "green": 25}) == few
    assert all(more[key] == "green" for key, revision in few.items() if revision == "green")


def test_a_revision_counts_only_while_it_can_take_the_request() -> None:
    assert set(chosen(BOTH, frozenset({"green"})).values()) == {"green"}
    assert set(chosen({"blue": 1, "green": 0}, frozenset({"green"})).values()) == {None}, "then any worker may"


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([("no name", 1)], "revision 'no name' is not 1 to 64"),
        ([("a" * 65, 1)], "is not 1 to 64"),
        ([("a", 1), ("a", 2)], "named twice"),
        ([("a", MAX_WEIGHT + 1)], "not 0 to"),
        ([("a", -1)], "not 0 to"),
        ([("a", 0), ("b", 0)], "all weights are 0"),
        ([(f"r{number}", 1) for number in range(65)], "are more than 64"),
    ],
)
def test_nonsense_is_refused_by_name(weights: list[tuple[str, int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        checked(weights)


def test_workers_of_two_revisions_do_not_pair_and_are_pools_of_their_own() -> None:
    blue, green = worker("p0", revision="blue"), worker("d0", revision="green")
    assert not compatible(blue, green) and not compatible(green, blue)
    assert compatible(worker("p1", revision="green"), green)
    fleet = FleetSnapshot([blue, green])
    assert [pool.revision for pool in fleet.pools(blue.model)] == ["blue", "green"]
    assert [pool.revision for pool in fleet.pools(blue.model, revision="green")] == ["green"]
    assert same_kind(green, RoutingRequest(green.model, 9, revision="green"))
    assert not same_kind(blue, RoutingRequest(green.model, 9, revision="green"))
    assert {view.address for view in fleet.peers(blue, prefill=False)} == {view.address for view in (blue, green) if view.decode}
    fleet.put(blue.address, worker("p0", revision="green"))
    assert [pool.revision for pool in fleet.pools(blue.model)] == ["green"], "its next process is of another"


async def test_routers_agree_and_a_redis_that_came_back_empty_is_told_again(tmp_path: Path) -> None:
    secret = new_secret(tmp_path)
    async with EmbeddedRedis() as redis:
        one, other, outsider = (TrafficSplits(redis.url, "m", each) for each in (secret, secret, None))
        await one.put("tiny", checked(BOTH.items()))
        await outsider.put("other", (("theirs", 1),))
        await other.refresh()
        assert other.entries == {"tiny": (("blue", 90), ("green", 10))}, "what is not sealed does not count"
        async with EmbeddedRedis() as empty:
            again, later = (TrafficSplits(empty.url, "m", secret) for _ in range(2))
            again._entries = dict(one.entries)
            await again.refresh()
            await later.refresh()
            assert later.entries == one.entries
            for each in (again, later):
                await each.close()
        for each in (one, other, outsider):
            await each.close()


@pytest.mark.parametrize("value", [b"3", b'[["a", "x"]]', b'[["a"]]', b"{", b'[["no name", 1]]', b'[["a", 1, 2]]'])
def test_what_no_router_wrote_is_ignored(value: bytes, caplog: pytest.LogCaptureFixture) -> None:
    assert TrafficSplits()._checked(b"tiny", value) is None
    assert "is ignored" in caplog.text
    entry = json.dumps([["a", 1]]).encode()
    assert TrafficSplits()._checked(b"tiny", entry) == ("tiny", (("a", 1),))


# The command.


def share(revision: str, **numbers: int) -> mesh_pb2.RevisionShare:
    return mesh_pb2.RevisionShare(revision=revision, **{"num_decode_workers": 1, **numbers})


def test_a_step_leaves_the_others_in_their_proportion() -> None:
    split = mesh_pb2.TrafficSplit(revisions=[share("", weight=1), share("blue", weight=3), share("green")], is_set=True)
    assert stepped(split, "green", 20) == {"": 2000, "blue": 6000, "green": 2000}
    assert stepped(split, "green", 100) == {"": 0, "blue": 0, "green": PARTS}
    split.is_set = False  # by their workers
    assert stepped(split, "green", 50) == {"": 2500, "blue": 2500, "green": 5000}


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"num_ended": 110, "num_failed": 5}, ""),
        ({"num_ended": 200, "num_failed": 6}, ""),
        ({"num_ended": 110, "num_failed": 6}, "1 of its 10 requests failed"),
        ({"num_ended": 100, "num_failed": 5, "num_decode_workers": 0}, "no decode worker"),
        ({"num_ended": 100, "num_failed": 5, "num_ejected": 1}, "are ejected"),
        ({"num_ended": 4, "num_failed": 2}, "2 of its 4 requests failed"),
    ],
)
def test_what_makes_a_rollout_go_back(now: dict[str, int], words: str) -> None:
    found = wrong(share("green", num_ended=100, num_failed=5), share("green", **now), 0.01)
    assert words in found and bool(words) == bool(found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(weights=("green",)), "weights: 'green' is not REVISION=WEIGHT"),
        (Options(weights=("green=1.5",)), "whole number"),
        (Options(weights=("a=1", "a=2")), "named twice"),
        (Options(weights=("a=1",), clear=True), "give one of them"),
        (Options(to="a", steps=(50, 20)), "steps: must rise"),
        (Options(to="a", steps=(0, 100)), "steps: must rise"),
        (Options(to="a", steps=(50, 120)), "steps: must rise"),
        (Options(to="a", hold_s=-1), "hold_s"),
        (Options(to="a", max_failed=2), "max_failed"),
    ],
)
def test_options_that_make_no_sense_are_named(options: Options, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        options.validate()


def test_a_dash_stands_for_workers_that_name_no_revision() -> None:
    assert parse(("-=9", "green=1")) == {"": 9, "green": 1}
