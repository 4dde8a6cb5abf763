"""Admission by prediction: who is refused at once, who is held, when the gate opens, and that nobody waits for ever."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from router.flow_control.capacity import AdmissionSettings
from router.flow_control.controller import Admission
from router.flow_control.slo_admission import (
    BATCH,
    HOPELESS,
    INTERACTIVE,
    MAX_RETRY_DELAY_S,
    MAX_WAIT_S,
    STANDARD,
    FlowItem,
    Forecast,
    Refusal,
    SloEstimate,
    Ticket,
    TicketState,
    Verdict,
    expected_ttft_s,
    verdict,
)
from router.routing.cost_model import MAX_AHEAD_S, Prediction

GOOD = Forecast(ttft_s=0.1, tpot_s=0.02, has_room=True)
AFFINE = Forecast(ttft_s=0.45, tpot_s=0.02, has_room=True, ahead_s=0.4)
"""For a prompt whose beginning a busy worker has cached."""
FREE = Prediction(2.0, 0.02, 0.0, 2.0, 0.0, 1.0)
"""Of an idle worker, which would have to compute all of it."""
PROMISED = FlowItem(ttft_s=0.5, tpot_s=0.04)
ADMITTED, WAITING, REFUSED = TicketState.ADMITTED, TicketState.WAITING, TicketState.REFUSED


@dataclass
class Sky:
    """A mesh whose forecast the test sets; counts how often it was asked for."""

    forecast: Forecast | None = GOOD
    num_looks: int = 0

    def look(self) -> Forecast | None:
        self.num_looks += 1
        return self.forecast


def item(sky: Sky, priority: int = STANDARD, **fields: object) -> FlowItem:
    return replace(PROMISED, priority=priority, foresee=sky.look, **fields)  # type: ignore[arg-type]


def admitted(admission: Admission, asking: FlowItem, now: float = 0.0) -> Ticket:
    """Let in, and on a worker at once."""
    ticket = admission.ask(asking, now)
    assert isinstance(ticket, Ticket) and ticket.state is ADMITTED, ticket
    admission.placed(ticket, now)
    return ticket


def waiting(admission: Admission, asking: FlowItem, now: float = 0.0) -> Ticket:
    ticket = admission.ask(asking, now)
    assert isinstance(ticket, Ticket) and ticket.state is WAITING, ticket
    return ticket


def refused(admission: Admission, asking: FlowItem, now: float = 0.0) -> Refusal:
    answer = admission.ask(asking, now)
    assert isinstance(answer, Refusal), answer
    return answer


def busy_mesh(sky: Sky, max_inflight: int = 10, max_queued: int = 10) -> Admission:
    """Somebody runs: nobody who comes is alone."""
    admission = Admission(AdmissionSettings(max_inflight, max_queued))
    admitted(admission, FlowItem(foresee=sky.look))
    return admission


@pytest.mark.parametrize(
    ("forecast", "asking", "expected"),
    [
        (None, PROMISED, Verdict.OPEN),
        (GOOD, PROMISED, Verdict.OPEN),
        (replace(GOOD, has_room=False), PROMISED, Verdict.SATURATED),
        (replace(GOOD, ahead_s=MAX_AHEAD_S * 1.01), PROMISED, Verdict.SATURATED),
        (Forecast(2.2, 0.02, has_room=True, ahead_s=0.2), PROMISED, Verdict.SATURATED),
        (Forecast(2.05, 0.02, has_room=True, ahead_s=0.05), PROMISED, Verdict.OPEN),  # a long prompt, and little to do before it
        (replace(AFFINE, elsewhere=FREE), PROMISED, Verdict.OPEN),
        (replace(AFFINE, elsewhere=FREE, tpot_s=0.041), PROMISED, Verdict.OWN),
        (replace(AFFINE, elsewhere=FREE, has_room=False), PROMISED, Verdict.SATURATED),
        (replace(AFFINE, elsewhere=FREE._replace(ahead_s=0.2)), PROMISED, Verdict.SATURATED),
        (replace(AFFINE, elsewhere=FREE), replace(PROMISED, priority=BATCH), Verdict.SATURATED),
        (replace(GOOD, tpot_s=0.041), PROMISED, Verdict.OWN),
        (replace(GOOD, tpot_s=0.041), FlowItem(), Verdict.OPEN),
        (replace(GOOD, tpot_s=0.033), FlowItem(priority=BATCH, guard_tpot_s=0.04), Verdict.OWN),
        (replace(GOOD, tpot_s=0.031), FlowItem(priority=BATCH, guard_tpot_s=0.04), Verdict.OPEN),
        (replace(GOOD, ttft_s=0.41), FlowItem(priority=BATCH, guard_ttft_s=0.5), Verdict.OWN),
        (replace(GOOD, tpot_s=0.033), FlowItem(priority=STANDARD, guard_tpot_s=0.04), Verdict.OPEN),
    ],
)
def test_the_way(forecast: Forecast | None, asking: FlowItem, expected: Verdict) -> None:
    assert verdict(asking, forecast, others_above=True) is expected


def test_batch_goes_where_nobody_is_disturbed() -> None:
    asking = FlowItem(priority=BATCH, guard_ttft_s=0.5, guard_tpot_s=0.04)
    assert verdict(asking, replace(GOOD, ttft_s=3.0, tpot_s=0.1), others_above=False) is Verdict.OPEN


def test_too_late_is_refused_at_once_with_the_numbers() -> None:
    sky = Sky()
    admission = busy_mesh(sky)
    sky.forecast = Forecast(ttft_s=0.9, tpot_s=0.02, has_room=True, ahead_s=0.7)
    answer = refused(admission, item(sky))
    assert answer.reason == "objective" and answer.retry_delay_s == pytest.approx(0.425)
    assert "900 ms" in answer.message and "500 ms" in answer.message and "200 ms for the prompt itself" in answer.message
    assert isinstance(admission.ask(item(sky, ttft_s=2.0), 0.0), Ticket)  # its own objective is another
    assert isinstance(admission.ask(item(sky, ttft_s=None), 0.0), Ticket)


def test_a_deadline_counts_always() -> None:
    sky = Sky(Forecast(ttft_s=0.9, tpot_s=0.02, has_room=True))
    admission = Admission(AdmissionSettings(10, 10))
    answer = refused(admission, item(sky, ttft_s=None, deadline=100.5), now=100.0)
    assert answer.reason == "deadline" and "900 ms" in answer.message and "500 ms" in answer.message
    assert isinstance(admission.ask(item(sky, deadline=101.0), 100.0), Ticket)


@pytest.mark.parametrize(
    ("forecast", "left_s", "is_final"),
    [
        (Forecast(ttft_s=0.9, tpot_s=0.02, has_room=True), 0.5, True),
        (Forecast(ttft_s=0.9, tpot_s=0.02, has_room=True, ahead_s=0.3), 0.5, True),
        (Forecast(ttft_s=0.9, tpot_s=0.02, has_room=True, ahead_s=0.5), 0.5, False),
        (Forecast(ttft_s=0.9, tpot_s=0.02, has_room=False, ahead_s=0.9), 0.001, False),
    ],
)
def test_a_deadline_that_no_idle_mesh_meets_is_not_to_be_tried_again(forecast: Forecast, left_s: float, is_final: bool) -> None:
    answer = refused(busy_mesh(Sky()), item(Sky(forecast), ttft_s=None, deadline=left_s))
    assert answer.reason == "deadline" and (answer.retry_delay_s is None) is is_final


def test_without_a_forecast_nobody_is_refused_or_held() -> None:
    sky = Sky(None)
    admission = busy_mesh(sky, max_inflight=5)
    assert all(admitted(admission, item(sky, deadline=0.001)) for _ in range(4))


def test_who_would_be_alone_is_let_in_whatever_the_forecast() -> None:
    sky = Sky(Forecast(ttft_s=9.0, tpot_s=9.0, has_room=False, ahead_s=5.0))
    admission = Admission(AdmissionSettings(10, 10))
    first = admitted(admission, item(sky))
    admission.release(first, 10.0)
    admitted(admission, item(sky, BATCH, guard_tpot_s=0.001), now=10.0)


def test_without_a_queue_nobody_is_held() -> None:
    sky = Sky()
    admission = busy_mesh(sky, max_inflight=3, max_queued=0)
    sky.forecast = replace(GOOD, has_room=False)
    admitted(admission, item(sky))
    admitted(admission, item(sky))
    assert refused(admission, item(sky)).reason == "queue_full"


def test_the_gate_opens_when_the_mesh_has_room_again() -> None:
    sky = Sky()
    admission = busy_mesh(sky)
    sky.forecast = replace(GOOD, has_room=False)
    first, second = waiting(admission, item(sky)), waiting(admission, item(sky, INTERACTIVE))
    assert admission.look(0.1) == []
    sky.forecast = GOOD
    assert admission.look(0.2) == [second, first]


def test_one_look_does_not_let_everybody_in() -> None:
    """The forecast does not contain those who were let in a moment ago: their prompts are added to it until they are placed."""
    sky = Sky()
    admission = busy_mesh(sky)
    sky.forecast = replace(GOOD, has_room=False)
    crowd = [waiting(admission, item(sky, ttft_s=None)) for _ in range(9)]
    sky.forecast = GOOD
    assert admission.look(0.1) == crowd[:2]  # 0.1 s each; a third would be more than MAX_AHEAD_S
    assert admission.placed(crowd[0], 0.1) == crowd[2:3]
    assert admission.look(10.0) == crowd[3:5]  # whoever is not placed by then waits for something else


def test_a_queue_that_is_left_out_of_what_is_expected_is_only_that_of_workers_with_no_prefix() -> None:
    assert expected_ttft_s(AFFINE, 0.2) == pytest.approx(0.2 + 0.05 + MAX_AHEAD_S)
    assert expected_ttft_s(replace(AFFINE, elsewhere=FREE), 0.2) == pytest.approx(0.2 + 0.45)


def test_one_that_wants_a_busy_worker_is_in_no_others_way_while_some_are_free() -> None:
    """It is sent there at once, and so are those that come after it, until prompts on their way could fill the free worker."""
    sky, idle = Sky(), Sky()
    admission = busy_mesh(sky)
    sky.forecast = AFFINE
    first = waiting(admission, item(sky, ttft_s=None))
    sky.forecast = replace(AFFINE, elsewhere=FREE)
    assert admission.look(0.1) == [first]
    for _ in range(2):  # 0.05 s each
        answer = admission.ask(item(sky, ttft_s=None), 0.1)
        assert isinstance(answer, Ticket) and answer.state is ADMITTED
    last = waiting(admission, item(sky, ttft_s=None), now=0.1)
    assert admission.placed(first, 0.2) == [last]
    admitted(admission, item(idle), now=1.0)


def test_a_saturated_mesh_is_not_passed_but_an_own_objective_is() -> None:
    sky = Sky()
    admission = busy_mesh(sky)
    strict = waiting(admission, item(sky, tenant="strict", tpot_s=0.001))
    assert admission.look(0.1) == []
    admitted(admission, item(sky, tenant="other"), now=0.1)
    sky.forecast = replace(GOOD, has_room=False)
    large = waiting(admission, item(sky, tenant="large", tpot_s=None), now=0.2)
    small = waiting(admission, item(Sky(), tenant="small", tpot_s=None), now=0.2)
    assert admission.look(0.21) == []
    sky.forecast = GOOD
    assert admission.look(0.22) == [large, small]
    assert strict.state is WAITING


def test_whoever_waits_is_refused_when_it_is_too_late_and_not_at_its_deadline() -> None:
    sky = Sky()
    admission = busy_mesh(sky)
    sky.forecast = replace(GOOD, has_room=False)
    by_objective = waiting(admission, item(sky))
    by_deadline = waiting(admission, item(sky, ttft_s=None, deadline=0.7))
    assert admission.look(0.59) == []
    assert admission.look(0.61) == [by_deadline]  # 0.7 s less 0.1 s that its prompt takes
    assert by_deadline.refusal is not None and by_deadline.refusal.reason == "deadline"
    assert admission.look(HOPELESS * 0.5 - 0.11) == []
    assert admission.look(HOPELESS * 0.5 - 0.09) == [by_objective]
    assert by_objective.refusal is not None and by_objective.refusal.reason == "objective"


def test_who_has_waited_and_would_be_late_now_is_refused_when_its_turn_comes() -> None:
    sky = Sky()
    admission = busy_mesh(sky)
    sky.forecast = replace(GOOD, has_room=False)
    late = waiting(admission, item(sky))
    sky.forecast = Forecast(ttft_s=HOPELESS * 0.5, tpot_s=0.02, has_room=True, ahead_s=0.2)
    assert admission.look(0.25) == [late] and late.state is REFUSED
    assert late.refusal is not None and "250 ms waited already" in late.refusal.message


def test_a_mesh_that_hangs_holds_nobody_for_ever() -> None:
    sky = Sky()
    admission = Admission(AdmissionSettings(20, 20, hold_timeout_s=5.0))
    holder = admitted(admission, FlowItem(foresee=sky.look))
    sky.forecast = replace(GOOD, has_room=False)
    crowd = [waiting(admission, item(sky, ttft_s=None), now=1.0) for _ in range(15)]
    assert admission.look(5.9) == []
    assert admission.look(6.0) == crowd[:1]
    assert admission.look(6.1) == []
    assert admission.look(11.0) == crowd[1:3]
    assert admission.look(16.0) == crowd[3:7]
    assert admission.release(holder, 16.1) == []  # it lives: forecasts count again
    assert admission.look(21.0) == []
    assert admission.look(21.1) == crowd[7:8]


def backlog(admission: Admission, sky: Sky, seconds: float, per_s: float) -> tuple[list[Ticket], float]:
    """One place, somebody waits all the time, and it comes free `per_s` times a second."""
    holder, now = admitted(admission, item(sky, ttft_s=None)), 0.0
    queue = [waiting(admission, item(sky, ttft_s=None), now)]
    for _ in range(round(seconds * per_s)):
        queue.append(waiting(admission, item(sky, ttft_s=None), now))
        now += 1 / per_s
        admission.release(holder, now)
        holder = queue.pop(0)
    return queue, now


def test_the_queue_at_its_present_rate_counts() -> None:
    sky = Sky(replace(GOOD, ttft_s=0.05))
    admission = Admission(AdmissionSettings(1, 100))
    _, now = backlog(admission, sky, 4.0, per_s=10.0)  # one waits: 0.1 s for it, 0.1 s for the place
    assert isinstance(admission.ask(item(sky, ttft_s=0.4), now), Ticket)
    answer = refused(admission, item(sky, ttft_s=0.3), now)  # two wait: 0.3 s, and its own 0.05
    assert answer.reason == "objective" and "in the queue" in answer.message
    assert isinstance(admission.ask(item(sky, INTERACTIVE, ttft_s=0.3), now), Ticket)  # it passes them
    other = refused(admission, item(sky, ttft_s=0.09, tenant="other"), now)
    assert "the queue alone" in other.message


def test_a_quiet_hour_says_nothing_about_how_fast_the_mesh_is() -> None:
    sky = Sky()
    admission = Admission(AdmissionSettings(1, 100))
    for hour in range(5):  # one request in an hour
        admission.release(admitted(admission, item(sky), hour * 3600.0), hour * 3600.0 + 0.1)
    admitted(admission, item(sky), 20_000.0)
    for _ in range(3):
        waiting(admission, item(sky), 20_000.0)


def test_refusing_needs_more_to_stop_than_to_start() -> None:
    outlook = SloEstimate()
    decide: Callable[[float], bool] = lambda ttft_s: (  # noqa: E731
        outlook.refusal(PROMISED, Forecast(ttft_s, 0.02, has_room=True, ahead_s=ttft_s - 0.1), None) is not None
    )
    assert [decide(ttft_s) for ttft_s in (0.47, 0.49, 0.47, 0.455, 0.45, 0.47)] == [False, True, True, True, False, False]


def test_a_prompt_too_long_for_its_objective_does_not_close_the_gate_to_others() -> None:
    sky = Sky()
    admission = busy_mesh(sky)
    sky.forecast = Forecast(ttft_s=90.0, tpot_s=0.02, has_room=True)
    assert refused(admission, item(sky)).retry_delay_s == MAX_RETRY_DELAY_S
    sky.forecast = replace(GOOD, ttft_s=0.45)
    admitted(admission, item(sky))


def test_batch_yields_first() -> None:
    sky = Sky()
    admission = busy_mesh(sky)
    sky.forecast = replace(GOOD, tpot_s=0.035)
    batch = waiting(admission, item(sky, BATCH, ttft_s=None, guard_ttft_s=0.5, guard_tpot_s=0.04))
    admitted(admission, item(sky), 0.1)  # it does not wait for batch
    assert admission.look(0.2) == []
    sky.forecast = replace(GOOD, tpot_s=0.03)
    assert admission.look(0.3) == [batch]


def test_a_flood_costs_no_forecasts() -> None:
    sky = Sky()
    admission = Admission(AdmissionSettings(1, 8))
    admitted(admission, item(sky, ttft_s=None))
    for _ in range(7):
        waiting(admission, item(sky, ttft_s=None))
    num_looks = sky.num_looks
    for _ in range(100):
        refused(admission, item(sky, ttft_s=None))
    assert sky.num_looks == num_looks


def test_a_deadline_ends_the_wait_also_without_a_forecast() -> None:
    sky = Sky(None)
    admission = busy_mesh(sky, max_inflight=1)
    late = waiting(admission, item(sky, deadline=1.0))
    patient = waiting(admission, item(sky))
    assert admission.look(0.99) == []
    assert admission.look(1.01) == [late]
    assert late.refusal is not None and late.refusal.reason == "deadline"
    assert admission.look(MAX_WAIT_S - 0.01) == []
    assert admission.look(MAX_WAIT_S + 0.01) == [patient]
    assert patient.refusal is not None and "longest" in patient.refusal.message


def test_a_pace_that_even_an_idle_worker_misses_is_refused_at_once() -> None:
    sky = Sky()
    admission = busy_mesh(sky)
    sky.forecast = replace(GOOD, tpot_s=0.05, idle_tpot_s=0.041)
    answer = refused(admission, item(sky))
    assert answer.reason == "objective" and "41.0 ms" in answer.message and "slo_tpot_ms" in answer.message
    sky.forecast = replace(GOOD, tpot_s=0.05, idle_tpot_s=0.039)
    waiting(admission, item(sky))


def test_who_is_below_its_share_is_not_refused_for_fear_of_what_others_sent() -> None:
    sky = Sky()
    admission = busy_mesh(sky)
    for _ in range(3):
        admitted(admission, item(sky, ttft_s=None, tenant="flood"), 1.0)
    sky.forecast = Forecast(ttft_s=0.49, tpot_s=0.02, has_room=True, ahead_s=0.26)
    assert refused(admission, item(sky, tenant="flood"), 1.0).reason == "objective"
    waiting(admission, item(sky, tenant="modest"), 1.0)
