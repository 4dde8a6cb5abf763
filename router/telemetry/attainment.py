"""Whether a request met what was promised to it: one rule for metrics, traces and so the console. Pure.

What never came is missed, also where there was no room for the request, and where the client left when it was late already: many
leave because nothing comes. Who left before, asked for something wrong or spent its own rate is judged only for what came.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from pdmesh.runtime.errors import Cancelled, InvalidArgument, MeshError, NotFound, ResourceExhausted, as_mesh_error
from pdmesh.v1 import mesh_pb2

OVER_ITS_RATE = "rate"
"""`Refusal.reason` of a tenant that has spent what it may: however fast the mesh is."""


class Verdict(NamedTuple):
    """Of each objective: None: not judged. `overall`: all of them met, and the answer complete."""

    ttft: bool | None
    tpot: bool | None
    overall: bool | None


def verdict(parts: mesh_pb2.Timings, goals_ms: tuple[int, int], problem: MeshError | None) -> Verdict:
    """Of a request with these objectives (TTFT and TPOT, 0: none) that `problem` has ended, None: that was answered."""
    ttft, tpot = _ttft_met(parts, goals_ms[0], problem), _met(parts.tpot_ns, goals_ms[1], problem)
    if not any(goals_ms):
        overall = None
    elif False in (ttft, tpot):
        overall = False
    elif problem is None:
        overall = True
    else:
        overall = None if _is_the_callers(problem) else False
    return Verdict(ttft, tpot, overall)


def mesh_error_of(error: BaseException) -> MeshError:
    """A stream that is closed or cancelled before its end is one whose client has left."""
    if isinstance(error, (GeneratorExit, asyncio.CancelledError)):
        return Cancelled("the client left")
    return error if isinstance(error, MeshError) else as_mesh_error(error)


def _ttft_met(parts: mesh_pb2.Timings, goal_ms: int, problem: MeshError | None) -> bool | None:
    has_waited = isinstance(problem, Cancelled) and not parts.ttft_ns and parts.total_ns > goal_ms * 1e6
    return False if goal_ms and has_waited else _met(parts.ttft_ns, goal_ms, problem)


def _met(took_ns: int, goal_ms: int, problem: MeshError | None) -> bool | None:
    if not goal_ms:
        return None
    if took_ns:
        return took_ns <= goal_ms * 1e6
    return None if problem is None or _is_the_callers(problem) else False


def _is_the_callers(problem: MeshError) -> bool:
    if isinstance(problem, ResourceExhausted):
        return problem.reason == OVER_ITS_RATE
    return isinstance(problem, (Cancelled, InvalidArgument, NotFound))
