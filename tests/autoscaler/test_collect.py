"""Figures of all routers together: rates add up, restarts lose nothing that was seen, silence grows old."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.autoscaler.collect.collect import Routers
from pdmesh.autoscaler.collect.traffic import MIN_MEASURED, Counts, Rounds, counts_of, traffic_of
from pdmesh.autoscaler.collect.workers import Pools, Starts, idlest, typical, workers_of
from pdmesh.autoscaler.platform import Asked
from pdmesh.autoscaler.views import PoolName, Traffic
from pdmesh.planning.capacity_load import RELATIVE_ERROR, class_of
from pdmesh.planning.latency_model import NO_DRAFTS
from pdmesh.v1 import mesh_pb2, worker_pb2
from tests.autoscaler.collected import D, P, counts, status, worker

PREFILL, DECODE, BOTH = PoolName.PREFILL, PoolName.DECODE, PoolName.BOTH


def traffic(rounds: Rounds, window_s: float = 10.0) -> Traffic:
    found = traffic_of(rounds.rounds, (), window_s, 0.9, 0.0)
    assert found is not None
    return found


def test_rates_of_routers_add_up() -> None:
    rounds = Rounds(20.0)
    for at_s in (0.0, 2.0, 4.0):
        rounds.heard("a", counts(100 + 3 * at_s), at_s)
        rounds.heard("b", counts(5 * at_s), at_s)
        assert rounds.close(at_s)
    seen = traffic(rounds)
    assert seen.rate_per_s == pytest.approx(8.0) and seen.window_s == pytest.approx(4.0)
    assert seen.lengths is not None and seen.lengths.input_tokens == 100 and seen.lengths.output_tokens == 10


def test_the_window_is_the_latest() -> None:
    rounds = Rounds(20.0)
    for at_s in range(0, 40, 2):
        rounds.heard("a", counts(float(at_s if at_s <= 20 else 20)), at_s)
        rounds.close(at_s)
    assert traffic(rounds, 10.0).rate_per_s == 0.0, "nobody has come since second 20"
    assert traffic(rounds, 10.0).lengths is None


def test_a_router_that_is_silent_ends_no_round() -> None:
    rounds = Rounds(20.0)
    for at_s in (0.0, 2.0):
        rounds.heard("a", counts(at_s), at_s)
        rounds.heard("b", counts(at_s), at_s)
        rounds.close(at_s)
    for at_s in (4.0, 6.0):
        rounds.heard("a", counts(at_s), at_s)
        assert not rounds.close(at_s)
    assert rounds.oldest_s == 2.0 and traffic(rounds).rate_per_s == pytest.approx(2.0), "its last figures stand, and grow old"
    rounds.heard("b", counts(8.0), 8.0)
    assert rounds.close(8.0)
    seen = traffic(rounds)
    assert seen.rate_per_s == pytest.approx((2 + 2 + 4 + 6) / 8), "what came meanwhile is counted over all of that time"


def test_a_router_that_restarts_counts_from_its_beginning() -> None:
    rounds = Rounds(20.0)
    for at_s in (0.0, 2.0):
        rounds.heard("old", counts(10 * at_s), at_s)
        rounds.close(at_s)
    rounds.forget({"old"})
    rounds.heard("new", counts(7.0, up_s=1.5), 4.0)
    assert rounds.close(4.0)
    assert traffic(rounds).rate_per_s == pytest.approx((20 + 7) / 4)


def test_a_router_that_was_there_before_counts_from_when_it_is_seen() -> None:
    rounds = Rounds(20.0)
    for at_s in (0.0, 2.0):
        rounds.heard("a", counts(at_s), at_s)
        rounds.close(at_s)
    rounds.heard("a", counts(4.0), 4.0)
    rounds.heard("b", counts(5000.0, up_s=900.0), 4.0)
    rounds.close(4.0)
    assert traffic(rounds).rate_per_s == pytest.approx(1.0)
    rounds.heard("a", counts(6.0), 6.0)
    rounds.heard("b", counts(5002.0, up_s=902.0), 6.0)
    rounds.close(6.0)
    assert traffic(rounds, 2.0).rate_per_s == pytest.approx(2.0)


def test_nobody_is_no_traffic() -> None:
    rounds = Rounds(20.0)
    assert not rounds.close(1.0) and traffic_of(rounds.rounds, (), 10.0, 0.9, 0.0) is None
    rounds.heard("a", counts(5.0), 2.0)
    rounds.close(2.0)
    assert traffic_of(rounds.rounds, (), 10.0, 0.9, 0.0) is None, "a single look says nothing of a rate"


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=6), min_size=1, max_size=4))
def test_every_arrival_is_counted_once_whichever_router_it_came_to(arrivals: list[list[int]]) -> None:
    rounds, length = Rounds(1e9), max(map(len, arrivals))
    for number in range(length + 1):
        for router, each in enumerate(arrivals):
            rounds.heard(router, counts(float(sum(each[:number]))), float(number))
        assert rounds.close(float(number))
    seen = traffic(rounds, 1e9)
    assert seen.rate_per_s * seen.window_s == pytest.approx(sum(map(sum, arrivals)))


def test_bursts_of_each_router_weigh_by_how_many_came_there() -> None:
    def gaps(number: int, variation: float) -> dict[str, float]:
        return {"num_gaps": float(number), "gaps_s": float(number), "gaps_squared": number * (1 + variation)}

    rounds = Rounds(20.0)
    for at_s, share in ((0.0, 0), (2.0, 1)):
        rounds.heard("even", counts(3000.0 * share, **gaps(100_000 * share, 0.0)), at_s)
        rounds.heard("bursty", counts(1000.0 * share, **gaps(100_000 * share, 4.0)), at_s)
        rounds.close(at_s)
    assert traffic(rounds).burstiness == pytest.approx(1.0, abs=0.01)
    few = Rounds(20.0)
    for at_s, share in ((0.0, 0), (2.0, 1)):
        few.heard("a", counts(4.0 * share, **gaps(3 * share, 30.0)), at_s)
        few.close(at_s)
    assert 1.0 < traffic(few).burstiness < 10.0, "three gaps are not believed"


def test_latencies_are_quantiles_of_both_sides_of_the_same_requests() -> None:
    seen, thought = Counter({class_of(0.4): MIN_MEASURED}), Counter({class_of(0.2): MIN_MEASURED})
    rounds = Rounds(20.0)
    rounds.heard("a", counts(0.0), 0.0)
    rounds.close(0.0)
    rounds.heard("a", Counts(up_s=2.0, num_arrived=8, ttft_observed=seen, ttft_predicted=thought), 2.0)
    rounds.close(2.0)
    measured = traffic(rounds)
    assert measured.ttft.observed_s == pytest.approx(0.4, rel=RELATIVE_ERROR + 1e-3)
    assert measured.ttft.predicted_s == pytest.approx(0.2, rel=RELATIVE_ERROR + 1e-3)
    assert measured.tpot.observed_s is None, "too few say nothing"


def test_who_waits_is_summed_and_the_longest_wait_counts() -> None:
    rounds = Rounds(20.0)
    for at_s in (0.0, 2.0):
        rounds.heard("a", counts(at_s), at_s)
        rounds.close(at_s)
    waiting = [mesh_pb2.TrafficStatus(num_queued=3, queue_wait_ms=700), mesh_pb2.TrafficStatus(num_queued=2, queue_wait_ms=90)]
    seen = traffic_of(rounds.rounds, waiting, 10.0, 0.9, 0.0)
    assert seen is not None and (seen.num_queued, seen.queue_wait_s) == (5, 0.7)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_figures_that_are_none_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"traffic\.input_tokens"):
        counts_of(mesh_pb2.TrafficStatus(input_tokens=value))


def test_processes_are_replaced_where_they_were() -> None:
    routers = Routers()
    assert routers.listed(["x:1"]) == set() and routers.unknown() == ["x:1"]
    assert routers.heard("x:1", 1, 1, 0.0) == set() and routers.unknown() == []
    assert routers.heard("x:1", 2, 1, 2.0) == {1}, "one process at an address: a new one stands in for it"
    assert routers.listed(["y:1"]) == {2} and routers.keys == set()


def test_processes_that_share_a_port_are_all_waited_for() -> None:
    routers = Routers()
    routers.listed(["x:1"])
    routers.heard("x:1", 1, 3, 0.0)
    assert routers.unknown() == ["x:1"] and routers.num_missing("x:1", 0.0) == 2
    routers.heard("x:1", 2, 3, 0.0)
    routers.heard("x:1", 3, 3, 0.0)
    assert routers.unknown() == [] and routers.num_missing("x:1", 1.0) == 3
    routers.heard("x:1", 3, 3, 2.0)
    routers.heard("x:1", 2, 3, 2.0)
    assert routers.heard("x:1", 4, 3, 2.0) == {1}, "whoever was silent for longest has been replaced"


def pools(*workers: mesh_pb2.WorkerStatus, prefill: int, decode: int) -> Pools:
    asked = {PREFILL: Asked(prefill), DECODE: Asked(decode)}
    return Pools(asked, tuple(workers_of([(10.0, status(*workers))], "m")))


def starts() -> dict[PoolName, Starts]:
    return {name: Starts(60.0) for name in PoolName}


def test_a_worker_is_what_the_freshest_report_says() -> None:
    old, new = worker("d0", (D,), age_ms=900, busy=5), worker("d0", (P,), home=(D,), age_ms=10, busy=0)
    found = workers_of([(10.0, status(old)), (10.0, status(new))], "m")
    assert [(each.pool, each.home, each.num_busy) for each in found] == [(PREFILL, DECODE, 0)]
    assert workers_of([(10.0, status(worker("d0", (D,), alive=False), worker("x", (D,), model="other")))], "m") == []


def test_a_pool_keeps_a_pace_if_all_of_its_workers_do() -> None:
    lacking = worker("d1", (D,))
    lacking.info.lacks.append(worker_pb2.ENGINE_LACK_PACES)
    for some, keeps_pace in (([worker("d0", (D,))], True), ([worker("d0", (D,)), lacking], False)):
        [_, view] = pools(*some, prefill=0, decode=len(some)).views(starts(), 10.0, 10.0)
        assert view.worker is not None and view.worker.keeps_pace is keeps_pace


def test_a_stock_engine_is_nobodys_to_scale() -> None:
    engine = worker("engine-a:1", (D,))
    assert len(workers_of([(10.0, status(engine))], "m")) == 1
    engine.info.identity.weights_hash = ""
    assert workers_of([(10.0, status(engine))], "m") == []


def test_the_typical_worker_is_the_one_in_the_middle() -> None:
    told = [worker(f"d{number}", (D,), fixed_s=fixed_s) for number, fixed_s in enumerate((0.5, 0.01, 0.02))]
    latency, limits = typical(workers_of([(0.0, status(*told))], "m"))
    assert latency is not None and latency.fixed_s == pytest.approx(0.02)
    assert limits is not None and (limits.kv_tokens, limits.max_num_seqs) == (1600, 8)
    assert typical(workers_of([(0.0, status(worker("d0", (D,), fixed_s=math.nan)))], "m"))[0] is None


def test_a_pool_speculates_as_its_workers_do_that_decode() -> None:
    told = [worker(f"d{number}", (D,)) for number in range(3)]
    for each, tokens, num_rows in zip(told, (1.2, 1.6, 1.0), (9, 9, 0), strict=True):
        each.load.speculation.MergeFrom(
            worker_pb2.SpeculationReport(tokens_per_row=tokens, computed_per_row=tokens + 1, num_rows=num_rows)
        )
    views = pools(*told, prefill=0, decode=3).views(starts(), 10.0, 10.0)
    assert views[1].worker is not None
    assert astuple(views[1].worker.drafts) == pytest.approx((1.4, 2.4)), "the third has not decoded yet"
    assert pools(told[2], prefill=0, decode=1).views(starts(), 10.0, 10.0)[1].drafts == NO_DRAFTS
    silent = [worker(f"s{number}", (D,)) for number in range(2)]
    drafts = pools(*told, *silent, prefill=0, decode=5).views(starts(), 10.0, 10.0)[1].drafts
    assert astuple(drafts) == pytest.approx((1.2, 1.7)), "one that says nothing of it, such as an older one, has none"


def test_pools_count_lent_and_borrowed_and_what_is_on_its_way() -> None:
    lent = worker("d1", (P,), home=(D,), free=50)
    seen, tracked = pools(worker("p0", (P,)), worker("d0", (D,)), lent, prefill=1, decode=3), starts()
    seen.follow(tracked, 10.0)
    prefill, decode = seen.views(tracked, 12.0, 10.0)
    assert (prefill.num_ready, prefill.num_borrowed, prefill.starting_ages_s) == (2, 1, ())
    assert (decode.num_ready, decode.num_borrowed, decode.starting_ages_s) == (1, 0, (2.0,))
    assert prefill.kv_occupancy == pytest.approx(0.25) and prefill.age_s == pytest.approx(2.0)
    assert seen.num_own(PREFILL, prefill.num_replicas) == 1 and seen.num_own(DECODE, decode.num_replicas) == 3


def test_a_flip_asks_for_no_other_number_of_a_pools_own() -> None:
    seen = pools(worker("p0", (P,)), worker("d0", (D,), busy=3), worker("d1", (D,)), prefill=1, decode=2)
    chosen = idlest(seen.here(DECODE), PREFILL, 1)
    assert [each.worker_id for each in chosen] == ["d1"], "the idle one"
    moved = seen.moved(chosen[0], PREFILL)
    assert (moved.num_own(PREFILL, 2), moved.num_own(DECODE, 1)) == (1, 2)
    busy_guest = worker("d1", (P,), home=(D,), busy=9)
    back = pools(worker("p0", (P,)), busy_guest, worker("d0", (D,)), prefill=1, decode=2)
    assert [each.worker_id for each in idlest(back.here(PREFILL), DECODE, 1)] == ["d1"], "who is lent comes home first"


def test_those_who_are_not_asked_for_any_more_are_on_their_way_out() -> None:
    seen, tracked = pools(*(worker(f"d{n}", (D,)) for n in range(3)), worker("p0", (P,)), prefill=1, decode=2), starts()
    seen.follow(tracked, 10.0)
    decode = seen.views(tracked, 10.0, 10.0)[1]
    assert (decode.num_ready, decode.num_draining, decode.num_replicas) == (2, 1, 2), "it must not be asked for again"
    assert seen.num_own(DECODE, decode.num_replicas) == 2


def test_roles_that_no_pool_has_count_at_home() -> None:
    seen = pools(worker("p0", (P,)), worker("d0", (P, D), home=(D,)), prefill=1, decode=1)
    assert [each.worker_id for each in seen.here(DECODE)] == ["d0"] and seen.num_lent(DECODE) == 0


@given(st.integers(0, 5), st.integers(0, 5), st.lists(st.tuples(st.sampled_from([PREFILL, DECODE]), st.booleans()), max_size=8))
def test_what_does_not_change_is_not_asked_for_anew(prefill: int, decode: int, there: list[tuple[PoolName, bool]]) -> None:
    """Whoever is lent, missing or too many: keeping a pool's replicas asks for what was asked for, but for those who leave."""
    roles = {PREFILL: (P,), DECODE: (D,)}
    told = [
        worker(f"w{number}", roles[DECODE if lent == (home is PREFILL) else PREFILL], home=roles[home])
        for number, (home, lent) in enumerate(there)
    ]
    seen, tracked = pools(*told, prefill=prefill, decode=decode), starts()
    seen.follow(tracked, 10.0)
    for view in seen.views(tracked, 10.0, 10.0):
        if not any(seen.num_leaving(name) for name in (PREFILL, DECODE)):
            assert seen.num_own(view.name, view.num_replicas) == seen.asked[view.name].replicas
