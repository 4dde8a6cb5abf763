"""Plans are as cheap as trying everything would find, equal each time, and say why where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.planner.meshes import (
    AGGREGATED,
    SEPARATED,
    Limitation,
    Point,
    Shape,
    Size,
    WorkerKind,
    measured_kinds,
    roofline_kinds,
)
from pdmesh.planner.plan import EFFORTS, Effort, NoPlan, closest, goals_of, make_plan
from pdmesh.planner.search import Judge, shapes_of
from pdmesh.planner.traffic import Traffic
from pdmesh.planner.trial import simulate
from pdmesh.planning.latency_model import NO_DRAFTS, Drafts
from pdmesh.planning.roofline import Roofline
from pdmesh.simulator.arrivals import Arrival
from tests.pdmesh.planned import H100, KIND, config, task, traffic
from tests.simulator.specs import LARGE

EXHAUSTIVE = Effort(shapes=9, splits=9, max_requests=10_000_000, around=())


@pytest.mark.parametrize(("rate", "mesh"), [("24/s", AGGREGATED), ("9/s", SEPARATED), ("20/s", SEPARATED)])
def test_a_plan_is_as_cheap_as_trying_everything(rate: str, mesh: str) -> None:
    of = config(rate=rate)
    plan = make_plan(task(of, meshes=(mesh,), effort=EXHAUSTIVE))
    shape = Shape(KIND, KIND if mesh == SEPARATED else None)
    sizes = [Size(x, y) for x in range(1, 5) for y in range(1, 5)] if mesh == SEPARATED else [Size(0, n) for n in range(1, 9)]
    keeping = [point for size in sizes if _attainment(point := Point(shape, size), of) >= 0.95]
    assert plan.chosen.point.cost == min(point.cost for point in keeping)
    assert plan.chosen.point in keeping
    assert plan.chosen.outcome.attainment == _attainment(plan.chosen.point, of)


def _attainment(point: Point, of: object) -> float:
    load, settings = traffic(of), of.mesh()  # type: ignore[arg-type, attr-defined]
    outcome = simulate(point, load.arrivals, settings)
    assert outcome is not None
    return outcome.attainment


def test_a_search_simulates_less_than_trying_everything() -> None:
    plan = make_plan(task(config(rate="24/s")))
    assert plan.num_runs < 20
    assert not plan.is_spent
    assert {tried.point.shape.mesh for tried in plan.best.values() if tried} == {AGGREGATED, SEPARATED}


def test_equal_tasks_have_equal_plans() -> None:
    first, second = (make_plan(task(config(rate="12/s"), headroom=0.2)) for _ in range(2))
    assert first.chosen == second.chosen
    assert first.seen == second.seen
    assert first.expected == second.expected


def test_headroom_is_borne() -> None:
    of = config(rate="12/s", requests=600)
    plan = make_plan(task(of, headroom=0.5, meshes=(AGGREGATED,)))
    outcome = simulate(plan.chosen.point, traffic(of).faster(1.5).arrivals, of.mesh())
    assert outcome is not None
    assert outcome == plan.chosen.outcome
    assert outcome.attainment >= 0.95
    assert plan.expected.attainment >= outcome.attainment
    assert plan.fewer is not None
    assert plan.fewer.point.cost == plan.chosen.point.cost - 1
    assert plan.fewer.outcome.attainment < 0.95


def test_more_load_never_takes_fewer() -> None:
    costs = [make_plan(task(config(rate=rate), meshes=(AGGREGATED,))).chosen.point.cost for rate in ("4/s", "9/s", "24/s")]
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]


def test_what_no_number_of_workers_keeps() -> None:
    with pytest.raises(NoPlan, match=r"no number of workers keeps TTFT 20 ms .* a prompt of \d+ tokens takes \d+ ms"):
        make_plan(task(config(ttft_ms=20)))
    with pytest.raises(NoPlan, match=r"a token behind \d+ others takes \d\.\d ms, as measured; relax an objective"):
        make_plan(task(config(tpot_ms=4)))


def test_a_budget_that_is_too_small_says_what_it_reaches() -> None:
    with pytest.raises(NoPlan, match=r"no mesh of at most 2 devices .* does for \d+\.\d+%; raise --gpus"):
        make_plan(task(config(rate="40/s"), max_cost=2))


def test_an_effort_that_is_spent_is_said() -> None:
    with pytest.raises(NoPlan, match="give a higher --effort"):
        make_plan(task(config(rate="24/s"), effort=Effort(1, 1, 0, ())))
    plan = make_plan(task(config(rate="24/s"), effort=Effort(1, 1, 301, ())))
    assert plan.is_spent


def test_a_trial_ends_when_too_many_have_missed() -> None:
    of = config(rate="40/s")
    point = Point(Shape(KIND), Size(0, 1))
    assert simulate(point, traffic(of).arrivals, of.mesh(), max_misses=15) is None
    assert simulate(point, traffic(of).arrivals, of.mesh(), max_misses=300) is not None


def test_a_judge_does_not_ask_what_follows() -> None:
    of = config(rate="24/s")
    judge = Judge(traffic(of), of.mesh(), 0.95, 1_000_000)
    assert not judge.keeps(Point(Shape(KIND), Size(0, 1)))
    assert judge.keeps(Point(Shape(KIND), Size(0, 8)))
    num_runs = judge.num_runs
    assert judge.keeps(Point(Shape(KIND), Size(0, 9)))
    assert judge.num_runs == num_runs
    other = Shape(replace(KIND, spec=replace(LARGE, max_num_seqs=32)))
    assert not judge.keeps(Point(other, Size(0, 1)))
    assert judge.num_runs == num_runs + 1


def test_shares_of_what_was_missed_add_up() -> None:
    of = config(rate="30/s", admission="off")
    outcome = simulate(Point(Shape(KIND), Size(0, 1)), traffic(of).arrivals, of.mesh())
    assert outcome is not None
    assert outcome.attainment + outcome.late + outcome.slow + outcome.refused == pytest.approx(1.0)
    assert outcome.late > 0.1
    assert outcome.local == 1.0
    assert outcome.batch > 1


def test_sizes_for_a_cost() -> None:
    wide = replace(KIND, num_devices=2)
    assert Shape(KIND).sizes(3) == [Size(0, 3)]
    assert Shape(wide).sizes(1) == []
    assert Shape(KIND, KIND).sizes(4) == [Size(1, 3), Size(2, 2), Size(3, 1)]
    assert Shape(wide, KIND).sizes(5) == [Size(1, 2), Size(3, 1)]
    assert Shape(wide, KIND).cost(Size(3, 1)) == 5
    assert len(shapes_of([KIND, wide], aggregated=True, separated=True)) == 2 + 4


def test_the_busiest_part_has_most_tokens_a_second() -> None:
    quiet = [Arrival(float(second), 10, 5) for second in range(50)]
    busy = [Arrival(50 + number / 10, 10, 5) for number in range(20)]
    later = [Arrival(60 + second, 10, 5) for second in range(50)]
    part = Traffic(tuple(quiet + busy + later)).busiest(20)
    assert part.arrivals[0].at_s == 0.0
    assert part.duration_s == pytest.approx(1.9)
    assert part.rate_per_s == pytest.approx(10)
    assert part.busiest(100) is part


def test_the_moments_of_a_load() -> None:
    load = Traffic((Arrival(0, 100, 10), Arrival(1, 300, 30), Arrival(2, 200, 20))).load
    assert load.rate_per_s == 1.0
    assert load.burstiness == 0.0
    assert (load.lengths.input_tokens, load.lengths.output_tokens) == (200, 20)
    assert load.lengths.input_squared == pytest.approx((100**2 + 300**2 + 200**2) / 3)
    with pytest.raises(ValueError, match="requests: a load needs at least two"):
        Traffic((Arrival(0, 1, 1),))


def test_prefixes_count_as_cached_once_they_were_seen() -> None:
    shared = Traffic((Arrival(0, 1200, 1, (1, 2)), Arrival(1, 1200, 1, (1, 2)), Arrival(2, 1200, 1, (1, 3))))
    assert shared.uncached == (1200, 1200 - 1024, 1200 - 512)
    assert shared.load.lengths.cached_share == pytest.approx(1536 / 3600)


def test_kinds_have_room_for_the_longest_request() -> None:
    load = traffic(config())
    goals = goals_of(400, 20, 0.95, config().mesh())
    kinds, notes = roofline_kinds(H100, Limitation(), 0.85, 8192, load, goals)
    assert notes == []
    assert {kind.num_devices for kind in kinds} == {1, 2, 4, 8}
    assert all(kind.spec.max_num_seqs < kind.spec.max_num_batched_tokens for kind in kinds)
    assert all(kind.kv_tokens >= load.longest for kind in kinds)
    two = [kind for kind in kinds if kind.num_devices == 2]
    assert two[0].spec.speed.fixed_s < kinds[0].spec.speed.fixed_s
    with pytest.raises(ValueError, match="tensor_parallel: 3 does not divide"):
        roofline_kinds(H100, Limitation((3,)), 0.85, 8192, load, goals)


def test_kinds_that_have_no_room_are_named() -> None:
    load, goals = traffic(config()), goals_of(400, 20, 0.95, config().mesh())
    huge = Roofline(H100.device, replace(H100.decoder, num_layers=352))
    kinds, notes = roofline_kinds(huge, Limitation((1, 2, 4)), 0.85, 8192, load, goals)
    assert {kind.num_devices for kind in kinds} == {4}
    assert notes[0] == "h100-sxm: weights of 156 GB leave no room for KV"
    assert notes[1].startswith("2 h100-sxm: KV for 1")
    assert notes[1].endswith(f"beside weights of 156 GB; the longest request has {load.longest}")


def test_measured_kinds_keep_their_limits() -> None:
    assert measured_kinds(LARGE, Limitation()) == [WorkerKind(LARGE)]
    tried = measured_kinds(LARGE, Limitation(max_num_seqs=(16, 32), max_num_batched_tokens=(24, 512)))
    assert [(kind.spec.max_num_seqs, kind.spec.max_num_batched_tokens) for kind in tried] == [(16, 24), (16, 512), (32, 512)]
    with pytest.raises(ValueError, match="tensor_parallel: a measured speed"):
        measured_kinds(LARGE, Limitation((2,)))
    with pytest.raises(ValueError, match="max_num_seqs: must be below"):
        measured_kinds(LARGE, Limitation((), (600,)))


def test_kinds_that_draft_have_the_batches_that_it_allows() -> None:
    drafts, of = Drafts(3.0, 3.5), config(rate="12/s")
    goals = goals_of(500, 8, 0.95, of.mesh())
    plain, drafting = (
        roofline_kinds(H100, Limitation((1,), drafts=each), 0.85, 8192, traffic(of), goals)[0] for each in (NO_DRAFTS, drafts)
    )
    assert max(kind.spec.max_num_seqs for kind in drafting) > max(kind.spec.max_num_seqs for kind in plain)
    assert {kind.spec.drafts for kind in drafting} == {kind.worker.drafts for kind in drafting} == {drafts}
    assert [kind.spec.drafts for kind in measured_kinds(LARGE, Limitation(drafts=drafts))] == [drafts]


def test_the_floor_is_a_request_alone() -> None:
    """As the simulator has it: one request on an idle worker."""
    of = config(rate="0.1/s", requests=20, scatter=0)
    floor = closest([KIND], traffic(of), of.mesh(), 0.95)
    outcome = simulate(Point(Shape(KIND), Size(0, 1)), traffic(of).arrivals, of.mesh())
    assert outcome is not None
    assert floor.attainable == 1.0
    assert floor.ttft_s == pytest.approx(outcome.ttft_p99_s, rel=0.05)
    assert floor.tpot_s == pytest.approx(outcome.tpot_p99_s, rel=0.05)


def test_a_faster_device_takes_fewer() -> None:
    """A model of 8 B on data sheets: whose memory is four times as fast, reads its weights in a quarter of the time."""
    of = config(rate="60/s", requests=300, ttft_ms=300, tpot_ms=30, input_tokens=1000, output_tokens=200)
    goals = goals_of(300, 30, 0.95, of.mesh())
    costs = []
    for bandwidth in (1.0, 0.25):
        device = replace(H100.device, bytes_per_s=H100.device.bytes_per_s * bandwidth)
        kinds, _ = roofline_kinds(replace(H100, device=device), Limitation((1,)), 0.85, 8192, traffic(of), goals)
        costs.append(make_plan(task(of, kinds, (AGGREGATED,), effort=EFFORTS["quick"])).chosen.point.cost)
    assert costs[0] < costs[1]
