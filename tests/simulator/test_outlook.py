"""What a simulated router knows: the same counting as the real one's, and the same constants as the engine's."""

from dataclasses import replace

import pytest

from pdmesh.engine.scheduler import scheduler
from pdmesh.simulator.arrivals import Arrival
from pdmesh.simulator.request import Request
from pdmesh.simulator.routers.routing import Ledger, SimulatedRouting
from pdmesh.simulator.settings import MeshSettings
from pdmesh.simulator.workers import worker
from pdmesh.simulator.workers.worker import Figures
from router.fleet.worker import Dispatched
from tests.simulator.specs import LARGE

IDLE = Figures(0.0, 0, 0, 0, 0, 8192, 8192, 0, 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0, 0, 0, prefill=True, decode=True)


def test_spare_blocks_are_those_of_the_engine() -> None:
    """The simulator must not import it, so it keeps a copy. (Those of paces: tests/engine/test_pacing.py.)"""
    assert worker.BLOCKS_PER_SPARE == scheduler.BLOCKS_PER_SPARE


def test_what_was_sent_counts_until_a_report_contains_it() -> None:
    ledger = Ledger("w", LARGE)
    ledger.report(IDLE)
    sent = Dispatched(1, 7, 100, decodes=1, context=100)
    ledger.dispatched(sent, 0.5)
    view = ledger.view()
    assert view is not None
    assert (view.dispatched_seqs, view.dispatched_blocks, view.dispatched_tokens, view.dispatched_context) == (1, 7, 100, 100)
    for taken_at in (0.3, 0.4):  # steps that ended before it was sent
        ledger.report(IDLE._replace(taken_at=taken_at))
    ledger.report(IDLE._replace(taken_at=1.0))  # it may have left before
    ledger.report(IDLE._replace(taken_at=1.0))  # of the same step
    assert not ledger.is_settled
    ledger.report(IDLE._replace(taken_at=1.2))
    assert ledger.is_settled


def test_what_has_arrived_is_in_the_next_report() -> None:
    ledger = Ledger("w", LARGE)
    sent = Dispatched(1, 7, 100, decodes=1, context=100, arrived_at=0.9)
    ledger.dispatched(sent, 0.7)
    ledger.report(IDLE._replace(taken_at=0.8))
    assert not ledger.is_settled
    ledger.dispatched(other := Dispatched(1, 7, 100, arrived_at=0.95), 0.9)
    ledger.report(IDLE._replace(taken_at=1.0, num_running=2, num_free_blocks=8192 - 14))
    assert ledger.is_settled
    ledger.done(other)  # once more does no harm
    ledger.released(sent, 1.1)
    view = ledger.view()
    assert view is not None
    assert (view.dispatched_seqs, view.dispatched_blocks) == (-1, -7)
    assert (view.dispatched_decodes, view.dispatched_context) == (-1, -100)


def test_a_report_that_shows_what_has_ended_gone_is_not_made_less_than_empty() -> None:
    ledger = Ledger("w", LARGE)
    ledger.report(IDLE)
    ledger.released(Dispatched(1, 7, 100, decodes=1, context=100), 1.1)
    view = ledger.view()
    assert view is not None
    assert (view.num_seqs + view.dispatched_seqs, view.num_free_blocks - view.dispatched_blocks) == (0, view.num_total_blocks)


def test_the_pace_of_what_was_sent_counts_before_a_report_has_it() -> None:
    ledger, paced = Ledger("w", LARGE), Ledger("w", replace(LARGE, keeps_pace=False))
    for each in (ledger, paced):
        each.report(IDLE._replace(pace_s=0.05))
        each.dispatched(Dispatched(1, 7, decodes=1, context=100, pace_s=0.02), 0.5)
    views = ledger.view(), paced.view()
    assert [view.pace_s for view in views if view is not None] == [0.02, 0.0]


def test_who_drains_is_not_seen() -> None:
    ledger = Ledger("w", LARGE)
    assert ledger.view() is None
    ledger.report(IDLE._replace(draining=True))
    assert ledger.view() is None


def test_an_answer_is_given_once_for_each_moment() -> None:
    outlook = SimulatedRouting(MeshSettings(), 512)
    outlook.meet("w", LARGE)
    outlook.report("w", IDLE)
    request = Request(0, Arrival(0.0, 100, 10), 100, 10)
    first = outlook.choose(request, 1.0)
    assert outlook.choose(request, 1.0) is first
    assert outlook.choose(request, 1.1) is not first
    again = outlook.choose(request, 1.1)
    outlook.dispatched("w", Dispatched(1, 1, 5000), 1.1)
    assert outlook.choose(request, 1.1) is not again
    assert outlook.demand(request, 1.0).max_total_tokens == LARGE.largest


def test_a_forecast_is_of_the_best_placement() -> None:
    outlook = SimulatedRouting(MeshSettings(), 512)
    request = Request(0, Arrival(0.0, 100, 10), 100, 10)
    assert outlook.forecast(request, 0.0) is None
    outlook.meet("w", LARGE)
    outlook.report("w", IDLE)
    forecast = outlook.forecast(request, 0.5)
    assert forecast is not None
    assert forecast.ttft_s == pytest.approx(LARGE.speed.prefill_s(0, 100, chunk=512), abs=3e-3)
    assert forecast.has_room


def test_a_forecast_tells_of_a_free_worker_where_the_cached_prefix_is_on_a_busy_one() -> None:
    outlook, request = SimulatedRouting(MeshSettings(), 512), Request(0, Arrival(0.0, 4100, 10, tuple(range(8))), 4100, 10)
    for name in ("holder", "other"):
        outlook.meet(name, LARGE)
        outlook.report(name, IDLE)
    outlook.sent_prompt("holder", request, 0.0)
    idle = outlook.forecast(request, 0.5)
    assert idle is not None and idle.elsewhere is None
    outlook.report("holder", IDLE._replace(taken_at=0.5, num_waiting=1, num_waiting_tokens=2000, num_prefilling=1))
    busy = outlook.forecast(request, 0.5)
    assert busy is not None and busy.elsewhere is not None
    assert busy.ahead_s > 0.2 and busy.ttft_s < busy.elsewhere.ttft_s and busy.elsewhere.ahead_s == 0
