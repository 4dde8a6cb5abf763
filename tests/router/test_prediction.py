"""What is predicted of a worker whose sequences were promised a pace, and what is learned from what came."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from pdmesh.planning.latency_model import LatencyModel
from pdmesh.step_sharing import BEHIND_TARGET, MAX_SHARE, PACE_TARGET
from pdmesh.v1 import worker_pb2
from router.flow_control.slo_admission import HALF_LIFE_S, MAX_MARGIN, MIN_MARGIN, STEP, PredictorAccuracy
from router.routing.cost_model import (
    LARGEST_SHARE,
    SPARED,
    Goals,
    OutputSide,
    Overhead,
    Prediction,
    PromptSide,
    WorkerEstimate,
    local,
    remote,
)
from router.routing.cost_policy import PredictPolicy
from router.routing.filters import Placement, RoutingRequest
from router.routing.fleet_snapshot import FleetSnapshot
from router.routing.learned import FADE_S, FRESH_S, MAX_STRETCH, Overheads
from router.routing.prediction_parts import local_prediction, output_part, prompt_part, remote_prediction
from router.routing.worker_reports import Described, snapshot_of
from router.routing.worker_snapshot import WorkerSnapshot
from tests.router.fleets import BASE, running, worker

DESCRIBED = Described(
    "pd9", "pd9", 1, "m", BASE.identity, BASE.layout, BASE.transports, "here", 8192, 64, 1000, max_num_batched_tokens=512
)
SPEED = LatencyModel(0.008, 0.001, 0.0, 0.002, 0.0, num_steps=1000)
ROWS, PACE_S = 1, 0.02


def engine(view: WorkerSnapshot) -> WorkerEstimate:
    return WorkerEstimate(view, SPEED)


def prefill_s(view: WorkerSnapshot, num_tokens: int = 400) -> float:
    return engine(view).prompt_side(num_tokens, 0, view.figures_at).compute_s


def paced(**fields: object) -> WorkerSnapshot:
    return replace(running("pd0", ROWS, max_num_batched_tokens=512), pace_s=PACE_S, **fields)  # type: ignore[arg-type]


def test_a_prompt_takes_what_the_pace_leaves() -> None:
    """Steps of 10 ms without prompts, a pace of 20 ms: half of the time is left for 0.4 s of work."""
    free = running("pd0", ROWS, max_num_batched_tokens=512)
    assert prefill_s(free) == pytest.approx(0.005 + 0.4 + 0.010)
    assert prefill_s(paced()) == pytest.approx(0.005 + 0.8)
    assert prefill_s(paced(slack_s=0.2)) == pytest.approx(0.005 + 0.6)
    assert prefill_s(paced(slack_s=9.0)) == prefill_s(free)  # no faster than full steps
    assert prefill_s(paced(slack_s=-0.2)) == pytest.approx(0.005 + 1.0)
    assert prefill_s(paced(slack_s=-5.0)) == pytest.approx(0.005 + 0.4 / (1 - MAX_SHARE))  # prompts get that much in any case


def test_what_was_sent_since_the_report_is_computed_meanwhile() -> None:
    """400 tokens that came 0.1 s after the report, 0.408 s of work: at once on an idle worker, else behind what it had."""
    idle = replace(BASE, max_num_batched_tokens=512, figures_at=10.0, dispatched_tokens=400, dispatched_seqs=1)
    alone_s = 0.4 + 0.008 * 400 / 512
    assert engine(idle).ahead_s(10.3) == pytest.approx(alone_s), "when it came is not known"
    sent = replace(idle, dispatched_since=10.1)
    assert [engine(sent).ahead_s(now) for now in (10.1, 10.3, 99.0)] == pytest.approx([alone_s, alone_s - 0.2, 0.0])
    busy = replace(sent, num_waiting_tokens=200, num_prefilling=1)
    before_s = 0.2 + 0.008 * 200 / 512
    assert engine(busy).ahead_s(10.1) == pytest.approx(before_s - 0.1 + alone_s)
    assert engine(busy).ahead_s(10.0 + before_s + 0.2) == pytest.approx(alone_s - 0.2)


def test_prompts_before_it_take_the_slack_and_decode_beside_it() -> None:
    queued = paced(slack_s=0.4, num_waiting_tokens=400, num_prefilling=1, num_starting=1)
    side = engine(queued).prompt_side(400, 0, queued.figures_at)
    assert side.ahead_s == pytest.approx(0.005 + 0.8)
    assert side.compute_s - side.ahead_s == pytest.approx(0.4 / (1 - 0.012 / PACE_S))
    assert side.is_paced


def test_a_pace_that_steps_alone_exceed_leaves_a_little() -> None:
    tight = replace(paced(), pace_s=0.001)
    assert prefill_s(tight) == pytest.approx(0.005 + 0.4 / (1 - MAX_SHARE))


def test_steps_that_nearly_fill_the_objective_leave_what_it_leaves() -> None:
    """Steps of 10 ms, 95 % of an objective 12.5 ms: a fifth of the time for 0.4 s of work, as the engine sizes them."""
    assert prefill_s(replace(paced(), pace_s=0.0125 * PACE_TARGET / BEHIND_TARGET)) == pytest.approx(0.005 + 2.0)
    assert prefill_s(replace(paced(), pace_s=0.01001 * PACE_TARGET)) == pytest.approx(0.005 + 0.4 / (1 - LARGEST_SHARE))


def test_who_keeps_a_pace_loses_what_it_can_spare() -> None:
    over, goals = Overhead(0.0, 0.0), Goals(1.0, 0.05, 0.05)

    def lost_s(view: WorkerSnapshot) -> float:
        at = engine(view)
        prompt, output = at.prompt_side(400, 0, 0.0), at.output_side(400, 0, 1, 64.0, 0.0)
        predicted = local(prompt, output, over, 64.0, goals)
        assert predicted.spares is (view.pace_s > 0)
        return predicted.delay_s

    free = running("pd0", ROWS, max_num_batched_tokens=512)
    assert lost_s(paced()) == pytest.approx(SPARED * lost_s(free))


@pytest.mark.parametrize(("goal_s", "tpot_s"), [(None, 0.024), (0.1, 0.024), (0.02, PACE_TARGET * 0.02), (0.001, 0.012)])
def test_a_tpot_is_stretched_as_far_as_its_objective_allows(goal_s: float | None, tpot_s: float) -> None:
    at = engine(running("pd0", ROWS))
    prompt, output = at.prompt_side(400, 0, 0.0), at.output_side(400, 0, 1, 64.0, 0.0)
    predicted = local(prompt, output, Overhead(0.0, 0.0, stretch=2.0), 64.0, Goals(None, goal_s, None))
    assert predicted.steps_tpot_s == pytest.approx(0.012)
    assert predicted.tpot_s == pytest.approx(tpot_s)


def test_without_a_pace_a_tpot_is_what_shared_steps_make_of_it() -> None:
    """The engine holds no prompt back: 24 ms where prompts double the steps, whatever the objective, and that may miss it."""
    over, goals = Overhead(0.0, 0.0, stretch=2.0), Goals(None, 0.02, None)
    for predict in (local, remote):
        kept, free = (_predicted(predict, over, goals, keeps_pace=keeps_pace) for keeps_pace in (True, False))
        assert [kept.tpot_s, free.tpot_s] == pytest.approx([PACE_TARGET * 0.02, 0.024])
        assert [kept.misses, free.misses] == pytest.approx([0.0, 1.0])


def _predicted(
    predict: Callable[[PromptSide, OutputSide, Overhead, float, Goals], Prediction],
    over: Overhead,
    goals: Goals,
    *,
    keeps_pace: bool,
) -> Prediction:
    at = engine(running("pd0", ROWS, keeps_pace=keeps_pace))
    return predict(at.prompt_side(400, 0, 0.0), at.output_side(400, 0, 1, 64.0, 0.0), over, 64.0, goals)


def test_the_stretch_differs_by_the_load_at_placement() -> None:
    """Beside few sequences more come than end while a request runs; a load that was not seen yet has the stretch of all."""
    overheads, idle, full = Overheads(), worker("d0"), worker("d0", num_decoding=9)
    for _ in range(60):
        overheads.observe_tpot(idle, 0.010, 0.016)
        overheads.observe_tpot(full, 0.020, 0.018)
    assert overheads.between(None, idle).stretch == pytest.approx(1.6, abs=0.04)
    assert overheads.between(None, full).stretch == pytest.approx(0.9, abs=0.04)
    assert overheads.between(worker("p0"), full).stretch == overheads.between(None, full).stretch
    between = overheads.between(None, worker("d0", num_decoding=4)).stretch
    assert 0.9 < between < 1.6
    starting = worker("d0", num_decoding=4, num_starting=2, dispatched_decodes=3)
    assert overheads.between(None, starting).stretch == overheads.between(None, full).stretch


def test_a_few_requests_are_enough_to_know_a_machine_and_one_is_not() -> None:
    overheads, here = Overheads(), worker("d0")
    overheads.observe_tpot(here, 0.010, 9.0)
    assert overheads.between(None, here).stretch == pytest.approx(1.5), "one that a long prompt slowed says little"
    for _ in range(4):
        overheads.observe_tpot(here, 0.010, 0.02)
    assert overheads.between(None, here).stretch == pytest.approx(2.0), "seen in four of five"
    full = worker("d0", num_decoding=9)
    overheads.observe_tpot(full, 0.010, 0.02)
    assert overheads.between(None, full).stretch == pytest.approx(2.0), "another load begins with what is known of all"


def test_the_stretch_follows_the_middle_by_host() -> None:
    overheads, here, there = Overheads(), worker("d0"), worker("d1", host_id="there")
    assert overheads.between(None, here).stretch == 1.0
    for _ in range(50):
        overheads.observe_tpot(here, 0.010, 0.015)
    assert overheads.between(None, here).stretch == pytest.approx(1.5, rel=0.02)
    assert overheads.between(worker("p0"), here).stretch == overheads.between(None, here).stretch
    assert overheads.between(None, there).stretch == 1.0
    overheads.observe_tpot(here, 0.0, 0.015)  # says nothing
    for number in range(200):
        overheads.observe_tpot(here, 0.010, 0.5 if number % 5 == 0 else 0.012)
    assert overheads.between(None, here).stretch == pytest.approx(1.2, abs=0.06)
    for _ in range(200):
        overheads.observe_tpot(here, 0.010, 99.0)
    assert overheads.between(None, here).stretch <= MAX_STRETCH


def test_trust_covers_all_but_a_few() -> None:
    accuracy = PredictorAccuracy()
    exceeded = 0
    for number in range(4000):
        now, ratio = number / 10, 0.8 + 0.6 * (number * 37 % 100) / 100  # even, up to 1.4
        if number >= 1000:
            exceeded += ratio > accuracy.margin(now)
        accuracy.observe(1.0, ratio, 1.5, now)
    assert exceeded / 3000 < 0.07  # it fades as well


def test_trust_is_bounded_fades_and_looks_only_at_close_calls() -> None:
    accuracy = PredictorAccuracy()
    for now in range(100):
        accuracy.observe(0.1, 5.0, 10.0, float(now))  # far from its objective
    assert accuracy.margin(100.0) == MIN_MARGIN
    for now in range(100, 200):
        accuracy.observe(1.0, 50.0, 1.0, float(now))
    assert accuracy.margin(199.0) == MAX_MARGIN
    assert accuracy.margin(199.0 + 10 * HALF_LIFE_S) == pytest.approx(MIN_MARGIN, abs=0.01)
    for _ in range(1000):
        accuracy.observe(1.0, 0.5, 1.0, 199.0)
    assert accuracy.margin(199.0) == MIN_MARGIN


def test_a_stall_is_one_thing_to_learn_from() -> None:
    accuracy = PredictorAccuracy()
    for number in range(20):
        accuracy.observe(1.0, 3.0, 1.0, 100.0 + number / 1000)
    assert accuracy.margin(100.0) < MIN_MARGIN + 2 * STEP


@pytest.mark.parametrize(("slack_s", "fixed_s"), [(-1e308, 0.008), (float("nan"), 0.008), (0.0, 1e308), (0.0, float("inf"))])
def test_absurd_numbers_of_one_worker_harm_nobody(slack_s: float, fixed_s: float) -> None:
    said = worker_pb2.LoadReport(
        worker_id="pd9",
        epoch=1,
        roles=[worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE],
        num_free_blocks=1000,
        num_decoding=100,
        num_waiting_tokens=4000,
        pace_s=0.02,
        slack_s=slack_s,
        latency_model=worker_pb2.LatencyModel(fixed_s=fixed_s, per_prefill_token_s=0.001, per_sequence_s=0.002, num_steps=999),
    )
    absurd = snapshot_of(DESCRIBED, said, decode=True, reported_at=1.0)
    fleet_snapshot = FleetSnapshot([absurd, *(running(f"pd{number}", number, latency=SPEED) for number in range(3))])
    routing_request = RoutingRequest("m", 400, max_total_tokens=500)
    placed = PredictPolicy(Overheads()).choose(fleet_snapshot, routing_request, 1.0)
    assert isinstance(placed, Placement)
    for pool in fleet_snapshot.pools("m"):
        rankings = (pool.decode_ranking, pool.aggregated_ranking, pool.prefill_ranking)
        assert all(sorted(ranking.names) == sorted(pool.estimates) for ranking in rankings)


def test_ttft_is_stretched_by_what_was_seen_of_the_pair_at_that_load() -> None:
    """Apart for LOCAL and REMOTE, by the load of the worker that computes; the prediction without it is told, too."""
    overheads, idle, busy, prefill = Overheads(), worker("d0"), running("d0", 8), running("pd1", 4)
    for _ in range(40):
        overheads.observe_ttft(None, busy, 0.2, 0.3)
        overheads.observe_ttft(None, idle, 0.2, 0.2)
        overheads.observe_ttft(prefill, idle, 0.2, 0.4)
    assert overheads.between(None, busy).ttft_stretch == pytest.approx(1.5, abs=0.05)
    assert overheads.between(None, idle).ttft_stretch == pytest.approx(1.0, abs=0.05)
    assert overheads.between(prefill, busy).ttft_stretch == pytest.approx(2.0, abs=0.05)
    assert overheads.between(None, busy).stretch == 1.0
    overheads.observe_ttft(None, busy, 0.0, 0.3)  # says nothing
    overheads.observe_ttft(worker("p0"), busy, 0.2, 0.4)  # no sequence comes there later
    assert overheads.between(worker("p0"), busy).ttft_stretch == 1.0
    prompt, output = engine(busy).prompt_side(400, 0, 0.0), engine(busy).output_side(400, 0, 1, 64.0, 0.0)
    predicted = local(prompt, output, overheads.between(None, busy), 64.0, Goals())
    assert predicted.ttft_s == pytest.approx(predicted.plain_ttft_s * overheads.between(None, busy).ttft_stretch)
    assert predicted.plain_ttft_s == pytest.approx(prompt.compute_s + overheads.between(None, busy).before_s)


def test_what_other_prompts_take_is_stretched_as_ttft_is() -> None:
    """Else a prompt that waits for others would seem to take as long without them."""
    busy = engine(running("d0", 3, num_waiting_tokens=2000, num_prefilling=2))
    sides = busy.prompt_side(100, 0, 0.0), busy.output_side(100, 0, 1, 64.0, 0.0)
    plain, stretched = (local(*sides, Overhead(0.0, 0.0, ttft_stretch=by), 64.0, Goals()) for by in (1.0, 1.5))
    assert stretched.ttft_s - stretched.ahead_s == pytest.approx(1.5 * (plain.ttft_s - plain.ahead_s))
    assert stretched.plain_ttft_s == plain.plain_ttft_s == plain.ttft_s


def test_a_stretch_that_keeps_requests_away_fades() -> None:
    overheads, decode, prefill = Overheads(), running("d0", 4), running("pd1", 4)
    for second in range(200):
        overheads.observe_ttft(prefill, decode, 0.2, 0.8, float(second))
        overheads.observe_tpot(decode, 0.01, 0.02, float(second))
    latest = overheads.between(prefill, decode, 199.0)
    assert (latest.ttft_stretch, latest.stretch) == pytest.approx((4.0, 2.0), abs=0.1)
    assert overheads.between(prefill, decode, 199.0 + FRESH_S) == latest
    faded = overheads.between(prefill, decode, 199.0 + FRESH_S + FADE_S)
    assert (faded.ttft_stretch, faded.stretch) == pytest.approx((2.5, 1.5), abs=0.1)
    overheads.observe_ttft(prefill, decode, 0.2, 0.2, 199.0 + FRESH_S + FADE_S)
    assert overheads.between(prefill, decode, 199.0 + FRESH_S + FADE_S).ttft_stretch < 2.5, "it goes on from there"


def test_pairs_are_predicted_bit_for_bit_as_one_by_one() -> None:
    """What is computed once for each side changes no bit of what is compared."""
    draw = random.Random(7)
    for _ in range(300):
        rows = draw.randrange(30)
        pace_s = draw.choice([0.0, 0.02, 0.1])
        prefill = engine(running("p0", rows, num_waiting_tokens=draw.randrange(3000), num_prefilling=2, pace_s=pace_s))
        waiting, keeps_pace = draw.randrange(900), draw.random() < 0.7
        rows = draw.randrange(30)
        decode = engine(running("d0", rows, num_waiting_tokens=waiting, num_prefilling=1, pace_s=pace_s, keeps_pace=keeps_pace))
        goals = Goals(draw.choice([None, 0.5]), draw.choice([None, 0.03]), draw.choice([None, 0.03]))
        expected, over = (
            draw.uniform(1.0, 300.0),
            Overhead(*(draw.uniform(0.0, 0.02) for _ in range(2)), *(draw.uniform(0.8, 2.0) for _ in range(2))),
        )
        prompt = prefill.prompt_side(900, draw.randrange(900), 0.3)
        output = decode.output_side(900, draw.randrange(900), 1, expected, 0.3)
        parts = prompt_part(prompt, expected, goals), output_part(output, expected, goals)
        assert remote_prediction(*parts, over, max(1.0, expected - 1), goals) == remote(prompt, output, over, expected, goals)
        assert local_prediction(*parts, over, max(1.0, expected - 1), goals) == local(prompt, output, over, expected, goals)


def test_what_is_remembered_of_overheads_is_what_was_observed() -> None:
    """Asked before and after each observation, of many hosts: as one that was never asked before."""
    draw, views = random.Random(1), [worker(f"d{number}", host_id=f"h{number}") for number in range(5)]
    asked, steps = Overheads(), list[tuple[WorkerSnapshot | None, WorkerSnapshot, float]]()
    for _ in range(200):
        steps.append((draw.choice([None, *views]), draw.choice(views), draw.random() / 20))
        _observe(asked, *steps[-1])
        fresh = Overheads()
        for step in steps:
            _observe(fresh, *step)
        for prefill in (None, *views):
            assert [asked.between(prefill, decode) for decode in views] == [fresh.between(prefill, decode) for decode in views]


def _observe(overheads: Overheads, prefill: WorkerSnapshot | None, decode: WorkerSnapshot, seconds: float) -> None:
    if seconds < 0.02:
        overheads.observe_tpot(decode, 0.01, seconds)
    elif seconds < 0.03:
        overheads.observe_ttft(prefill, decode, 0.01, seconds)
    else:
        overheads.observe(prefill, decode, Overhead(seconds, seconds / 2))
