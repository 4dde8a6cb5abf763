"""Samples and ledger to figures, and to what went wrong in words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.harness import Figure
from tests.soak.ledger import Ledger
from tests.soak.samples import FEWEST, MAX_GROWTH, MAX_SLOPE, Flatness, Sample, flatness, growth
from tests.soak.traffic import NUM_FILLING

_SAMPLES_A_ROW = 6
_MORE_FDS, _MORE_THREADS = 16, 4  # median of the last third over that of the first: pools fill, connections come and go


@dataclass
class Soak:
    """A run. `leaks`: what was not given back when nobody asked any more, or was left after the end; `deaths`: in words."""

    ledger: Ledger
    samples: list[Sample]
    seconds: float
    leaks: list[str] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Of the processes."""
        return list(self.samples[0].processes)

    @property
    def flatness(self) -> dict[str, Flatness]:
        """Of each process's own memory, and of what they share; nothing if it was over before anything can be said."""
        if len(self.samples) < FEWEST:
            return {}
        requests = [sample.num_requests for sample in self.samples]
        return {name: flatness(requests, [sample.memory[name] for sample in self.samples]) for name in self.samples[0].memory}

    @property
    def problems(self) -> list[str]:
        """Everything that is wrong."""
        ledger = self.ledger
        problems = [*ledger.problems, *self.deaths, *self.leaks]
        if not self.flatness:
            problems.append(f"{len(self.samples)} samples are too few to say whether memory grows; let it run longer")
        problems += [f"memory of {name} {problem}" for name, flat in self.flatness.items() for problem in flat.problems]
        for what, counts in self._counted().items():
            problems += _more(what, counts, _MORE_THREADS if what.startswith("threads") else _MORE_FDS)
        if not ledger.counts["refused in a burst"]:
            problems.append("no burst was refused: admission has not been tried")
        return problems

    def figures(self) -> list[Figure]:
        """The whole run."""
        ledger = self.ledger
        figures = [
            Figure("requests", ledger.num_requests, "requests", "higher"),
            Figure("duration", round(self.seconds), "s", "higher", goal=4 * 3600),
            Figure("rate", round((ledger.num_requests - NUM_FILLING) / self.seconds, 1), "requests/s", "higher"),
            Figure("errors that no client caused", ledger.num_problems + len(self.deaths), "errors", "lower", goal=0),
            Figure("left behind: blocks, requests, processes, sockets, segments", len(self.leaks), "kinds", "lower", goal=0),
            Figure("answers compared with the first of the same request", ledger.num_compared, "answers", "higher"),
        ]
        figures += [Figure(f"requests: {end}", count, "requests", "higher") for end, count in sorted(ledger.counts.items())]
        figures += [
            Figure(f"requests over {side}", count, "requests", "higher") for side, count in sorted(ledger.by_side.items())
        ]
        for name, flat in self.flatness.items():
            figures += _memory_figures(name, flat)
        for what, counts in self._counted().items():
            value = growth([sample.num_requests for sample in self.samples], counts)
            figures.append(Figure(f"{what}: growth, last half", round(value * 100, 2), "%", "lower", goal=MAX_GROWTH * 100))
        return figures

    def _counted(self) -> dict[str, list[int]]:
        """Open files and threads of each process, at each sample; nothing if it was over before anything can be said."""
        if len(self.samples) < FEWEST:
            return {}
        counted = {}
        for name in self.names:
            counted[f"open files of {name}"] = [sample.processes[name].num_fds for sample in self.samples]
            counted[f"threads of {name}"] = [sample.processes[name].num_threads for sample in self.samples]
        return counted

    def table(self) -> list[str]:
        """A sample a minute, for the log: memory in MB, then open files and threads, and blocks in use and cached."""
        return [_header(self.samples[0]), *(_row(sample) for sample in self.samples[::_SAMPLES_A_ROW])]


def _memory_figures(name: str, flat: Flatness) -> list[Figure]:
    label = "shared memory of all" if name == "shared" else f"memory of {name}"
    unit = "MB"
    return [
        Figure(f"{label}: slope, last two thirds", round(flat.slope, 3), "MB per 1000 requests", "lower", goal=MAX_SLOPE),
        Figure(f"{label}: growth, last half", round(flat.growth * 100, 2), "%", "lower", goal=MAX_GROWTH * 100),
        Figure(f"{label}: median of the first third", round(flat.first_third, 1), unit, "lower"),
        Figure(f"{label}: median of the last third", round(flat.last_third, 1), unit, "lower"),
        Figure(f"{label}: peak", round(flat.peak, 1), unit, "lower"),
    ]


def _header(sample: Sample) -> str:
    processes = [f"{name} {what}" for name in sample.processes for what in ("files", "threads")]
    pools = [f"{name} {what}" for name in sample.pools for what in ("used", "cached")]
    return "; ".join(["s", "requests", *sample.memory, *processes, *pools, "in flight", "queued", "redis data", "/dev/shm"])


def _row(sample: Sample) -> str:
    processes = [count for process in sample.processes.values() for count in (process.num_fds, process.num_threads)]
    pools = [count for pool in sample.pools.values() for count in (pool.num_total - pool.num_free, pool.num_cached)]
    memory = [round(value, 1) for value in sample.memory.values()]
    counts = [sample.num_inflight, sample.num_queued, round(sample.redis, 2), sample.num_segments]
    return "; ".join(map(str, [sample.at_s, sample.num_requests, *memory, *processes, *pools, *counts]))


def _more(what: str, values: Sequence[int], allowed: int) -> list[str]:
    third = max(1, len(values) // 3)
    first, last = statistics.median(values[:third]), statistics.median(values[-third:])
    return [f"{what} went from {first:g} to {last:g}"] if last > first + allowed else []
