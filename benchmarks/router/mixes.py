"""Never lose: the mesh under its policy beside the same two cores without separation, mix after mix, all three running.

For each mix first the capacity, from a closed loop that keeps the two one-core engines busy, then round after round the same
requests at the same times to each of the three in turn, in another order each round. A system that is not asked sleeps. All three
speculate, as they do by default; what a request must keep is of an engine that does not, whose speed depends on no text.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from itertools import count

from benchmarks.harness import Figure, Kept, Options, say
from benchmarks.router.meshes import (
    MESH,
    TWO_CORES,
    TWO_ENGINES,
    Running,
    alone,
    closed_loop,
    load_of,
    running,
    warm_up,
    window,
)
from benchmarks.spread import Spread
from pdmesh.loadtest.arrivals import fixed
from pdmesh.loadtest.record import ObjectiveBook, Objectives
from pdmesh.loadtest.workload import Arrivals, TrafficClass, Workload

# Which mixes are asked, what a request must keep, and which system is the better. Pure.
#
# The objectives follow one rule for all systems, from one request alone on the two-core engine: TTFT within 5 times that plus
# half a second, TPOT within 3 times that.


TTFT_TIMES, TTFT_MORE_S, TPOT_TIMES = 5.0, 0.5, 3.0
IDLE = "one request alone on two cores, without speculation"
RULE = f"TTFT <= {TTFT_TIMES:g} x idle + {TTFT_MORE_S:g} s, TPOT <= {TPOT_TIMES:g} x idle ({IDLE})"
SEED = 41
THINK_S = 1.0  # between an answer and the next turn


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
    """`load`: the offered rate as a share of the capacity for these requests, without what was said before them. `turns`: of a
    conversation, each with the lengths of its kind beside what was said before: what share of its own capacity that is, is not
    known. `called`: a name where the kinds are too many for one."""

    kinds: tuple[Kind, ...]
    load: float
    turns: int = 1
    called: str = ""

    @property
    def name(self) -> str:
        kinds = self.called or " and ".join(kind.name for kind in self.kinds)
        return (
            f"{kinds} in {self.turns} turns at {self.load:.0%} of single turns"
            if self.turns > 1
            else f"{kinds} at {self.load:.0%}"
        )

    @property
    def key(self) -> str:
        """The name, for a file."""
        kinds = self.called.replace(" ", "-") or "_".join(f"{kind.name}x{kind.share:g}" for kind in self.kinds)
        return f"{kinds}{f'x{self.turns}' if self.turns > 1 else ''}-{self.load:g}"

    @property
    def seed(self) -> int:
        return SEED + MIXES.index(self)

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Of some requests whose shares are those of the mix."""
        unit = min(kind.share for kind in self.kinds)
        return [(kind.num_input, kind.num_output) for kind in self.kinds for _ in range(round(kind.share / unit))]

    def workload(self, capacity: float) -> Workload:
        """What is asked where `capacity` single requests a second are borne; turns: as many requests in fewer conversations."""
        classes = tuple(
            TrafficClass(kind.name, kind.share, input_tokens=fixed(kind.num_input), output_tokens=fixed(kind.num_output))
            for kind in self.kinds
        )
        rate = self.load * capacity / self.turns
        return Workload(Arrivals(rate=rate), classes, turns=fixed(self.turns), think_s=fixed(THINK_S if self.turns > 1 else 0.0))


def _mix(num_input: int, num_output: int, load: float) -> Mix:
    return Mix((Kind(num_input, num_output),), load)


# The middle prompt of each eighth of the Azure 2023 conversation trace (19 366 requests, sorted by prompt) and the median answer
# of that eighth: https://github.com/Azure/AzurePublicDataset, CC-BY-4.0.
_AZURE = ((194, 161), (383, 82), (405, 100), (966, 386), (1051, 407), (1120, 406), (1333, 134), (4079, 64))
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
    Mix((Kind(300, 64),), 0.7, turns=4),
    Mix(tuple(Kind(*lengths) for lengths in _AZURE), 0.7, called="Azure conversation lengths"),
)
QUICK_MIXES = (MIXES[3],)
FEWEST = 20
"""A mix of which fewer requests came in all rounds is not told: one request more or less would be more than 5 % of it."""


def named(names: Sequence[str]) -> tuple[Mix, ...]:
    """The mixes that results call so, all without any name. Raises ValueError."""
    known = {mix.name: mix for mix in MIXES}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no mix {unknown[0]!r}; name some of: {', '.join(known)}")
    return tuple(known[name] for name in names) or MIXES


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

    @property
    def of_one(self) -> float:
        """Goodput if one request were good: the least above 0 that a window can show."""
        return self.offered / self.num_requests if self.num_requests else 0.0


def ratio(ours: float, theirs: Sequence[float], least: float) -> float | None:
    """Our goodput over the best of theirs, which counts as `least` where it is 0, so that the ratio is what ours is at least;
    None where all are 0."""
    best = max(theirs)
    if best == 0:
        return ours / least if ours and least else None
    return ours / best


@dataclass(frozen=True)
class Comparison:
    """One system beside the better of the others, round by round. `ratios`: of the rounds in which one of the two had goodput;
    `num_empty` of them are those in which the other had none, which counts as one good request. `num_requests` came in all rounds
    together, to each system."""

    better: str
    ratios: tuple[float, ...]
    pooled: float | None
    num_empty: int = 0
    num_requests: int = 0

    @property
    def median(self) -> float | None:
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def in_words(self) -> str:
        """The spread, for the column beside a figure."""
        if not self.ratios:
            return ""
        one = f"{self.num_requests} requests, of which one is {1 / self.num_requests:.1%}" if self.num_requests else "no requests"
        words = f"{Spread.of(self.ratios).in_words}; of all rounds' goodput together: {self.pooled:.4g}; {one}"
        if not self.num_empty:
            return words
        return (
            f"{words}; it kept nothing in {self.num_empty} of {len(self.ratios)} rounds, taken as one request: at least so much"
        )


def compared(of: Mapping[str, Sequence[Cell]], ours: str) -> Comparison:
    """`of`: the rounds of each system. The better one has more goodput over all rounds: the best of each round would be a third
    system, which nobody can run."""
    total = {key: sum(cell.goodput for cell in rounds) for key, rounds in of.items()}
    better = max((key for key in of if key != ours), key=lambda key: total[key])
    cells = list(zip(of[ours], of[better], strict=True))
    pairs = [ratio(mine.goodput, (theirs.goodput,), theirs.of_one) for mine, theirs in cells]
    ratios = tuple(value for value in pairs if value is not None)
    # Over all rounds together one request is what it is in one of them.
    pooled = ratio(total[ours], (total[better],), max(cell.of_one for cell in of[better]))
    num_empty = sum(mine.goodput > 0 and theirs.goodput == 0 for mine, theirs in cells)
    return Comparison(better, ratios, pooled, num_empty, sum(cell.num_requests for cell in of[ours]))


def figures_of(
    cells: Mapping[Mix, Mapping[str, Sequence[Cell]]], ours: str, names: Mapping[str, str], fewest: int = FEWEST
) -> list[Figure]:
    """`cells` by mix, system and round, empty for a mix that was not asked; `ours` is the key of the one that is compared with
    all others. Summary first: of the mixes of which at least `fewest` requests came."""
    found = {mix: compared(of, ours) for mix, of in cells.items() if of}
    told = {mix: one for mix, one in found.items() if one.num_requests >= fewest}
    known = [one.median for one in told.values() if one.median is not None]
    peer = f"the better of: {', '.join(name for key, name in names.items() if key != ours)}"
    over = "goodput over the better aggregated"
    num_rounds = min((len(rounds) for mix in told for rounds in cells[mix].values()), default=0)
    lowest, best, median = (min(known), max(known), statistics.median(known)) if known else ("not told",) * 3
    summary = [
        Figure(f"{over}: lowest of all mixes", lowest, "times", "higher", 0.98, peer=peer),
        Figure(f"{over}: best of all mixes", best, "times", "higher", peer=peer),
        Figure(f"{over}: median of all mixes", median, "times", "higher", 1.25, peer=peer),
        Figure(f"mixes of which at least {fewest} requests came", len(told), "mixes", "higher", 16),
        Figure("mixes: rounds", num_rounds, "rounds", "higher", 5),
        Figure("mixes: objectives of each request", RULE, "rule", "lower"),
    ]
    listed = [
        figure
        for number, mix in zip(count(1), cells, strict=False)
        for figure in (
            _of_mix(f"mix {number}: {mix.name}", found[mix], cells[mix], names)
            if mix in told
            else [_not_told(number, mix, fewest)]
        )
    ]
    return summary + listed


def _not_told(number: int, mix: Mix, fewest: int) -> Figure:
    title = f"mix {number}: {mix.name}: goodput over the better aggregated"
    return Figure(title, f"not told: fewer than {fewest} requests in an hour of all mixes", "times", "higher", 0.98)


def _of_mix(title: str, found: Comparison, of: Mapping[str, Sequence[Cell]], names: Mapping[str, str]) -> list[Figure]:
    shown = "no system kept the objectives" if found.median is None else found.median
    peer = f"{names[found.better]}; {found.in_words}"
    listed = [Figure(f"{title}: goodput over the better aggregated", shown, "times", "higher", 0.98, peer=peer)]
    for key, rounds in of.items():
        label = f"{title}: {names[key]}"
        offered = statistics.fmean(cell.offered for cell in rounds)
        listed += [
            Figure(f"{label}: goodput", statistics.fmean(cell.goodput for cell in rounds), "requests/s", "higher", limit=offered),
            Figure(f"{label}: TTFT p50", statistics.median(cell.ttft_p50_ms for cell in rounds), "ms", "lower"),
            Figure(f"{label}: TPOT p99", statistics.median(cell.tpot_p99_ms for cell in rounds), "ms", "lower"),
        ]
    return listed


SHAPES = tuple(replace(shape, speculates=True) for shape in (MESH, TWO_CORES, TWO_ENGINES))
# So many requests keep two engines busy, and few enough that their tokens still come in time.
CONCURRENCY = 8
# A window lasts until about so many requests were due, within bounds: so that a round takes a quarter of an hour.
WANTED_REQUESTS, SHORTEST_S, LONGEST_S = 8, 9.0, 24.0
# No round is begun that would probably end later than LIMIT_S after the first one began.
ROUNDS, LIMIT_S = 5, 3600.0
MIX_WARMUP_S = 2.0


def _idle_key(kind: Kind) -> str:
    return f"idle-{kind.num_input}-{kind.num_output}"


def _idle_of(kind: Kind, kept: Kept) -> Idle:
    if (known := kept.get(_idle_key(kind))) is None:
        raise KeyError(f"nothing is kept of one request of {kind.name} alone")
    return Idle(*known)


async def measure_idle(asked: Iterable[Mix], options: Options, kept: Kept) -> None:
    """Keeps what one request alone takes of each kind of the mixes, on the two-core engine without speculation."""
    kinds = {_idle_key(kind): kind for mix in asked for kind in mix.kinds}
    missing = {key: kind for key, kind in kinds.items() if kept.get(key) is None}
    if not missing:
        return
    async with running(TWO_CORES, options) as system:
        await warm_up(system.target, options.pick(4.0, 1.0))
        for key, kind in missing.items():
            kept.put(key, await alone(system.target, kind.num_input, kind.num_output, SEED))


class Mixes:
    """Asks the three systems and remembers what it has seen. `num_rounds` are planned. Raises KeyError where nothing is kept of a
    kind that is asked (`measure_idle`)."""

    def __init__(self, systems: Mapping[str, Running], options: Options, kept: Kept, num_rounds: int) -> None:
        self._systems = systems
        self._num_rounds = num_rounds
        self._options = options
        self._kept = kept

    async def cells(self, mix: Mix, turn: int) -> dict[str, Cell]:
        """Of all systems under this mix, in one round; none where this machine is so slow that all rounds would tell nothing."""
        capacity = await self._capacity(mix)
        if not self._options.quick and mix.load * capacity * LONGEST_S * self._num_rounds < FEWEST:
            return {}
        idle = {kind.name: _idle_of(kind, self._kept) for kind in mix.kinds}
        keys = list(self._systems)
        start = turn % len(keys)
        found = {key: await self._cell(mix, key, capacity, idle, turn) for key in keys[start:] + keys[:start]}
        return {key: found[key] for key in keys}

    async def _capacity(self, mix: Mix) -> float:
        """Requests a second, each alone: for a mix with turns too, whose later turns have a history, and may find it cached."""
        name = f"capacity-{mix.called.replace(' ', '-') or '_'.join(kind.name for kind in mix.kinds)}"
        if (known := self._kept.get(name)) is None:
            seconds = self._options.pick(12.0, 2.0)
            known, _ = await closed_loop(self._systems[TWO_ENGINES.key].target, mix.lengths, CONCURRENCY, seconds, mix.seed)
            self._kept.put(name, known)
            say(f"{mix.name}: capacity {known:.3g} requests/s")
        return float(known)

    async def _cell(self, mix: Mix, key: str, capacity: float, idle: Mapping[str, Idle], turn: int) -> Cell:
        name = f"cell-{mix.key}-{key}-{turn}"
        if (known := self._kept.get(name)) is not None:
            return Cell(**known)
        duration_s = self._options.pick(min(LONGEST_S, max(SHORTEST_S, WANTED_REQUESTS / (mix.load * capacity))), 4.0)
        seed = mix.seed + len(MIXES) * turn
        load = load_of(mix.workload(capacity), book_of(mix, idle), seed, duration_s, self._options.pick(MIX_WARMUP_S, 1.0))
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
        errors = summary.errors or "no errors"
        say(f"round {turn + 1}: {mix.name}: {key}: {cell.goodput:.3g} of {cell.offered:.3g} requests/s good, {errors}")
        return cell


async def figures(options: Options, chosen: tuple[Mix, ...] = MIXES) -> list[Figure]:
    """Of the chosen mixes. What was measured before an interruption is not measured again."""
    kept = Kept(options.folder / "mixes")
    if len(kept):
        say(f"mixes: going on with {len(kept)} values that were measured before (--fresh: anew)")
    asked = QUICK_MIXES if options.quick else chosen
    await measure_idle(asked, options, kept)
    async with AsyncExitStack() as stack:
        systems = {shape.key: await stack.enter_async_context(running(shape, options)) for shape in SHAPES}
        for system in systems.values():
            await warm_up(system.target, options.pick(4.0, 1.0))
        num_rounds = int(options.pick(ROUNDS, 2))
        mixes = Mixes(systems, options, kept, num_rounds)
        cells: dict[Mix, dict[str, list[Cell]]] = {mix: {} for mix in asked}
        began = time.monotonic()
        for turn in range(num_rounds):
            if turn and (time.monotonic() - began) * (turn + 1) / turn > LIMIT_S:
                break
            for mix, of in cells.items():
                for key, cell in (await mixes.cells(mix, turn)).items():
                    of.setdefault(key, []).append(cell)
    kept.forget()
    return figures_of(cells, MESH.key, {shape.key: shape.name for shape in SHAPES}, FEWEST if asked == MIXES else 1)
