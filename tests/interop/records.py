"""The mesh's own records of requests, and what a client's times are compared with."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import Figure
from pdmesh.launcher.plan import ProcessPlan
from tests.interop.recording_router import FILE_VARIABLE

SHARE, AT_LEAST_S = 0.05, 0.002


class Record(NamedTuple):
    """Of one request that has completed, in seconds, as the router told its client."""

    ttft_s: float
    tpot_s: float


class Records:
    """The file that a recording router writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_seen = 0
        path.touch()

    def new(self) -> tuple[Record, ...]:
        """Of the requests that have completed since the last call, in that order."""
        lines = self._path.read_text().splitlines()[self._num_seen :]
        self._num_seen += len(lines)
        rows = [json.loads(line) for line in lines]
        return tuple(Record(row["ttft_s"], row["tpot_s"]) for row in rows)


def recording(plan: ProcessPlan, records: Path) -> ProcessPlan:
    """A router's process with the recording one in its place; others as they are."""
    if plan.is_worker:
        return plan
    assert plan.argv[:4] == (sys.executable, "-P", "-m", "router")
    argv = (*plan.argv[:3], "tests.interop.recording_router", *plan.argv[4:])
    return replace(plan, argv=argv, env={**plan.env, FILE_VARIABLE: str(records)})


def timing(name: str, seen_s: float, own_s: Sequence[float]) -> Figure:
    """How far a client's median is from the mesh's of the same requests; the goal is 5 % of the mesh's or 2 ms,
    whichever is more: who reads too little agrees no more than who reads too much."""
    own = statistics.median(own_s)
    peer = f"seen: {ms(seen_s)} ms; the mesh's own record of it: {ms(own)} ms"
    goal = max(AT_LEAST_S, own * SHARE)
    return Figure(
        f"{name}: difference from the mesh's own record", ms(abs(seen_s - own)), "ms", "lower", goal=ms(goal), peer=peer
    )


def ms(seconds: float) -> float:
    """For people, to the microsecond."""
    return round(seconds * 1e3, 3)
