"""How long the endpoint picker takes, on one core, with many endpoints and long prompts; beside a server of the same messages
that looks at nothing, round by round.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from benchmarks.harness import Figure, Options, Process, running, say
from benchmarks.spread import Spread

NUM_ENDPOINTS, RATE, PROMPT_TOKENS = 64, 200.0, 2000
P50_MS, P99_MS = 1.5, 5.0
ROUNDS = 5
PICKER, EMPTY = "picker", "empty"


@contextmanager
def picker(addresses: list[str], core: int, *more: str) -> Iterator[tuple[Process, str]]:
    """One that runs on `core` alone."""
    with running("router.endpoint_picker", "--port", 0, "--endpoints", ",".join(addresses), *more) as process:
        os.sched_setaffinity(process.popen.pid, {core})
        yield process, str(process.hear()["address"])


@contextmanager
def empty(core: int) -> Iterator[tuple[Process, str]]:
    """A server on `core` alone that answers at once."""
    with running("benchmarks.kubernetes.empty_picker") as process:
        os.sched_setaffinity(process.popen.pid, {core})
        yield process, str(process.hear()["address"])


@dataclass
class Rounds:
    """Hold what each round of one server has shown: milliseconds, the share of its core, and the load's own delay."""

    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    share: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    refused: int = 0

    def ask(self, process: Process, address: str, seconds: float) -> str:
        """Load it for a round; return what it has shown."""
        began = process.cpu_s
        arguments = ("--rate", RATE, "--seconds", seconds, "--tokens", PROMPT_TOKENS)
        with running("benchmarks.kubernetes.gateway_load", address, *arguments) as load:
            found = load.hear()
        self.share.append((process.cpu_s - began) / found["seconds"])
        times = sorted(found["ms"])
        self.p50.append(statistics.median(times))
        self.p99.append(times[len(times) * 99 // 100])
        self.late.append(found["late_ms"])
        self.refused += found["refused"]
        times_ms = f"p50 {self.p50[-1]:.3f} ms, p99 {self.p99[-1]:.3f} ms"
        return f"{times_ms}, {self.share[-1]:.0%} of the core, load late {self.late[-1]:.2f} ms"


def figures(options: Options) -> list[Figure]:
    """Rounds of steady load; the picker has a core, load and endpoints have the others."""
    cores = sorted(os.sched_getaffinity(0))
    core, rest = cores[-1], set(cores[:-1]) or set(cores)
    seconds = options.pick(20.0, 3.0)
    of = {PICKER: Rounds(), EMPTY: Rounds()}
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, rest)  # inherited by what is started from here on
    try:
        with running("benchmarks.kubernetes.model_servers", NUM_ENDPOINTS) as servers:
            addresses = servers.hear()["addresses"]
            for number in range(int(options.pick(ROUNDS, 1))):
                with picker(addresses, core) as (process, address):
                    say(f"round {number + 1}: {of[PICKER].ask(process, address, seconds)}")
                with empty(core) as (process, address):
                    say(f"round {number + 1}, empty: {of[EMPTY].ask(process, address, seconds)}")
    finally:
        os.sched_setaffinity(0, before)
    return _shown(of)


def _shown(of: Mapping[str, Rounds]) -> list[Figure]:
    what = f"{NUM_ENDPOINTS} endpoints, prompts of {PROMPT_TOKENS} tokens, {RATE:g} requests/s, one core"
    title = f"endpoint picker, {what}"
    ours, least = of[PICKER], of[EMPTY]
    peer = "a server of the same messages on grpc.aio that answers at once and reads no metrics (limit)"
    p50, p99, share = Spread.of(least.p50).median, Spread.of(least.p99).median, Spread.of(least.share).median
    return [
        _figure(f"{title}: from the end of the body to the endpoint, p50", ours.p50, "ms", P50_MS, p50, peer),
        _figure(f"{title}: p99", ours.p99, "ms", P99_MS, p99, peer),
        _figure(f"{title}: CPU time", ours.share, "cores", None, share, peer),
        Figure(f"{title}: refused", ours.refused, "requests", "lower"),
        Figure("the load's own delay, p99, of the worst round", max(*ours.late, *least.late), "ms", "lower"),
    ]


def _figure(name: str, values: list[float], unit: str, goal: float | None, limit: float, peer: str) -> Figure:
    found = Spread.of(values)
    return Figure(name, found.median, unit, "lower", goal, limit=limit, peer=f"{peer}; {found.in_words}")
