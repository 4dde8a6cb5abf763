"""The predicting policy: tables of what it must choose, and what holds for every fleet."""

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pdmesh.planning.latency_model import LatencyModel
from router.routing.cost_model import NEUTRAL, Overhead, is_saturated
from router.routing.cost_policy import PredictPolicy
from router.routing.filters import (
    Candidate,
    NoPlacement,
    Placement,
    RoutingRequest,
    compatible,
    free_elsewhere,
    has_room,
    peer_tiers,
)
from router.routing.fleet_snapshot import FleetSnapshot
from router.routing.learned import Overheads
from router.routing.worker_snapshot import Mode, WorkerSnapshot
from tests.router.fleets import SPEED, offers, running, worker

DEMAND = RoutingRequest(model="m", num_tokens=400, max_total_tokens=500, expected_tokens=64)
POLICY = PredictPolicy(Overheads(), local_prefill_tokens=32)
BRUTE_FORCE = PredictPolicy(Overheads(), local_prefill_tokens=32, shortlist=10**6)


def choose(
    workers: list[WorkerSnapshot], routing_request: RoutingRequest = DEMAND, policy: PredictPolicy = POLICY, now: float = 0.0
) -> Placement:
    choice = policy.choose(FleetSnapshot(workers), routing_request, now)
    assert isinstance(choice, Placement)
    return choice


def names(placement: Placement) -> tuple[str, str | None]:
    return placement.decode.worker_id, placement.prefill.worker_id if placement.prefill else None


def best(placement: Placement) -> Candidate:
    assert placement.chosen is not None
    return placement.chosen


P0, P1, D0, D1 = worker("p0"), worker("p1"), worker("d0"), worker("d1")
BUSY = running("d0", 12)


@pytest.mark.parametrize(
    ("workers", "routing_request", "expected"),
    [
        ([P0, D0], {}, ("d0", None)),  # nobody is disturbed, and a hand-off takes time
        (
            [replace(P0, latency=replace(SPEED, per_prefill_token_s=1e-4)), D0],
            {},
            ("d0", "p0"),
        ),  # but a faster worker is worth it
        ([P0, BUSY], {}, ("d0", "p0")),  # those who run would wait
        ([P0, BUSY], {"num_tokens": 31}, ("d0", None)),  # too short for a hand-off
        ([P0, BUSY], {"mode": Mode.LOCAL}, ("d0", None)),
        ([P0, D0], {"mode": Mode.REMOTE}, ("d0", "p0")),
        ([worker("p0", num_waiting_tokens=8000), running("d0", 2)], {}, ("d0", None)),  # the prefill pool is busier than decode
        ([worker("p0", num_waiting_tokens=8000), P1, BUSY], {}, ("d0", "p1")),
        ([worker("p0", dispatched_tokens=8000, dispatched_seqs=8), P1, BUSY], {}, ("d0", "p1")),
        ([running("pd0", 8), worker("pd1")], {}, ("pd1", None)),  # both roles: the idle one does all of it
        ([running("pd0", 8), running("pd1", 9)], {}, ("pd0", None)),
        ([D0, D1], {"cached_tokens": {D1.key: 384}}, ("d1", None)),
        ([D0, worker("d1", num_waiting_tokens=4000)], {"cached_tokens": {D1.key: 384}}, ("d0", None)),  # its queue costs more
        ([P0, P1, BUSY], {"cached_tokens": {P1.key: 384}}, ("d0", "p1")),
        ([P0, BUSY], {"cached_tokens": {D0.key: 384}}, ("d0", None)),  # little is left to compute
        ([D0, running("d1", 4)], {}, ("d0", None)),
        ([D0, worker("d1", num_starting=4)], {}, ("d0", None)),
        ([worker("d0", dispatched_decodes=2, dispatched_context=800), D1], {}, ("d1", None)),
        ([worker("d0", num_free_blocks=5), running("d1", 20)], {}, ("d1", None)),  # room first
        ([worker("d0", num_free_blocks=5)], {}, ("d0", None)),  # the worker itself knows best
        ([D0, D1], {"excluded_decode": frozenset({D0.key})}, ("d1", None)),
        ([P0, BUSY], {"excluded_prefill": frozenset({P0.key})}, ("d0", None)),
        ([worker("p0", identity=("m", "old")), BUSY], {}, ("d0", None)),
        ([worker("d0", identity=("m", "old")), D1], {"kind": (("m", "hash"), "float32")}, ("d1", None)),
        ([worker("p0", host_id="there", transports=offers("shm")), BUSY], {}, ("d0", None)),
        ([worker("d0", penalty_s=30.0), running("d1", 4)], {}, ("d1", None)),
        ([replace(P0, latency=None), replace(BUSY, latency=None)], {"num_tokens": 2000}, ("d0", "p0")),  # nobody says how fast
        ([replace(P0, latency=None), BUSY], {}, ("d0", "p0")),  # as fast as the others, it is thought
        ([P0, D0], {"num_choices": 2, "mode": Mode.LOCAL}, ("d0", None)),
        ([D0, D1], {"session_workers": (D1.key,)}, ("d1", None)),  # among equals, where the session was
        ([D0, running("d1", 4)], {"session_workers": (D1.key,)}, ("d0", None)),  # not where that costs
        ([worker("d0", penalty_s=0.001), D1], {"session_workers": (D0.key,)}, ("d0", None)),  # predictions are no more exact
        ([D0, D1], {"session_workers": (("d1", 99),)}, ("d0", None)),  # that process is gone
        ([P0, P1, BUSY], {"session_workers": (D0.key, P1.key)}, ("d0", "p1")),
        ([worker("d0", num_free_blocks=5), D1], {"session_workers": (D0.key,)}, ("d1", None)),  # room first
    ],
)
def test_placement(workers: list[WorkerSnapshot], routing_request: dict[str, object], expected: tuple[str, str | None]) -> None:
    wanted = replace(DEMAND, **routing_request)  # type: ignore[arg-type]
    assert names(choose(workers, wanted)) == expected
    assert names(choose(workers[::-1], wanted)) == expected


@pytest.mark.parametrize(
    ("workers", "routing_request", "words", "never"),
    [
        ([], {}, "no decode worker", False),
        ([P0], {}, "no decode worker", False),
        ([worker("d0", num_total_blocks=9)], {}, "exceed the KV pool", True),
        ([worker("d0", max_context=499)], {}, "exceed the KV pool or context", True),
        ([D0], {"num_choices": 65}, "65 choices are more than any decode worker runs", True),
        ([P0, D0], {"excluded_decode": frozenset({D0.key})}, "refused or were lost", False),
        ([D0], {"mode": Mode.REMOTE}, "REMOTE was asked for", False),
        ([worker("pd")], {"mode": Mode.REMOTE}, "REMOTE was asked for", False),  # no hand-off to oneself
        ([P0, D0], {"kind": ("gone", "float32")}, "no decode worker", False),
    ],
)
def test_no_placement(workers: list[WorkerSnapshot], routing_request: dict[str, object], words: str, never: bool) -> None:
    nothing = POLICY.choose(FleetSnapshot(workers), replace(DEMAND, **routing_request), 0.0)  # type: ignore[arg-type]
    assert isinstance(nothing, NoPlacement)
    assert words in nothing.reason
    assert nothing.never is never


def test_the_prediction_adds_up() -> None:
    """By hand: 144 tokens wait, 400 come, 4 sequences take a place each in every step of 256 tokens."""
    over = Overheads()
    over.observe(None, D0, Overhead(0.008, 0.0))
    busy = running("d0", 4, num_waiting_tokens=144, num_prefilling=1, num_starting=1)
    predicted = best(choose([busy], policy=PredictPolicy(over), now=0.1)).prediction
    assert predicted is not None
    step = 4e-3 + 4 * 1e-3 + 1200 * 1e-6
    waiting = 144 * (1e-3 + 1e-7 * 72) + step * 144 / 252 - 0.1  # 0.1 s of it have passed since the report
    own = 400 * 1e-3 + (400 * 401 // 2) * 1e-7
    assert predicted.ahead_s == pytest.approx(waiting + step / 2)
    assert predicted.ttft_s == pytest.approx(waiting + step / 2 + own + 2 * step + 0.008)
    row = 1e-3 + 432 * 1e-6
    assert predicted.tpot_s == pytest.approx(4e-3 + 5 * 1e-3 + 1500 * 1e-6 + row)
    assert predicted.delay_s == pytest.approx(4 * own + 5 * 64 * row)


def test_a_burst_spreads() -> None:
    workers = {name: running(name, 6) if "d" in name else worker(name) for name in ("p0", "p1", "d0", "d1")}
    placed: list[tuple[str, str | None]] = []
    for _ in range(8):
        choice = choose(list(workers.values()))
        decode, prefill = choice.decode, choice.prefill
        assert prefill is not None
        workers[decode.address] = replace(
            decode,
            dispatched_seqs=decode.dispatched_seqs + 1,
            dispatched_decodes=decode.dispatched_decodes + 1,
            dispatched_context=decode.dispatched_context + 400,
        )
        workers[prefill.address] = replace(
            prefill, dispatched_seqs=prefill.dispatched_seqs + 1, dispatched_tokens=prefill.dispatched_tokens + 400
        )
        placed.append(names(choice))
    assert sorted(decode for decode, _ in placed) == ["d0"] * 4 + ["d1"] * 4
    assert sorted(str(prefill) for _, prefill in placed) == ["p0"] * 4 + ["p1"] * 4


def test_objectives_decide() -> None:
    """A worker that starts soon but is slow, and one that starts late and is fast."""
    soon, late = running("d0", 24), running("d1", 2, num_waiting_tokens=300, num_prefilling=1)
    fast_decode = replace(DEMAND, expected_tokens=16)
    no_delay = [replace(soon, num_decoding=0, num_seqs=0, decode_context=0, latency=replace(SPEED, fixed_s=40e-3)), late]
    assert names(choose(no_delay, replace(fast_decode, ttft_goal_s=0.65))) == ("d0", None)
    assert names(choose(no_delay, replace(fast_decode, tpot_goal_s=0.03))) == ("d1", None)


def test_running_sequences_are_kept_within_their_objective() -> None:
    few = [worker("p0", num_waiting_tokens=700, num_prefilling=1), running("d0", 1)]
    assert names(choose(few)) == ("d0", None)
    assert names(choose(few, replace(DEMAND, running_tpot_goal_s=0.011))) == ("d0", "p0")


def test_learned_hand_offs_decide() -> None:
    over = Overheads()
    assert names(choose([P0, BUSY], policy=PredictPolicy(over))) == ("d0", "p0")
    for _ in range(30):
        over.observe(P0, BUSY, Overhead(4.0, 4.0))
    assert names(choose([P0, BUSY], policy=PredictPolicy(over))) == ("d0", None)


def ttft_s(placement: Placement) -> float:
    predicted = best(placement).prediction
    assert predicted is not None
    return predicted.ttft_s


CACHED = replace(DEMAND, num_tokens=4000, max_total_tokens=4100, mode=Mode.REMOTE, cached_tokens={("p0", 1): 3900})
HOLDER = worker("p0", num_waiting_tokens=1000)
"""It has the beginning of that prompt, and a second of others to compute."""


def test_a_worker_that_could_begin_at_once_is_told_where_a_cached_prefix_is_worth_the_wait() -> None:
    placed = choose([HOLDER, P1, D0], CACHED)
    assert names(placed) == ("d0", "p0") and ttft_s(placed) > 1
    elsewhere = free_elsewhere(placed, CACHED)
    assert elsewhere is not None and elsewhere.ahead_s == 0 and elsewhere.ttft_s > 4


@pytest.mark.parametrize(
    ("workers", "what"),
    [
        ([replace(HOLDER, num_waiting_tokens=0), P1, D0], "it begins at once where it is placed"),
        ([HOLDER, D0], "there is no other worker"),
        ([HOLDER, worker("p1", num_waiting_tokens=2000), D0], "the other one has as much to do"),
        ([HOLDER, P1, worker("d0", num_free_blocks=0)], "no decode worker has room"),
    ],
)
def test_else_none_is_told(workers: list[WorkerSnapshot], what: str) -> None:
    placed = choose(workers, CACHED)
    assert names(placed) == ("d0", "p0") and free_elsewhere(placed, CACHED) is None, what


@pytest.mark.parametrize("pace_s", [0.0, 0.04])
def test_a_worker_with_sequences_and_without_prompts_is_free(pace_s: float) -> None:
    """Requests whose best worker it is begin there at once, whether it keeps a pace or not."""
    demand, other = replace(CACHED, mode=Mode.LOCAL, cached_tokens={("d0", 1): 3900}), running("d1", 3, pace_s=pace_s)
    placed = choose([worker("d0", num_waiting_tokens=1000), other], demand)
    assert names(placed) == ("d0", None) and free_elsewhere(placed, demand) is not None


def test_a_slower_way_is_not_elsewhere_where_nothing_is_cached() -> None:
    """Both prefill workers have enough to do; what could begin on the decode worker is no reason to give them more."""
    demand = replace(DEMAND, num_tokens=1000, max_total_tokens=1064)
    busy = [worker(name, num_waiting_tokens=500) for name in ("p0", "p1")]
    placed = choose([*busy, running("d0", 12, pace_s=0.02)], demand)
    assert placed.prefill is not None and is_saturated(ttft_s(placed), 0.5) and free_elsewhere(placed, demand) is None


FETCHING = worker("p0", fetch_token_s=1e-5)
"""A token's KV comes in a hundredth of the time in which it is computed."""


def test_a_prompt_whose_beginning_is_fetched_leaves_a_busy_decode_worker_alone() -> None:
    """It would have little to compute itself; what runs there would wait for that all the same."""
    busy, demand = running("d0", 6), replace(DEMAND, num_tokens=4000, max_total_tokens=4100, cached_tokens={("d0", 1): 3600})
    assert names(choose([P0, busy], demand)) == ("d0", None), "3 600 tokens more to compute"
    fetched = choose([FETCHING, busy], demand)
    assert names(fetched) == ("d0", "p0")
    assert ttft_s(fetched) < 0.25 * ttft_s(choose([P0, busy], replace(demand, mode=Mode.REMOTE)))


def test_what_is_fetched_more_slowly_than_computed_is_computed() -> None:
    slow, demand = worker("p0", fetch_token_s=0.1), replace(DEMAND, mode=Mode.REMOTE, cached_tokens={("d0", 1): 320})
    assert best(choose([slow, D0], demand)).prediction == best(choose([P0, D0], demand)).prediction


def test_a_prefill_worker_fetches_from_any_worker_and_nothing_that_it_has() -> None:
    demand = replace(DEMAND, mode=Mode.REMOTE, cached_tokens={("p1", 1): 320})
    fetched, computed = (ttft_s(choose([each, D0], demand)) for each in (FETCHING, P0))
    assert fetched < 0.5 * computed
    has_it = replace(demand, cached_tokens={("p0", 1): 320, ("d0", 1): 320})
    assert best(choose([FETCHING, D0], has_it)).prediction == best(choose([P0, D0], has_it)).prediction


RESTORING = worker("d1", restore_token_s=1e-5)


def test_a_decode_worker_restores_from_its_tiers() -> None:
    demand = replace(DEMAND, mode=Mode.LOCAL, restorable_tokens={RESTORING.key: 320})
    restored = choose([D0, RESTORING], demand)
    assert names(restored) == ("d1", None) and ttft_s(restored) < 0.5 * ttft_s(choose([D0], demand))
    ways = best(restored).ways
    assert ways is not None and ways.taken == "restore" and ways.fetch_s is None
    assert names(choose([D0, D1], demand)) == ("d0", None), "it has no tiers to restore from"
    slow = worker("d1", restore_token_s=0.1)
    computed = next(each for each in choose([D0, slow], demand).candidates if each.decode is slow)
    assert computed.ways is not None and computed.ways.taken == "compute"
    assert computed.prediction == best(choose([D0, slow], replace(DEMAND, mode=Mode.LOCAL))).prediction


def test_the_least_of_computing_restoring_and_fetching_counts() -> None:
    """By how much is where, and how fast it comes."""
    demand = replace(DEMAND, mode=Mode.REMOTE, cached_tokens={("p0", 1): 64, ("d0", 1): 320}, restorable_tokens={("p0", 1): 240})
    taken = {}
    for restore_s, fetch_s in ((1e-5, 1e-3), (1e-3, 1e-5), (0.1, 0.1), (0.0, 1e-5), (1e-5, 0.0)):
        chosen = best(choose([worker("p0", restore_token_s=restore_s, fetch_token_s=fetch_s), D0], demand))
        assert chosen.ways is not None and chosen.prediction is not None
        assert (chosen.ways.restore_s is None, chosen.ways.fetch_s is None) == (not restore_s, not fetch_s)
        taken[restore_s, fetch_s] = chosen.ways.taken
    assert taken == {
        (1e-5, 1e-3): "restore", (1e-3, 1e-5): "fetch", (0.1, 0.1): "compute", (0.0, 1e-5): "fetch", (1e-5, 0.0): "restore"
    }  # fmt: skip


def test_a_worker_fetches_what_another_one_restores_at_the_sum_of_both() -> None:
    """A worker whose own tiers have as much does not ask others."""
    demand = replace(DEMAND, mode=Mode.REMOTE, cached_tokens={D1.key: 64}, restorable_tokens={D1.key: 320})
    plain = ttft_s(choose([FETCHING, D0, D1], demand))
    quick, slow = (worker("d1", restore_token_s=each) for each in (1e-5, 0.1))
    restored = choose([FETCHING, D0, quick], demand)
    assert ttft_s(restored) < 0.6 * plain
    ways = best(restored).ways
    assert ways is not None and (ways.taken, ways.num_fetched) == ("fetch", 320)
    assert demand.computed(FETCHING, ways) == demand.num_tokens - 320
    assert ttft_s(choose([FETCHING, D0, slow], demand)) == plain
    assert ttft_s(choose([P0, D0, quick], demand)) == ttft_s(choose([P0, D0, D1], demand)), "it fetches nothing"
    own = replace(demand, restorable_tokens={D1.key: 320, FETCHING.key: 320})
    with_own = worker("p0", fetch_token_s=1e-5, restore_token_s=1e-5)
    ways = best(choose([with_own, D0, quick], own)).ways
    assert ways is not None and (ways.taken, ways.num_fetched) == ("restore", 0)


def test_the_peer_is_taken_that_has_most_and_of_equal_ones_the_quickest() -> None:
    workers = {each.key: each for each in (worker("a", restore_token_s=1e-3), worker("b", restore_token_s=1e-4), worker("c"))}
    demand = replace(DEMAND, cached_tokens={("a", 1): 16}, restorable_tokens={("a", 1): 160, ("b", 1): 160, ("c", 1): 320})

    def taken(least: int, most: int = 399, **held: int) -> tuple[object, ...] | None:
        asked = replace(demand, restorable_tokens={**demand.restorable_tokens, **{(name, 1): has for name, has in held.items()}})
        found = peer_tiers(asked, workers.get, least, most)
        return None if found is None else (found.key[0], found.num_tokens, found.num_tier_tokens)

    assert taken(0) == ("b", 160, 160), "c says of no tier how fast it is"
    assert taken(0, a=176) == ("a", 176, 160)
    assert taken(160) is None
    assert taken(0, most=96) == ("b", 96, 96)
    assert taken(0, a=16, b=0) is None, "its pool has all of it"
    workers["b", 1] = worker("b", restore_token_s=1e-4, private_tiers=True)
    assert taken(0) == ("a", 160, 144), "b sends nothing of its tiers"


def test_without_anything_to_restore_tiers_change_no_decision() -> None:
    cached = replace(DEMAND, cached_tokens={D1.key: 320})
    for demand in (DEMAND, cached, replace(cached, restorable_tokens={D1.key: 320})):
        plain, tiered = (choose([P0, D0, each], demand).candidates for each in (D1, RESTORING))
        assert [(each.cost, each.prediction, each.ways) for each in tiered] == [
            (each.cost, each.prediction, each.ways) for each in plain
        ]


def test_a_worker_of_a_large_fleet_that_can_restore_is_found() -> None:
    fleet = [worker(f"d{number}") for number in range(90)] + [worker("d99", num_waiting_tokens=64, restore_token_s=1e-5)]
    demand = replace(DEMAND, num_tokens=1500, max_total_tokens=1600, mode=Mode.LOCAL)
    assert names(choose(fleet, demand)) != ("d99", None)
    assert names(choose(fleet, replace(demand, restorable_tokens={("d99", 1): 1440}))) == ("d99", None)


def test_a_retry_takes_what_fits_the_reservation() -> None:
    foreign, far = worker("p1", identity=("m", "old")), worker("p2", num_waiting_tokens=9000)
    fleet_snapshot = FleetSnapshot([P0, foreign, far, BUSY])
    taken = []
    for tried in ((), (P0,), (P0, far)):
        demand = replace(DEMAND, excluded_prefill=frozenset(each.key for each in tried))
        choice = POLICY.choose_prefill(fleet_snapshot, BUSY, demand, 0.0)
        assert choice is None or choice.decode == BUSY
        taken.append(choice and choice.prefill)
    assert taken == [P0, far, None]


def test_a_retry_compares_the_ways_too() -> None:
    demand, decode = replace(DEMAND, cached_tokens={D0.key: 320}), worker("d0")
    choice = POLICY.choose_prefill(FleetSnapshot([FETCHING, decode]), decode, demand, 0.0)
    assert choice is not None and choice.prefill == FETCHING and choice.chosen is not None
    assert choice.chosen.ways is not None and choice.chosen.ways.taken == "fetch"
    assert demand.computed(FETCHING, choice.chosen.ways) == demand.num_tokens - 320


def test_remote_finds_the_only_pair_of_a_large_fleet() -> None:
    """Nobody on the shortlists can hand over: asked for REMOTE, the policy looks at everybody."""
    lonely = [worker(f"d{number}", host_id=f"h{number}", transports=offers("shm")) for number in range(20)]
    pair = [
        running("d99", 30, host_id="far", transports=offers("shm")),
        worker("p99", host_id="far", transports=offers("shm")),
    ]
    assert names(choose(lonely + pair, replace(DEMAND, mode=Mode.REMOTE))) == ("d99", "p99")


speeds = st.builds(
    LatencyModel,
    fixed_s=st.floats(1e-3, 1e-2),
    per_prefill_token_s=st.floats(5e-4, 1e-3),
    per_prefill_context_s=st.floats(0, 2e-7),
    per_sequence_s=st.floats(5e-4, 1e-3),
    per_context_token_s=st.floats(0, 2e-6),
)


@st.composite
def fleets(draw: st.DrawFn, max_size: int = 12) -> list[WorkerSnapshot]:
    found = []
    for number in range(draw(st.integers(1, max_size))):
        name = draw(st.sampled_from(["p", "d", "pd"])) + str(number)
        view = running(name, draw(st.integers(0, 20)), draw(st.integers(1, 500)), num_waiting_tokens=draw(st.integers(0, 3000)))
        found.append(replace(view, latency=draw(speeds), num_free_blocks=draw(st.integers(0, view.num_free_blocks))))
    return found


demands = st.builds(
    RoutingRequest,
    model=st.just("m"),
    num_tokens=st.integers(1, 4000),
    expected_tokens=st.floats(1, 500),
    ttft_goal_s=st.none() | st.floats(0.05, 5),
    tpot_goal_s=st.none() | st.floats(0.005, 0.1),
    running_tpot_goal_s=st.none() | st.floats(0.005, 0.1),
    mode=st.sampled_from([None, None, Mode.LOCAL, Mode.REMOTE]),
)


@settings(max_examples=150, deadline=None)
@given(fleets(), demands, st.data())
def test_nobody_unfit_is_chosen_and_equal_questions_get_equal_answers(
    workers: list[WorkerSnapshot], routing_request: RoutingRequest, data: st.DataObject
) -> None:
    keys = [view.key for view in workers]
    some = st.frozensets(st.sampled_from(keys))
    routing_request = replace(routing_request, excluded_decode=data.draw(some), excluded_prefill=data.draw(some))
    choice = POLICY.choose(FleetSnapshot(workers), routing_request, 0.0)
    again = POLICY.choose(FleetSnapshot(data.draw(st.permutations(workers))), routing_request, 0.0)
    if isinstance(choice, NoPlacement):
        assert choice == again
        return
    assert isinstance(again, Placement) and names(choice) == names(again)
    assert choice.decode.decode and choice.decode.key not in routing_request.excluded_decode
    assert routing_request.num_tokens <= choice.decode.max_context
    roomy = [w for w in workers if w.decode and w.key not in routing_request.excluded_decode and has_room(w, routing_request)]
    if routing_request.mode is None:
        assert has_room(choice.decode, routing_request) or not roomy
    if choice.prefill is not None:
        assert (
            routing_request.mode is not Mode.LOCAL
            and choice.prefill.prefill
            and choice.prefill.key not in routing_request.excluded_prefill
        )
        assert compatible(choice.prefill, choice.decode)
    else:
        assert routing_request.mode is not Mode.REMOTE


@settings(max_examples=150, deadline=None)
@given(fleets(), demands, st.data())
def test_more_load_makes_nobody_more_attractive(
    workers: list[WorkerSnapshot], routing_request: RoutingRequest, data: st.DataObject
) -> None:
    """The loaded worker was busy before: the pressure of the fleet stays what it was."""
    view = data.draw(st.sampled_from(workers))
    view = replace(view, num_waiting_tokens=view.num_waiting_tokens + 1)
    others = [other for other in workers if other.address != view.address]
    before = BRUTE_FORCE.choose(FleetSnapshot([*others, view]), routing_request, 0.0)
    heavier = replace(
        view,
        num_waiting_tokens=view.num_waiting_tokens + data.draw(st.integers(0, 2000)),
        dispatched_tokens=data.draw(st.integers(0, 2000)),
        dispatched_seqs=1,
        num_starting=view.num_starting + data.draw(st.integers(0, 8)),
        dispatched_blocks=data.draw(st.integers(0, 100)),
    )
    after = BRUTE_FORCE.choose(FleetSnapshot([*others, heavier]), routing_request, 0.0)
    if isinstance(before, NoPlacement) or isinstance(after, NoPlacement):
        assert isinstance(before, NoPlacement) and isinstance(after, NoPlacement)
    elif view.worker_id not in names(before):
        assert view.worker_id not in names(after)


def test_a_shortlist_costs_little() -> None:
    """Workers up to twice as fast as others, requests up to eight times as long as those that they are ranked for. Objectives
    make a cliff of the cost: without them, in at least 95 of 100 fleets it is at most 1.8 times that of the best of all (97 to
    100 were seen, since Hypothesis draws other fleets with other modules loaded), and with up to four workers the same."""
    ratios: list[float] = []

    @settings(max_examples=300, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
    @given(fleets(max_size=24), demands)
    def compare(workers: list[WorkerSnapshot], routing_request: RoutingRequest) -> None:
        routing_request = replace(routing_request, ttft_goal_s=None, tpot_goal_s=None, running_tpot_goal_s=None)
        short, thorough = (policy.choose(FleetSnapshot(workers), routing_request, 0.0) for policy in (POLICY, BRUTE_FORCE))
        if isinstance(thorough, NoPlacement):
            assert short == thorough
            return
        assert isinstance(short, Placement)
        assert best(short).has_room == best(thorough).has_room
        if len(workers) <= 4:
            assert names(short) == names(thorough)
        ratios.append(best(short).cost / best(thorough).cost)

    compare()
    assert len(ratios) > 100
    assert sum(ratio <= 1.8 for ratio in ratios) >= 0.95 * len(ratios)


changes = st.tuples(fleets(max_size=6), st.integers(0, 5), st.sampled_from([("m", "hash"), ("m", "old")]))


@settings(max_examples=100, deadline=None)
@given(st.lists(changes, min_size=1, max_size=6))
def test_a_fleet_snapshot_ranks_as_if_built_anew(rounds: list[tuple[list[WorkerSnapshot], int, tuple[str, str]]]) -> None:
    """Workers report again and again, change identity and roles, and go."""
    fleet_snapshot, known = FleetSnapshot(), dict[str, WorkerSnapshot]()
    for views, leaves, identity in rounds:
        for number, view in enumerate(views):
            address = f"a{number}"
            known[address] = replace(view, address=address, identity=identity if number % 2 else view.identity)
            fleet_snapshot.put(address, known[address])
        known.pop(f"a{leaves}", None)
        fleet_snapshot.put(f"a{leaves}", None)
        fresh = FleetSnapshot(known.values())
        assert len(fleet_snapshot) == len(fresh) and sorted(v.address for v in fleet_snapshot.views()) == sorted(known)
        pools = {pool.identity: pool for pool in fleet_snapshot.pools("m")}
        for pool in fresh.pools("m"):
            same = pools.pop(pool.identity)
            assert same.pressure == pool.pressure
            for name in ("decode_ranking", "aggregated_ranking", "prefill_ranking"):
                assert getattr(same, name).names == getattr(pool, name).names
        assert not pools


@pytest.mark.parametrize("num_holders", [2, 100])
def test_holders_of_the_prompt_are_looked_at_behind_better_ranked_ones(num_holders: int) -> None:
    """However many there are; those that only prefill, too."""
    holders = [worker(f"p{number:03}", num_waiting_tokens=500 + number) for number in range(num_holders)]
    cold = [worker(f"p9{number:02}") for number in range(8)] + [running(f"d{number}", 20) for number in range(4)]
    routing_request = replace(DEMAND, num_tokens=4000, max_total_tokens=4100, cached_tokens={h.key: 3900 for h in holders})
    placement = choose([*holders, *cold], routing_request)
    assert placement.prefill is not None and placement.prefill.key in routing_request.cached_tokens


def test_who_does_not_say_is_as_fast_as_the_others() -> None:
    fleet_snapshot = FleetSnapshot([worker("d0", latency=None), D1])
    told = fleet_snapshot.get("d0")
    assert told is not None and told.model == NEUTRAL  # nobody had said anything yet
    fleet_snapshot.put("d0", worker("d0", latency=None))
    told = fleet_snapshot.get("d0")
    assert told is not None and told.model.per_prefill_token_s == pytest.approx(SPEED.per_prefill_token_s)


def test_a_worker_whose_start_was_disturbed_is_believed_to_be_like_the_others() -> None:
    disturbed = replace(SPEED, fixed_s=1.0, num_steps=3)
    engine = FleetSnapshot([worker("d0"), worker("d1", latency=disturbed)]).get("d1")
    assert engine is not None and engine.model.fixed_s == pytest.approx(SPEED.fixed_s)
    alone = FleetSnapshot([worker("d1", latency=disturbed)]).get("d1")
    assert alone is not None and alone.model is disturbed


def test_the_sessions_worker_is_compared_also_where_it_is_not_among_the_first_of_a_large_fleet() -> None:
    workers = [worker(f"d{number:02}") for number in range(40)]
    home = workers[-1]
    assert names(choose(workers, replace(DEMAND, session_workers=(home.key,)))) == ("d39", None)
    assert names(choose(workers)) == ("d00", None)
