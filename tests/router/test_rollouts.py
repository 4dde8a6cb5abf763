"""Splits of traffic: which revision a request goes to, what routers share of that, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pdmesh.cli import parse_options
from pdmesh.client import wire
from pdmesh.client.client import Client
from pdmesh.commands.rollout import PARTS, Options, Rollout, counted, parse, share_of, stepped, wrong
from pdmesh.errors import FailedPrecondition, InvalidArgument, Unavailable
from pdmesh.runtime.registry.records import MAX_REVISION_WEIGHT
from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from pdmesh.v1 import mesh_pb2
from router.fleet.registry import FleetRegistry
from router.fleet.rollouts import Rollouts, TrafficSplits, checked
from router.routing.filters import NoPlacement, Placement, RoutingRequest, compatible, same_kind
from router.routing.fleet_snapshot import FleetSnapshot
from router.routing.learned import Overheads
from router.routing.policy import Policy, make_policy
from router.routing.revisions import order, place
from router.routing.worker_snapshot import Mode, WorkerSnapshot
from tests.router.fleets import worker
from tests.support.certificates import new_secret

KEYS = [f"request {number}" for number in range(4000)]
BOTH = {"blue": 90, "green": 10}
REQUEST = RoutingRequest(model="m", num_tokens=160, max_total_tokens=200)
LEAST_LOADED, PREDICT = (make_policy(name, Overheads(), local_prefill_tokens=32) for name in ("least-loaded", "predict"))


def first_of(weights: dict[str, int]) -> dict[str, str]:
    return {key: order(checked(weights.items()), key)[0] for key in KEYS}


def test_shares_are_those_of_the_weights() -> None:
    counts = Counter(first_of(BOTH).values())
    assert counts["green"] / len(KEYS) == pytest.approx(0.1, abs=0.02)
    assert counts["blue"] + counts["green"] == len(KEYS)
    three = Counter(first_of({"a": 1, "b": 2, "c": 5, "out": 0}).values())
    assert [three[name] / len(KEYS) for name in "abc"] == pytest.approx([0.125, 0.25, 0.625], abs=0.03)
    assert order((("blue", 0), ("green", 1)), "x") == ["green"] and order((), "x") == []


def test_a_key_keeps_its_revision_while_its_weight_grows() -> None:
    few, more = first_of({"blue": 75, "green": 25}), first_of({"blue": 50, "green": 50})
    assert first_of({"blue": 75, "green": 25}) == few
    assert all(more[key] == "green" for key, revision in few.items() if revision == "green")


def placed(
    weights: dict[str, int], *workers: WorkerSnapshot, policy: Policy = LEAST_LOADED, **changes: object
) -> Counter[str | None]:
    """Decode workers of 200 requests; None: none."""
    fleet, request, found = FleetSnapshot(workers), replace(REQUEST, **changes), Counter[str | None]()  # type: ignore[arg-type]
    for key in KEYS[:200]:
        choice, _ = place(policy, fleet, request, checked(weights.items()), key, 0.0)
        found[None if isinstance(choice, NoPlacement) else choice.decode.worker_id] += 1
    return found


def of(revision: str, name: str, **fields: object) -> WorkerSnapshot:
    return worker(name, revision=revision, **fields)


FULL: dict[str, object] = {"num_free_blocks": 0}


@pytest.mark.parametrize("policy", [LEAST_LOADED, PREDICT], ids=["least-loaded", "predict"])
def test_a_split_stands_in_no_requests_way(policy: Policy) -> None:
    blue, green = of("blue", "d-blue"), of("green", "d-green")
    counts = placed({"blue": 50, "green": 50}, blue, green, policy=policy)
    assert min(counts["d-blue"], counts["d-green"]) > 70
    assert placed(BOTH, blue, of("green", "d-green", **FULL), policy=policy) == {"d-blue": 200}, "full"
    assert placed({"green": 1}, blue, of("green", "d-green", **FULL), policy=policy) == {"d-green": 200}, (
        "it waits for room there"
    )
    assert placed({"green": 1}, blue, policy=policy) == {"d-blue": 200}, "none of it is there"
    excluded = frozenset({green.key})
    assert placed(BOTH, blue, green, policy=policy, excluded_decode=excluded) == {"d-blue": 200}, "it refused"
    assert placed({"green": 1}, blue, green, policy=policy, excluded_decode=excluded) == {None: 200}, "it is there all the same"
    small = of("green", "d-green", max_context=100)
    assert placed({"green": 1}, blue, small, policy=policy) == {"d-blue": 200}, "it is too small"


@pytest.mark.parametrize("policy", [LEAST_LOADED, PREDICT], ids=["least-loaded", "predict"])
def test_a_hand_off_that_was_asked_for_goes_where_there_are_prefill_workers(policy: Policy) -> None:
    blue, green = (of("blue", "d-blue"), of("blue", "p-blue")), of("green", "d-green")
    assert placed({"blue": 1, "green": 9}, *blue, green, policy=policy, mode=Mode.REMOTE) == {"d-blue": 200}
    assert placed({"green": 1}, *blue, green, policy=policy, mode=Mode.REMOTE) == {"d-blue": 200}
    of_green = (green, of("green", "p-green"))
    assert placed({"green": 1}, *blue, *of_green, policy=policy, mode=Mode.REMOTE) == {"d-green": 200}


def test_a_worker_that_said_that_it_never_can_does_not_count() -> None:
    blue, green = of("blue", "d-blue"), of("green", "d-green")
    fleet, unfit = FleetSnapshot([blue, green]), frozenset({green.key})
    request = replace(REQUEST, excluded_decode=unfit)
    assert isinstance(place(LEAST_LOADED, fleet, request, (("green", 1),), "x", 0.0)[0], NoPlacement)
    choice, _ = place(LEAST_LOADED, fleet, request, (("green", 1),), "x", 0.0, unfit)
    assert isinstance(choice, Placement) and choice.decode.worker_id == "d-blue"


def test_a_busy_revision_does_not_hold_up_the_others() -> None:
    busy = of("green", "pd-green", num_waiting_tokens=9000, num_prefilling=9)
    assert placed({"blue": 50, "green": 50}, of("blue", "pd-blue"), busy, policy=PREDICT) == {"pd-blue": 200}


def test_a_wait_for_a_cached_prefix_is_no_reason_to_leave_a_revision() -> None:
    """Its other worker could begin at once; where it cannot, the request goes to another revision, as without the prefix."""
    asked: dict[str, object] = {
        "num_tokens": 4000, "max_total_tokens": 4100, "mode": Mode.LOCAL, "cached_tokens": {("d0", 1): 3900},
    }  # fmt: skip
    holder, idle = of("blue", "d0", num_waiting_tokens=1000), of("blue", "d1")
    busy, green = replace(idle, num_waiting_tokens=5000), of("green", "d2")
    weights = {"blue": 1000, "green": 1}
    assert placed(weights, holder, idle, green, policy=PREDICT, **asked)["d0"] > 190
    assert placed(weights, holder, busy, green, policy=PREDICT, **asked)["d2"] > 190


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([("no name", 1)], "revision 'no name' is not 1 to 64"),
        ([("none", 1)], "stands for the workers that name none"),
        ([("a" * 65, 1)], "is not 1 to 64"),
        ([("a", 1), ("a", 2)], "named twice"),
        ([("a", MAX_REVISION_WEIGHT + 1)], "not 0 to"),
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


STRANGE = [b"3", b'[["a", "x"]]', b'[["a"]]', b"{", b'[["no name", 1]]', b'[["a", 1, 2]]', b'["a1"]', b'[["a", true]]']


@pytest.mark.parametrize("value", [*STRANGE, b'[["a", 1e400]]', b"[" * 100_000, b'[["a", 1.5]]', b"null", b"\xff"])
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
    assert share_of(split, "blue") == 75 and share_of(split, "green") == 0
    split.is_set = False  # by their workers
    assert stepped(split, "green", 50) == {"": 2500, "blue": 2500, "green": 5000}


@pytest.mark.parametrize(
    ("green", "blue", "words"),
    [
        ({"num_ended": 300, "num_failed": 2}, {}, ""),
        ({"num_ended": 10, "num_failed": 1}, {}, ""),
        ({"num_ended": 10, "num_failed": 2}, {}, "2 of its 10 requests failed"),
        ({"num_ended": 10, "num_failed": 2}, {"num_ended": 10, "num_failed": 3}, ""),
        ({"num_ended": 10, "num_failed": 2}, {"num_ended": 100, "num_failed": 3}, "2 of its 10 requests failed"),
        ({"num_ended": 2, "num_lost": 8}, {"num_ended": 20}, "8 of its 10 requests failed"),
        ({"num_ejected": 1}, {}, "1 of its workers are ejected"),
    ],
)
def test_what_makes_a_rollout_go_back(green: dict[str, int], blue: dict[str, int], words: str) -> None:
    before = {"num_ended": 100, "num_failed": 5, "num_lost": 7}
    later = [{name: before.get(name, 0) + step.get(name, 0) for name in (*before, "num_ejected")} for step in (green, blue)]
    first = mesh_pb2.TrafficSplit(revisions=[share("green", **before), share("blue", **before)])
    now = mesh_pb2.TrafficSplit(revisions=[share("green", **later[0]), share("blue", **later[1])])
    found = wrong([(first, now)], "green", 0.01)
    assert words in found and bool(words) == bool(found)
    assert counted([(first, now)], ["blue"]).num_asked == blue.get("num_ended", 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(weights=("green",)), "weights: 'green' is not REVISION=WEIGHT"),
        (Options(weights=("green=1.5",)), "whole number"),
        (Options(weights=("green=99999999999",)), "whole number up to"),
        (Options(weights=("green=1000001",)), "whole number up to"),
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


def test_none_stands_for_workers_that_name_no_revision() -> None:
    assert parse(("none=9", "green=1")) == {"": 9, "green": 1}
    options = parse_options(Options, ["none=9", "green=1"], {}, prog="pdmesh rollout")
    assert options.weights == ("none=9", "green=1")


@pytest.mark.parametrize("weight", [-1, 1 << 32, 1.5, None])
def test_the_client_names_a_weight_that_no_message_can_hold(weight: object) -> None:
    with pytest.raises(InvalidArgument, match="the weight of 'green' is"):
        wire.traffic_split("", {"green": weight})  # type: ignore[dict-item]


class Router:
    """Answers as a router does: the split that was set last, with what is said of green next. `other` is set by somebody else
    after the first step."""

    def __init__(
        self, *looks: dict[str, int], epochs: Sequence[int] = (), refuses: int = 0, other: dict[str, int] | None = None
    ) -> None:
        self.looks, self.epochs, self.refuses, self.other = list(looks), list(epochs), refuses, other
        self.told: list[dict[str, int]] = []

    def status(self, *, timeout: float | None = None) -> mesh_pb2.GetStatusResponse:
        weights = (self.other if self.told and self.other else None) or (self.told[-1] if self.told else {"blue": 1})
        green = share("green", weight=weights.get("green", 0), **(self.looks.pop(0) if self.looks else {}))
        blue = share("blue", weight=weights.get("blue", 0))
        split = mesh_pb2.TrafficSplit(model="m", revisions=[blue, green], is_set=True)
        return mesh_pb2.GetStatusResponse(epoch=self.epochs.pop(0) if self.epochs else 1, splits=[split])

    def split_traffic(self, weights: dict[str, int], *, model: str = "", timeout: float | None = None) -> None:
        assert model == "m"
        if len(self.told) and self.refuses:
            self.refuses -= 1
            raise Unavailable("away")
        self.told.append(dict(weights))


GONE = {"num_decode_workers": 0}
BAD_THERE = {"num_ended": 2, "num_failed": 2}
"""What one of two processes counts, to which every other look goes."""


@pytest.mark.parametrize(
    ("router", "code", "words"),
    [
        (Router(), 0, ""),
        (Router({}, {"num_ended": 2, "num_failed": 2}), 3, "2 of its 2 requests failed"),
        (Router({}, {"num_ended": 2, "num_failed": 2}, epochs=[1, 2]), 0, ""),
        (Router({}, {}, BAD_THERE, {}, BAD_THERE, {}, epochs=[1, 2, 1, 2, 1, 2]), 3, "2 of its 2 requests failed"),
        (Router({}, GONE, GONE), 3, "no decode worker any more"),
        (Router({}, GONE, {}), 0, ""),
        (Router({}, {"num_ejected": 1}, refuses=3), 3, "ejected"),
    ],
    ids=["well", "failures", "another process", "processes in turn", "gone", "gone for a moment", "going back is tried again"],
)
def test_a_rollout_watches_each_step(
    router: Router, code: int, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    options = Options(to="green", steps=(50.0, 100.0), hold_s=0.01 if router.epochs[2:] else 0.0)
    assert Rollout(cast(Client, router), options, sleep=lambda _: None).run() == code
    said = capsys.readouterr()
    assert words in said.err and bool(words) == ("went before" in said.err)
    assert router.told[0] == {"blue": 5000, "green": 5000}
    assert router.told[-1] == ({"blue": 1} if code else {"blue": 0, "green": PARTS})


def test_a_split_that_is_set_meanwhile_stays(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    router = Router(other={"blue": 1})
    options = Options(to="green", steps=(50.0, 100.0), hold_s=30.0)
    assert Rollout(cast(Client, router), options, sleep=lambda _: None).run() == 4
    assert "another split was set meanwhile, which stays" in capsys.readouterr().err
    assert router.told == [{"blue": 5000, "green": 5000}]


def test_where_going_back_fails_it_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    router = Router({}, {"num_ejected": 1}, refuses=99)
    with pytest.raises(FailedPrecondition, match="try: pdmesh rollout blue=1"):
        Rollout(cast(Client, router), Options(to="green", steps=(50.0, 100.0)), sleep=lambda _: None).run()


def test_a_request_counts_once_on_each_revision() -> None:
    rollouts = Rollouts(
        cast(FleetRegistry, SimpleNamespace(views=lambda: [of("green", "d-green"), of("", "d0")])), TrafficSplits()
    )
    green, blue = of("green", "d-green"), of("blue", "d-blue")
    rollouts.ended(green, None, 0.1, 0.01, {"green"})
    rollouts.ended(green, Unavailable("lost"), 0.0, 0.0, {"green", "blue"})
    rollouts.ended(blue, InvalidArgument("prompt", "too long"), 0.1, 0.0)
    (split,) = rollouts.described(["m"])
    shown = {each.revision: each for each in split.revisions}
    assert (shown["green"].num_ended, shown["green"].num_failed, shown["green"].num_lost) == (2, 1, 1)
    assert shown["green"].ttft_ms == pytest.approx(100) and "blue" not in shown, "it has no worker"
