"""What is predicted of a worker that guesses tokens: longer steps, several tokens from each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.planning.latency_model import MAX_PER_ROW, LatencyModel
from pdmesh.v1 import worker_pb2
from router.routing.cost_model import Goals, Overhead, WorkerEstimate, local, remote
from router.routing.cost_policy import PredictPolicy
from router.routing.filters import Placement, RoutingRequest
from router.routing.fleet_snapshot import FleetSnapshot
from router.routing.learned import Overheads
from router.routing.prediction_parts import local_prediction, output_part, prompt_part, remote_prediction
from router.routing.worker_reports import Described, snapshot_of
from router.routing.worker_snapshot import WorkerSnapshot
from tests.router.fleets import BASE, running

SPEED = LatencyModel(0.008, 0.001, 0.0, 0.002, 1e-6, num_steps=1000)
OVER = Overhead(0.0, 0.0)
DESCRIBED = Described(
    "pd9", "pd9", 1, "m", BASE.identity, BASE.layout, BASE.transports, "here", 8192, 64, 1000, max_num_batched_tokens=512
)


def guessing(rows: int, tokens: float, computed: float, pace_s: float = 0.0) -> WorkerEstimate:
    view = running("pd0", rows, tokens_per_row=tokens, computed_per_row=computed, max_num_batched_tokens=512, pace_s=pace_s)
    return WorkerEstimate(view, SPEED)


def tpot_s(engine: WorkerEstimate, expected: float = 100.0) -> float:
    prompt, output = engine.prompt_side(400, 0, 0.0), engine.output_side(400, 0, 1, expected, 0.0)
    return local(prompt, output, OVER, expected, Goals()).tpot_s


def test_a_token_takes_a_step_divided_by_what_the_step_gives() -> None:
    """Two rows that decode and a third one: 4 tokens are computed for each, 2.5 come out."""
    step_s = 0.008 + 3 * 4 * 0.002 + (2 * 300 + 450) * 1e-6
    assert tpot_s(guessing(2, 2.5, 4.0)) == pytest.approx(step_s / 2.5)
    assert tpot_s(guessing(2, 1.0, 1.0)) == pytest.approx(0.008 + 3 * 0.002 + 1050e-6)


def test_who_guesses_nothing_is_predicted_as_ever() -> None:
    plain, told = (
        WorkerEstimate(running("pd0", 3), SPEED),
        WorkerEstimate(running("pd0", 3, tokens_per_row=1.0, computed_per_row=1.0), SPEED),
    )
    for engine in (plain, told):
        assert engine.output_side(400, 7, 2, 50.0, 0.1) == plain.output_side(400, 7, 2, 50.0, 0.1)
        assert engine.prompt_side(400, 7, 0.1) == plain.prompt_side(400, 7, 0.1)


def test_a_prompt_waits_for_the_longer_steps_and_finds_less_room_in_them() -> None:
    plain, drafting = guessing(20, 1.0, 1.0), guessing(20, 2.0, 3.0)
    assert (plain.chunk, drafting.chunk) == (512 - 20, 512 - 60)
    step_s = 0.008 + 60 * 0.002 + 6000 * 1e-6
    assert drafting.prompt_side(400, 0, 0.0).compute_s == pytest.approx(step_s / 2 + 0.4 + step_s)


def test_an_output_takes_as_many_steps_as_it_needs() -> None:
    """Others lose the time of its rows for fewer steps."""
    expected, drafting = 100.0, guessing(4, 2.5, 4.0)
    output = drafting.output_side(400, 0, 1, expected, 0.0)
    own_s = 4 * 0.002 + 450e-6
    lost_s = local(drafting.prompt_side(400, 399, 0.0), output, OVER, expected, Goals()).delay_s - 4 * 0.001
    assert lost_s == pytest.approx(4 * (expected / 2.5) * own_s)


def test_a_pace_is_kept_by_steps_that_last_longer() -> None:
    """Steps of 11 ms without prompts that give 2 tokens, a token wanted every 11 ms: half of the time is for prompts."""
    row_s = 0.002 * 1.5
    view = replace(
        running("pd0", 1, context=0, max_num_batched_tokens=512), pace_s=0.011, tokens_per_row=2.0, computed_per_row=1.5
    )
    engine = WorkerEstimate(view, SPEED)
    assert engine.step_s == pytest.approx(0.008 + row_s)
    assert engine.share == pytest.approx(0.5)
    assert WorkerEstimate(replace(view, tokens_per_row=1.0), SPEED).share > 0.7


def test_what_sequences_that_draft_are_behind_holds_no_prompt_back() -> None:
    """Every second step has prompts all the same; what they are ahead prompts get as ever."""
    view = replace(running("pd0", 1, max_num_batched_tokens=512), pace_s=0.011, tokens_per_row=2.0, computed_per_row=1.5)

    def compute_s(**fields: float) -> float:
        return WorkerEstimate(replace(view, **fields), SPEED).prompt_side(400, 0, view.figures_at).compute_s  # type: ignore[arg-type]

    assert compute_s(slack_s=-0.2) == compute_s() > compute_s(slack_s=0.2)
    one_token: dict[str, float] = {"pace_s": 0.022, "tokens_per_row": 1.0}
    assert compute_s(slack_s=-0.2, **one_token) > compute_s(**one_token)


def test_both_ways_to_predict_agree_bit_for_bit() -> None:
    prefill, decode = guessing(5, 1.7, 2.9), guessing(9, 3.1, 5.3, pace_s=0.03)
    prompt, output = prefill.prompt_side(900, 100, 0.3), decode.output_side(900, 200, 1, 80.0, 0.3)
    for goals in (Goals(), Goals(0.5, 0.01, 0.008)):
        parts = prompt_part(prompt, 80.0, goals), output_part(output, 80.0, goals)
        assert remote_prediction(*parts, OVER, 79.0, goals) == remote(prompt, output, OVER, 80.0, goals)
        assert local_prediction(*parts, OVER, 79.0, goals) == local(prompt, output, OVER, 80.0, goals)


def test_the_one_that_guesses_well_is_preferred_and_meets_what_the_other_cannot() -> None:
    slow, fast = (running(name, 2, latency=SPEED) for name in ("pd0", "pd1"))
    fast = replace(fast, tokens_per_row=2.5, computed_per_row=3.0)
    routing_request = RoutingRequest("m", 400, max_total_tokens=500, tpot_goal_s=0.012)
    placed = PredictPolicy(Overheads()).choose(FleetSnapshot([slow, fast]), routing_request, 0.0)
    assert isinstance(placed, Placement) and placed.decode is fast
    assert placed.chosen is not None and placed.chosen.prediction is not None
    assert placed.chosen.prediction.tpot_s < 0.012 < tpot_s(WorkerEstimate(slow, SPEED))


def test_an_idle_worker_gives_a_token_as_fast_as_it_guesses() -> None:
    view = running("d0", 7, latency=SPEED, tokens_per_row=2.0, computed_per_row=3.0)
    assert view.idle_tpot_s(2, 800) == pytest.approx((0.008 + 2 * 3 * 0.002 + 800e-6) / 2)
    assert running("d0", 7, latency=None).idle_tpot_s(1, 800) is None


@pytest.mark.parametrize(
    ("tokens", "computed", "believed"),
    [
        (2.5, 4.0, (2.5, 4.0)),
        (1.0, 6.0, (1.0, 6.0)),
        (0.0, 0.0, (1.0, 1.0)),
        (0.5, 4.0, (1.0, 1.0)),
        (float("nan"), 4.0, (1.0, 1.0)),
        (2.0, float("inf"), (1.0, 1.0)),
        (2 * MAX_PER_ROW, 2 * MAX_PER_ROW, (1.0, 1.0)),
    ],
)
def test_what_a_worker_says_of_its_guesses(tokens: float, computed: float, believed: tuple[float, float]) -> None:
    said = worker_pb2.LoadReport(
        num_decoding=3, speculation=worker_pb2.SpeculationReport(tokens_per_row=tokens, computed_per_row=computed)
    )
    assert _per_row(snapshot_of(DESCRIBED, said, decode=True)) == believed
    assert _per_row(snapshot_of(DESCRIBED, worker_pb2.LoadReport(num_decoding=3), decode=True)) == (1.0, 1.0)


def _per_row(view: WorkerSnapshot) -> tuple[float, float]:
    return view.tokens_per_row, view.computed_per_row
