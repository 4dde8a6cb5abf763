"""The loads and the oracle that autoscalers are compared with: warped as they say, searched as it says."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.autoscale import oracle
from benchmarks.autoscale.runs import fixed, play
from benchmarks.autoscale.scenario import SCENARIOS, Options, Scenario, quick, surge
from benchmarks.autoscale.simulated import kept_runs
from pdmesh.autoscaler.collect.traffic import Counts
from pdmesh.autoscaler.views import PoolName, PoolView, Snapshot, Traffic
from pdmesh.simulator.autoscaling import Seen, Wanted

PREFILL, DECODE = PoolName.PREFILL, PoolName.DECODE


def test_a_surge_rises_within_a_minute_and_falls() -> None:
    warp = surge(100.0, 300.0, 3.0)
    times = [warp(number / 100) for number in range(200_000)]
    assert all(earlier < later for earlier, later in pairwise(times))

    def rate(from_s: float, to_s: float) -> float:
        return sum(from_s <= at_s < to_s for at_s in times) / (to_s - from_s) / 100

    assert rate(0, 100) == pytest.approx(1.0, rel=0.01)
    assert rate(100, 160) == pytest.approx(2.0, rel=0.01)
    assert rate(160, 460) == pytest.approx(3.0, rel=0.01)
    assert rate(460, 520) == pytest.approx(2.0, rel=0.01)
    assert rate(520, 700) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_without_traces_lengths_are_generated_and_said_to_be(scenario: Scenario, capsys: pytest.CaptureFixture[str]) -> None:
    arrivals = quick(scenario).arrivals(None)
    before_burst = sum(arrival.at_s < 150.0 for arrival in arrivals) / 150.0
    by_day = scenario.num_copies * scenario.rate_per_s * (1 + 0.5 * 2 / math.pi)  # the mean of the swing's first half
    assert before_burst == pytest.approx(by_day, rel=0.15)
    assert 295.0 < arrivals[-1].at_s < 300.0
    said = capsys.readouterr().err
    assert f"{scenario.name}: no " in said and "github.com" in said
    assert all(earlier.at_s <= later.at_s for earlier, later in pairwise(arrivals))
    assert max(arrival.num_input + arrival.num_output for arrival in arrivals) <= scenario.spec.largest


def test_a_trace_of_the_folder_is_used(tmp_path: Path) -> None:
    rows = "".join(f"2023-11-16 18:15:{number:02d}.0000000,{100 + number},20\n" for number in range(50))
    (tmp_path / "AzureLLMInferenceTrace_conv.csv").write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    arrivals = quick(SCENARIOS[0]).arrivals(tmp_path)
    assert {arrival.num_input for arrival in arrivals} == set(range(100, 150))


def test_a_valley_of_a_minute_saves_nothing() -> None:
    valley = {PREFILL: [3, 1, 3, 2, 2], DECODE: [1, 1, 1, 1, 1]}
    assert oracle.filled(valley[PREFILL]) == [3, 3, 3, 2, 2]
    assert oracle.cost(valley) == oracle.cost({**valley, PREFILL: oracle.filled(valley[PREFILL])}) == 60 * (3 + 3 + 3 + 2 + 2 + 5)


def test_a_schedule_asks_a_start_ahead() -> None:
    scheduled = oracle.Scheduled({PREFILL: [1, 1, 4, 2], DECODE: [1, 1, 1, 1]})
    wanted = [scheduled.decide(_seen(at_s)).replicas[PREFILL] for at_s in (0.0, 55.0, 60.0, 120.0, 175.0, 180.0, 1e6)]
    assert wanted == [1, 1, 4, 4, 4, 2, 2]


def test_the_search_finds_what_a_simple_world_needs() -> None:
    """Each minute needs so many; what is missing is lost. The least is known: just that, with starts."""
    needed = {PREFILL: [2] * 8 + [5] * 8 + [2] * 8, DECODE: [3] * 24}

    def evaluate(schedule: oracle.Schedule) -> oracle.Judged:
        short = [sum(max(0, needed[pool][minute] - schedule[pool][minute]) for pool in needed) for minute in range(24)]
        return oracle.Judged(1 - sum(short) / 200, oracle.cost(schedule), short)

    loads = {pool: [float(num) for num in row] for pool, row in needed.items()}
    known = {pool: [6] * 24 for pool in needed}
    found = oracle.search(loads, known, evaluate, 1.0)
    assert found.outcome.attainment == 1.0
    assert found.outcome.pod_seconds <= 1.25 * oracle.cost(needed)
    assert found.num_runs < 40


def test_what_the_shape_of_the_demand_does_not_tell_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes that need more than the trace's demand shows: workers added there cost less than a larger multiple of all."""
    draw = random.Random(4)
    shown = [10 + round(4 * math.sin(minute / 10)) for minute in range(60)]
    needed = {
        PREFILL: [num + draw.choice((0, 0, 0, 0, 1, 2, 4, 6)) for num in shown],
        DECODE: [num // 2 + draw.choice((0, 0, 1, 3)) for num in shown],
    }

    def evaluate(schedule: oracle.Schedule) -> oracle.Judged:
        short = [sum(max(0, needed[pool][minute] - schedule[pool][minute]) for pool in needed) for minute in range(60)]
        return oracle.Judged(1 - sum(short) / sum(map(sum, needed.values())), oracle.cost(schedule), short)

    def found_s() -> float:
        found = oracle.search(loads, known, evaluate, 0.985)
        assert found.outcome.attainment >= 0.985
        return found.outcome.pod_seconds

    loads = {PREFILL: [float(num) for num in shown], DECODE: [num / 2 for num in shown]}
    known = {pool: [max(row)] * 60 for pool, row in needed.items()}
    filled_s = found_s()
    monkeypatch.setattr(oracle, "_fill", lambda *arguments: None)
    assert filled_s < 0.95 * found_s()


def test_runs_are_kept_for_one_load_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without the traces has the same names for its schedules."""
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path))
    scenario = quick(SCENARIOS[0])
    arrivals = scenario.arrivals(None)[:100]
    kept_runs(Options(quick=True), scenario, arrivals).put("schedule", [1.0, 2.0, [3]])
    assert kept_runs(Options(quick=True), scenario, list(arrivals)).get("schedule") == [1.0, 2.0, [3]]
    for other in (
        kept_runs(Options(quick=True), scenario, arrivals[:99]),
        kept_runs(Options(quick=True), SCENARIOS[0], arrivals),
    ):
        assert other.get("schedule") is None


def test_the_oracle_serves_a_load_with_fewer_pods_than_always_having_the_most() -> None:
    scenario = quick(SCENARIOS[0])
    arrivals = scenario.arrivals(None)[:600]
    most = {PREFILL: [16] * 3, DECODE: [8] * 3}
    outcome = play(scenario, arrivals, oracle.Scheduled(most), {PREFILL: 16, DECODE: 8})
    assert outcome.attainment > 0.95 and outcome.pod_seconds == pytest.approx(24 * outcome.ended_s)
    assert sum(outcome.misses) == round((1 - outcome.attainment) * 600)


def _seen(at_s: float) -> Seen:
    snapshot = Snapshot(at_s, Traffic(0.0, None), (PoolView(PREFILL, 1), PoolView(DECODE, 1)))
    return Seen(snapshot, Counts(), {}, {})


def test_scalers_are_asked_by_their_own_clock() -> None:
    scaler = fixed({PREFILL: 3, DECODE: 2})
    assert scaler.decide(_seen(5.0)) == scaler.decide(_seen(500.0)) == Wanted({PREFILL: 3, DECODE: 2})
