"""Whom the router leaves out, and for how long: tables, and what holds whatever happens."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.circuit_breaker import CircuitBreaker, HealthLimits, Role, State
from router.routing.worker_snapshot import WorkerKey

WORKERS: list[WorkerKey] = [(f"w{number}:1", 1) for number in range(6)]
A, B = WORKERS[:2]
P, D = Role.PREFILL, Role.DECODE


def health(**limits: float) -> CircuitBreaker:
    return CircuitBreaker(HealthLimits(jitter=0.0, **limits), jitter=lambda: 0.0)


def fail(sick: CircuitBreaker, worker: WorkerKey, now: float, times: int = 3) -> None:
    for _ in range(times):
        sick.failed(worker, P, now, "broken")


@pytest.mark.parametrize(
    ("outcomes", "is_ejected"),
    [("bb", False), ("bbb", True), ("gggbbb", True), ("gggggbbb", False), ("bgbgb", True), ("gbggggbgggb", False)],
)
def test_three_errors_that_are_half_of_everything_eject(outcomes: str, is_ejected: bool) -> None:
    judged = health()
    for outcome in outcomes:
        if outcome == "g":
            judged.succeeded(A, P, 1.0)
        else:
            judged.failed(A, P, 1.0, "broken")
    assert judged.ejected(P, [A, B], 1.0) == (frozenset({A}) if is_ejected else frozenset())
    assert judged.ejected(D, [A, B], 1.0) == frozenset()  # the other role is judged by itself
    assert judged.suspects == is_ejected


def test_errors_long_apart_do_not_add_up() -> None:
    judged = health(memory_s=10)
    for now in range(0, 200, 20):
        judged.failed(A, P, float(now), "broken")
    assert judged.state(A, P) is State.CLOSED


def test_after_its_time_one_request_is_let_through() -> None:
    judged = health(ejection_s=2)
    fail(judged, A, 0.0)
    assert judged.ejected(P, [A, B], 1.9) == {A}
    assert judged.ejected(P, [A, B], 2.0) == frozenset()
    judged.chosen(A, P, 2.0)
    assert judged.state(A, P) is State.HALF_OPEN
    assert judged.ejected(P, [A, B], 2.1) == {A}, "the probe is under way"
    judged.succeeded(A, P, 2.5)
    assert judged.state(A, P) is State.CLOSED
    assert not judged.suspects
    assert judged.ejected(P, [A, B], 2.5) == frozenset()


def test_a_failed_probe_ejects_for_longer_and_a_lost_one_is_not_waited_for() -> None:
    judged = health(ejection_s=2, probe_s=5, max_ejection_s=6)
    fail(judged, A, 0.0)
    lengths, now = [], 0.0
    for _ in range(3):
        start = now
        while judged.ejected(P, [A, B], now):
            now += 0.5
        lengths.append(now - start)
        judged.chosen(A, P, now)
        judged.failed(A, P, now, "still broken")
    assert lengths == [2, 4, 6]
    breaker = judged.breaker(A, P)
    assert breaker is not None and breaker.num_ejections == 4
    assert breaker.reason == "ejected for 6.0 s: its probe failed: still broken"
    while judged.ejected(P, [A, B], now):
        now += 0.5
    judged.chosen(A, P, now)
    assert judged.ejected(P, [A, B], now + 4.9) == {A}
    assert judged.ejected(P, [A, B], now + 5) == frozenset()


def test_a_worker_that_fails_is_told_from_one_that_is_slow() -> None:
    judged = health()
    fail(judged, A, 1.0)
    for _ in range(8):
        for peer in WORKERS[1:]:
            judged.measured(peer, P, 9.0 if peer == B else 1.0, WORKERS[1:], 1.0)
            judged.succeeded(peer, P, 1.0)
    assert set(judged.suspects_of(P)) == {A, B}
    assert judged.failing(P) == [A] and judged.failing(D) == []


def test_a_worker_far_slower_than_its_peers_is_left_out() -> None:
    judged = health()
    for _ in range(6):
        for worker in WORKERS[1:]:
            judged.measured(worker, D, 0.02, WORKERS, 0.0)
        judged.measured(A, D, 0.1, WORKERS, 0.0)
    assert judged.ejected(D, WORKERS, 0.0) == {A}


@pytest.mark.parametrize("slowness", [lambda _: 5.0, lambda worker: 3.0 if worker == A else 1.0])
def test_when_all_are_slow_or_one_a_little_nobody_is_left_out(slowness: Callable[[WorkerKey], float]) -> None:
    judged = health()
    for _ in range(20):
        for worker in WORKERS:
            judged.measured(worker, D, slowness(worker), WORKERS, 0.0)
    assert judged.ejected(D, WORKERS, 0.0) == frozenset()


@pytest.mark.parametrize(("usual_s", "left_out"), [(0.001, set()), (0.01, {A})])
def test_steps_of_which_a_busy_machine_makes_multiples_are_not_slow(usual_s: float, left_out: set[WorkerKey]) -> None:
    """A tiny model's take 0.3 ms: a worker that is scheduled late takes four times as long, and is not sick."""
    judged = health()
    for _ in range(10):
        for worker in WORKERS:
            judged.measured(worker, D, 4.5 * usual_s if worker == A else usual_s, WORKERS, 0.0)
    assert judged.ejected(D, WORKERS, 0.0) == left_out


def test_without_peers_nobody_is_called_slow() -> None:
    judged = health()
    for _ in range(20):
        judged.measured(A, P, 100.0, [A], 0.0)
    assert judged.state(A, P) is State.CLOSED


EVENTS = st.lists(
    st.tuples(st.sampled_from(["good", "bad", "slow", "chosen"]), st.sampled_from(WORKERS), st.floats(0, 3)), max_size=120
)


@given(EVENTS, st.integers(1, len(WORKERS)))
def test_whatever_happens_half_of_the_peers_stay(events: list[tuple[str, WorkerKey, float]], count: int) -> None:
    judged, peers, now = health(), WORKERS[:count], 0.0
    for what, worker, passes in events:
        now += passes
        if what == "good":
            judged.succeeded(worker, P, now)
        elif what == "bad":
            judged.failed(worker, P, now, "broken")
        elif what == "slow":
            judged.measured(worker, P, 10 * passes, WORKERS, now)
        else:
            judged.chosen(worker, P, now)
        left_out = judged.ejected(P, peers, now)
        assert left_out <= set(peers)
        assert len(left_out) <= count / 2
        assert judged.suspects == any(judged.state(each, P) is not State.CLOSED for each in WORKERS)
    assert judged.ejected(P, peers, now + 200) == frozenset(), "nobody is left out for ever"
