"""Never lose: the mesh under its policy beside the same two cores without separation, mix after mix, all three running.

For each mix first the capacity, from a closed loop that keeps the two one-core engines busy, then the same requests at the same
times to each of the three in turn. Who is not asked sleeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict

from benchmarks.harness import Figure, say
from benchmarks.router.meshes import MESH, TWO_CORES, TWO_ENGINES, Running, running
from benchmarks.router.mix_plan import MIXES, QUICK_MIXES, SEED, Cell, Idle, Kind, Mix, book_of, figures_of
from benchmarks.router.options import Kept, Options
from benchmarks.router.windows import WARMUP_S, alone, closed_loop, load_of, warm_up, window

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
