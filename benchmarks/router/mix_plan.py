"""Which mixes are asked, what a request must keep, and who is the better. Pure.

The objectives follow one rule for everybody, from one request alone on the two-core engine: TTFT within 5 times that plus half a
second, TPOT within 3 times that.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from benchmarks.harness import Figure
from pdmesh.loadtest.arrivals import fixed
from pdmesh.loadtest.record import ObjectiveBook, Objectives
from pdmesh.loadtest.workload import Arrivals, TrafficClass, Workload

TTFT_TIMES, TTFT_MORE_S, TPOT_TIMES = 5.0, 0.5, 3.0
RULE = f"TTFT <= {TTFT_TIMES:g} x idle + {TTFT_MORE_S:g} s, TPOT <= {TPOT_TIMES:g} x idle (one request alone on two cores)"
SEED = 41


@dataclass(frozen=True)
class Kind:
    """Requests of equal length, and their share of the mix relative to the others'."""

    num_input: int
    num_output: int
    share: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.num_input}+{self.num_output}"


@dataclass(frozen=True)
class Mix:
    """`load`: the offered rate as a share of the capacity for these requests."""

    kinds: tuple[Kind, ...]
    load: float

    @property
    def name(self) -> str:
        return f"{' and '.join(kind.name for kind in self.kinds)} at {self.load:.0%}"

    @property
    def key(self) -> str:
        """The name, for a file."""
        return f"{'_'.join(f'{kind.name}x{kind.share:g}' for kind in self.kinds)}-{self.load:g}"

    @property
    def seed(self) -> int:
        return SEED + MIXES.index(self)

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Of some requests whose shares are those of the mix."""
        unit = min(kind.share for kind in self.kinds)
        return [(kind.num_input, kind.num_output) for kind in self.kinds for _ in range(round(kind.share / unit))]

    def workload(self, capacity: float) -> Workload:
        """What is asked where `capacity` requests a second are borne."""
        classes = tuple(
            TrafficClass(kind.name, kind.share, input_tokens=fixed(kind.num_input), output_tokens=fixed(kind.num_output))
            for kind in self.kinds
        )
        return Workload(arrivals=Arrivals(rate=self.load * capacity), classes=classes)


def _mix(num_input: int, num_output: int, load: float) -> Mix:
    return Mix((Kind(num_input, num_output),), load)


_CHAT_AND_DOCUMENTS = (Kind(128, 256, 3), Kind(2000, 16, 1))
MIXES = (
    _mix(32, 512, 0.7),
    _mix(32, 64, 1.1),
    _mix(128, 256, 0.5),
    _mix(128, 16, 0.9),
    _mix(420, 64, 0.7),
    _mix(420, 256, 0.9),
    _mix(1000, 16, 0.5),
    _mix(1000, 128, 1.1),
    _mix(2000, 64, 0.3),
    _mix(2000, 256, 0.7),
    _mix(4000, 16, 0.9),
    _mix(4000, 512, 0.5),
    Mix(_CHAT_AND_DOCUMENTS, 0.6),
    Mix(_CHAT_AND_DOCUMENTS, 0.9),
)
QUICK_MIXES = (MIXES[3],)


@dataclass(frozen=True)
class Idle:
    """Of one request alone, in seconds."""

    ttft_s: float
    tpot_s: float


def objectives(idle: Idle) -> Objectives:
    """The rule."""
    return Objectives(ttft_ms=1e3 * (TTFT_TIMES * idle.ttft_s + TTFT_MORE_S), tpot_ms=1e3 * TPOT_TIMES * idle.tpot_s)


def book_of(mix: Mix, idle: Mapping[str, Idle]) -> ObjectiveBook:
    """The objectives of each kind of the mix; `idle` by the kinds' names."""
    return ObjectiveBook(Objectives(), {kind.name: objectives(idle[kind.name]) for kind in mix.kinds})


@dataclass(frozen=True)
class Cell:
    """One system under one mix: requests per second, milliseconds, and a share."""

    offered: float
    goodput: float
    attainment: float
    ttft_p50_ms: float
    tpot_p99_ms: float
    num_requests: int


def ratio(ours: float, theirs: Sequence[float]) -> float | None:
    """Our goodput over the best of theirs; None where nobody had any."""
    best = max(theirs)
    if best == 0:
        return None if ours == 0 else float("inf")
    return ours / best


def figures_of(cells: Mapping[Mix, Mapping[str, Cell]], ours: str, names: Mapping[str, str]) -> list[Figure]:
    """`cells` by mix and system; `ours` is the key of the one that is compared with all others. Summary first."""
    ratios = {
        mix: ratio(of[ours].goodput, [cell.goodput for key, cell in of.items() if key != ours]) for mix, of in cells.items()
    }
    known = [value for value in ratios.values() if value is not None]
    peer = f"the better of: {', '.join(name for key, name in names.items() if key != ours)}"
    summary = [
        Figure("goodput over the better aggregated: lowest of all mixes", min(known), "times", "higher", 0.98, peer=peer),
        Figure("goodput over the better aggregated: best of all mixes", max(known), "times", "higher", 1.2, peer=peer),
        Figure("goodput over the better aggregated: median of all mixes", statistics.median(known), "times", "higher", peer=peer),
        Figure("mixes", len(cells), "mixes", "higher", 12),
        Figure("mixes: objectives of each request", RULE, "rule", "lower"),
    ]
    listed = [
        figure
        for number, mix in zip(count(1), cells, strict=False)
        for figure in _of_mix(f"mix {number}: {mix.name}", ratios[mix], cells[mix], names, peer)
    ]
    return summary + listed


def _of_mix(title: str, value: float | None, of: Mapping[str, Cell], names: Mapping[str, str], peer: str) -> list[Figure]:
    shown = "nobody kept the objectives" if value is None else value
    listed = [Figure(f"{title}: goodput over the better aggregated", shown, "times", "higher", 0.98, peer=peer)]
    for key, cell in of.items():
        who = f"{title}: {names[key]}"
        listed += [
            Figure(f"{who}: goodput", cell.goodput, "requests/s", "higher", limit=cell.offered),
            Figure(f"{who}: TTFT p50", cell.ttft_p50_ms, "ms", "lower"),
            Figure(f"{who}: TPOT p99", cell.tpot_p99_ms, "ms", "lower"),
        ]
    return listed
