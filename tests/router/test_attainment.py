"""One rule for metrics, traces and the console: what never came is missed, unless that is the caller's own doing."""

from __future__ import annotations

import asyncio

import pytest

from pdmesh.runtime.errors import DeadlineExceeded, InvalidArgument, MeshError, NotFound, ResourceExhausted, Unavailable
from pdmesh.v1 import mesh_pb2
from router.telemetry.metrics import IMPOSSIBLE_DEADLINE, OVER_ITS_RATE, Verdict, mesh_error_of, verdict

GOALS = (200, 20)
MS = 1_000_000
NO_ROOM = ResourceExhausted("queue_full: 64 requests wait", reason="queue_full")
TOO_MUCH = ResourceExhausted("rate: used up", reason=OVER_ITS_RATE)
TOO_SOON = DeadlineExceeded("deadline: too soon", reason=IMPOSSIBLE_DEADLINE)
WRONG = InvalidArgument("sampling.top_p", "must be above 0")


def judged(
    ttft_ms: float, tpot_ms: float, problem: MeshError | None, goals: tuple[int, int] = GOALS, total_ms: float = 0
) -> Verdict:
    parts = mesh_pb2.Timings(ttft_ns=int(ttft_ms * MS), tpot_ns=int(tpot_ms * MS), total_ns=int(total_ms * MS))
    return verdict(parts, goals, problem)


def test_what_was_answered_is_judged_by_its_times() -> None:
    assert judged(200, 20, None) == Verdict(True, True, True)
    assert judged(201, 20, None) == Verdict(False, True, False)
    assert judged(200, 21, None) == Verdict(True, False, False)


def test_one_token_has_no_time_between_tokens() -> None:
    assert judged(100, 0, None) == Verdict(True, None, True)


@pytest.mark.parametrize(
    "problem", [NO_ROOM, Unavailable("no worker"), DeadlineExceeded("passed"), mesh_error_of(ZeroDivisionError())]
)
def test_what_never_came_is_missed(problem: MeshError) -> None:
    assert judged(0, 0, problem) == Verdict(False, False, False)
    assert judged(100, 0, problem) == Verdict(True, False, False)
    assert judged(100, 0, problem, goals=(200, 0)) == Verdict(True, None, False)  # in time, but no whole answer


@pytest.mark.parametrize(
    "problem", [WRONG, TOO_MUCH, TOO_SOON, NotFound("no such model", field="model"), mesh_error_of(asyncio.CancelledError())]
)
def test_the_callers_doing_is_not_judged_unless_it_was_late_before(problem: MeshError) -> None:
    assert judged(0, 0, problem) == Verdict(None, None, None)
    assert judged(100, 0, problem) == Verdict(True, None, None)
    assert judged(300, 0, problem) == Verdict(False, None, False)


def test_who_leaves_because_nothing_comes_was_promised_more() -> None:
    left = mesh_error_of(asyncio.CancelledError())
    assert judged(0, 0, left, total_ms=199) == Verdict(None, None, None)
    assert judged(0, 0, left, total_ms=201) == Verdict(False, None, False)
    assert judged(0, 0, WRONG, total_ms=201) == judged(0, 0, TOO_MUCH, total_ms=201) == Verdict(None, None, None)
    assert judged(0, 0, left, total_ms=201, goals=(0, 20)) == Verdict(None, None, None)


def test_nothing_was_promised() -> None:
    assert judged(9999, 9999, None, goals=(0, 0)) == judged(0, 0, NO_ROOM, goals=(0, 0)) == Verdict(None, None, None)
