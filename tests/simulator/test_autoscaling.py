"""A mesh that somebody scales: the scaler sees what workers and routers know, what it wants is done, pods take their time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from pdmesh.autoscaler.collect.traffic import USUAL_GAPS
from pdmesh.autoscaler.settings import AutoscalerSettings
from pdmesh.autoscaler.views import PoolName
from pdmesh.planning.objectives import ModelObjective
from pdmesh.simulator.arrivals import Arrival
from pdmesh.simulator.autoscaling import (
    Autoscaled,
    AutoscaledSettings,
    Moment,
    Move,
    OwnScaler,
    Seen,
    Wanted,
    goals_of,
    net_changes,
    reversals,
)
from pdmesh.simulator.autoscaling_page import Shown, page
from pdmesh.simulator.results import Results, Window
from pdmesh.simulator.routers.routing import MODEL
from pdmesh.simulator.settings import MeshSettings
from tests.simulator.specs import LARGE

PREFILL, DECODE = PoolName.PREFILL, PoolName.DECODE
OBJECTIVE = ModelObjective(MODEL, 500, 40, 0.95)
SETTINGS = AutoscaledSettings(start_s=30.0, period_s=5.0, window_s=15.0)


@dataclass
class Script:
    """Wants what stands in a table by time; remembers what it saw."""

    wanted: Mapping[float, Wanted]
    seen: list[Seen] = field(default_factory=list)

    def decide(self, seen: Seen) -> Wanted:
        self.seen.append(seen)
        return self.wanted[max(at_s for at_s in self.wanted if at_s <= seen.snapshot.now_s)]


def steady(rate: float, until_s: float, num_input: int = 200, num_output: int = 20) -> list[Arrival]:
    return [Arrival(number / rate, num_input, num_output) for number in range(int(rate * until_s))]


def scaled(scaler: object, arrivals: list[Arrival], prefill: int, decode: int) -> tuple[Autoscaled, Results]:
    results = Results(window_s=10.0)
    mesh = Autoscaled(
        MeshSettings(objective=OBJECTIVE),
        results,
        {PREFILL: LARGE, DECODE: LARGE},
        scaler,  # type: ignore[arg-type]
        SETTINGS,
    )
    mesh.start({PREFILL: prefill, DECODE: decode})
    mesh.run(arrivals)
    return mesh, results


def test_a_scaler_sees_what_came_and_who_serves() -> None:
    script = Script({0.0: Wanted({PREFILL: 2, DECODE: 2})})
    scaled(script, steady(10.0, 60.0), 2, 2)
    snapshot = script.seen[5].snapshot
    assert snapshot.now_s == 30.0
    traffic, (prefill, decode) = snapshot.traffic, snapshot.pools
    assert traffic.rate_per_s == pytest.approx(10.0, rel=0.02) and traffic.window_s == 15.0
    assert traffic.burstiness == pytest.approx(USUAL_GAPS / (150 + USUAL_GAPS)), "150 even gaps, and those believed in before"
    assert traffic.lengths is not None
    assert (traffic.lengths.input_tokens, traffic.lengths.output_tokens) == (200, 20)
    assert traffic.ttft.observed_s is not None and traffic.ttft.predicted_s is not None
    assert (prefill.num_ready, decode.num_ready, prefill.starting_ages_s) == (2, 2, ())
    assert prefill.worker is not None and prefill.worker.limits.kv_tokens == 8192 * 16
    assert 0 < script.seen[5].busy[DECODE] <= 1


def test_pods_take_their_time_and_are_paid_for_from_when_they_are_asked_for() -> None:
    script = Script({0.0: Wanted({PREFILL: 1, DECODE: 1}), 20.0: Wanted({PREFILL: 3, DECODE: 1})})
    mesh, _ = scaled(script, steady(4.0, 100.0), 1, 1)
    ready = {moment.at_s: moment.pods[PREFILL] for moment in mesh.moments}
    assert ready[20.0] == (1, 0, 0)
    assert ready[25.0] == (1, 2, 0) and ready[45.0] == (1, 2, 0)
    assert ready[55.0] == (3, 0, 0)
    assert mesh.mesh.pod_seconds()["prefill"] == pytest.approx(mesh.mesh.events.now + 2 * (mesh.mesh.events.now - 20.0))
    ages = [seen.snapshot.pools[0].starting_ages_s for seen in script.seen if seen.snapshot.now_s == 30.0]
    assert ages == [(5.0, 5.0)], "who looks every 5 s knows at 25 s of what was asked for at 20 s"


def test_who_goes_finishes_what_it_has_and_who_starts_goes_first() -> None:
    script = Script(
        {0.0: Wanted({PREFILL: 2, DECODE: 3}), 20.0: Wanted({PREFILL: 2, DECODE: 4}), 30.0: Wanted({PREFILL: 2, DECODE: 1})}
    )
    mesh, results = scaled(script, steady(8.0, 60.0, num_output=150), 2, 3)
    pods = {moment.at_s: moment.pods[DECODE] for moment in mesh.moments}
    assert pods[25.0] == (3, 1, 0)
    assert pods[35.0][:2] == (1, 0), "the one that started went, and two that served"
    assert results.total.num_completed + results.total.num_refused == results.total.num_arrived
    assert results.total.num_lost == 0


def test_workers_change_roles_and_are_known_to_be_lent() -> None:
    move = Wanted({PREFILL: 3, DECODE: 1}, (Move(DECODE, PREFILL, 1),))
    stay = Wanted({PREFILL: 3, DECODE: 1})
    script = Script({0.0: Wanted({PREFILL: 2, DECODE: 2}), 20.0: move, 25.0: stay})
    mesh, results = scaled(script, steady(4.0, 60.0), 2, 2)
    later = next(seen.snapshot.pools for seen in script.seen if seen.snapshot.now_s == 30.0)
    assert [(pool.num_ready, pool.num_borrowed, len(pool.starting_ages_s)) for pool in later] == [(3, 1, 0), (1, 0, 0)]
    moved = next(moment for moment in mesh.moments if moment.at_s == 20.0)
    assert net_changes(moved) == {PREFILL: 1, DECODE: -1}
    assert results.total.num_lost == 0


def test_reversals_are_changes_back_within_a_cool_down_flips_included() -> None:
    def moment(at_s: float, prefill: int, moves: tuple[Move, ...] = ()) -> Moment:
        return Moment(at_s, {}, 0.0, {PREFILL: prefill, DECODE: 0}, moves, {})

    assert reversals([moment(0, 1), moment(100, -1)], 100.0) == 0
    assert reversals([moment(0, 1), moment(50, 1), moment(120, -1)], 100.0) == 1
    assert reversals([moment(0, -1), moment(50, 0), moment(60, 0, (Move(DECODE, PREFILL, 1),))], 100.0) == 1


def test_the_policy_keeps_objectives_where_its_first_pools_would_not() -> None:
    """Six times as many from a minute on as the first pools can bear; the same requests on the pools as they were."""
    arrivals = [*steady(5.0, 60.0), *(arrival._replace(at_s=60.0 + arrival.at_s) for arrival in steady(120.0, 80.0))]
    own, results = scaled(OwnScaler(AutoscalerSettings(), goals_of(OBJECTIVE)), arrivals, 1, 1)
    _, still = scaled(Script({0.0: Wanted({PREFILL: 1, DECODE: 1})}), arrivals, 1, 1)
    late, late_still = results.windows[11:], still.windows[11:]
    assert _kept(late) > 0.8 and _kept(late) > _kept(late_still) + 0.2
    assert max(sum(moment.pods[PREFILL]) for moment in own.moments) > 1
    reasons = [moment.reasons[PREFILL] for moment in own.moments if moment.changes[PREFILL] > 0]
    # What the arithmetic asks for, or one more where requests wait all the same.
    assert reasons and all("TTFT" in reason or "wait for" in reason for reason in reasons)


def _kept(windows: list[Window]) -> float:
    return sum(window.num_met for window in windows) / sum(window.num_arrived for window in windows)


def test_equal_runs_are_equal() -> None:
    arrivals = steady(20.0, 60.0)
    runs = [scaled(OwnScaler(AutoscalerSettings(), goals_of(OBJECTIVE)), arrivals, 1, 1)[0] for _ in range(2)]
    assert runs[0].moments == runs[1].moments and runs[0].moments


def test_a_page_shows_pools_and_reasons() -> None:
    mesh, results = scaled(OwnScaler(AutoscalerSettings(), goals_of(OBJECTIVE)), steady(60.0, 60.0), 1, 1)
    text = page("title <b>", [Shown("a run", {"kept": "97 %"}, mesh.moments, results.windows, 10.0)])
    assert "title &lt;b&gt;" in text and "prefill pods" in text and "decode pods" in text
    assert "TTFT 500 ms" in text and "src=" not in text and "href=" not in text


def test_settings_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="period_s"):
        AutoscaledSettings(period_s=0)
    with pytest.raises(ValueError, match="window_s"):
        AutoscaledSettings(period_s=20.0, window_s=15.0)
