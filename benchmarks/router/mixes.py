"""Never lose: the mesh under its policy beside the same two cores without separation, mix after mix, all three running.

For each mix first the capacity, from a closed loop that keeps the two one-core engines busy, then the same requests at the same
times to each of the three in turn. Who is not asked sleeps.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import count

from benchmarks.harness import Figure, Kept, Options, say
from benchmarks.router.meshes import (
    MESH,
    TWO_CORES,
    TWO_ENGINES,
    WARMUP_S,
    Running,
    alone,
    closed_loop,
    load_of,
    running,
    warm_up,
    window,
)
from pdmesh.loadtest.arrivals import fixed
from pdmesh.loadtest.record import ObjectiveBook, Objectives
from pdmesh.loadtest.workload import Arrivals, TrafficClass, Workload

# Which mixes are asked, what a request must keep, and who is the better. Pure.
#
# The objectives follow one rule for everybody, from one request alone on the two-core engine: TTFT within 5 times that plus
# half a second, TPOT within 3 times that.


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


SHAPES = (MESH, TWO_CORES, TWO_ENGINES)
# So many requests keep two engines busy, and few enough that their tokens still come in time.
CONCURRENCY = 8
# A window lasts until about so many requests were due, within bounds: so that all of them take half an hour at most.
WANTED_REQUESTS, SHORTEST_S, LONGEST_S = 24, 22.0, 34.0


class Mixes:
    """Asks the three systems and remembers what it has seen."""

    def __init__(self, systems: Mapping[str, Running], options: Options, kept: Kept) -> None:
        self._systems = systems
        self._options = options
        self._kept = kept

    async def cells(self, mix: Mix) -> dict[str, Cell]:
        """Of all systems under this mix."""
        capacity = await self._capacity(mix)
        idle = {kind.name: await self._idle(kind) for kind in mix.kinds}
        return {key: await self._cell(mix, key, capacity, idle) for key in self._systems}

    async def _idle(self, kind: Kind) -> Idle:
        name = f"idle-{kind.num_input}-{kind.num_output}"
        if (known := self._kept.get(name)) is None:
            known = await alone(self._systems[TWO_CORES.key].target, kind.num_input, kind.num_output, SEED)
            self._kept.put(name, known)
        return Idle(*known)

    async def _capacity(self, mix: Mix) -> float:
        name = f"capacity-{'_'.join(kind.name for kind in mix.kinds)}"
        if (known := self._kept.get(name)) is None:
            seconds = self._options.pick(12.0, 2.0)
            known, _ = await closed_loop(self._systems[TWO_ENGINES.key].target, mix.lengths, CONCURRENCY, seconds, mix.seed)
            self._kept.put(name, known)
            say(f"{mix.name}: capacity {known:.3g} requests/s")
        return float(known)

    async def _cell(self, mix: Mix, key: str, capacity: float, idle: Mapping[str, Idle]) -> Cell:
        name = f"cell-{mix.key}-{key}"
        if (known := self._kept.get(name)) is not None:
            return Cell(**known)
        duration_s = self._options.pick(min(LONGEST_S, max(SHORTEST_S, WANTED_REQUESTS / (mix.load * capacity))), 4.0)
        load = load_of(mix.workload(capacity), book_of(mix, idle), mix.seed, duration_s, self._options.pick(WARMUP_S, 1.0))
        summary = (await window(self._systems[key].target, load)).summary
        cell = Cell(
            offered=summary.request_rate,
            goodput=summary.goodput,
            attainment=summary.attainment or 0.0,
            ttft_p50_ms=summary.ttft.p50,
            tpot_p99_ms=summary.tpot.p99,
            num_requests=summary.num_requests,
        )
        self._kept.put(name, asdict(cell))
        say(f"{mix.name}: {key}: {cell.goodput:.3g} of {cell.offered:.3g} requests/s good, {summary.errors or 'no errors'}")
        return cell


async def figures(options: Options) -> list[Figure]:
    """Of all mixes. What was measured before an interruption is not measured again."""
    kept = Kept(options.folder / "mixes")
    if len(kept):
        say(f"mixes: going on with {len(kept)} values that were measured before (--fresh: anew)")
    async with AsyncExitStack() as stack:
        systems = {shape.key: await stack.enter_async_context(running(shape, options)) for shape in SHAPES}
        for system in systems.values():
            await warm_up(system.target, options.pick(4.0, 1.0))
        mixes = Mixes(systems, options, kept)
        cells = {mix: await mixes.cells(mix) for mix in (QUICK_MIXES if options.quick else MIXES)}
    kept.forget()
    return figures_of(cells, MESH.key, {shape.key: shape.name for shape in SHAPES})
