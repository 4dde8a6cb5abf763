"""How long the endpoint picker takes, on one core, with many endpoints and long prompts."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.harness import Figure, Options, Process, running, say

NUM_ENDPOINTS, RATE, PROMPT_TOKENS = 64, 200.0, 2000
P50_MS, P99_MS = 1.5, 5.0
ROUNDS = 5
_READY_S = 60.0


@contextmanager
def picker(addresses: list[str], core: int, *more: str) -> Iterator[tuple[Process, str]]:
    """One that runs on `core` alone."""
    with running("router.endpoint_picker", "--port", 0, "--endpoints", ",".join(addresses), *more) as process:
        os.sched_setaffinity(process.popen.pid, {core})
        yield process, str(process.hear()["address"])


def figures(options: Options) -> list[Figure]:
    """Rounds of steady load; the picker has a core, load and endpoints have the others."""
    cores = sorted(os.sched_getaffinity(0))
    core, rest = cores[-1], set(cores[:-1]) or set(cores)
    seconds = options.pick(20.0, 3.0)
    p50: list[float] = []
    p99: list[float] = []
    share: list[float] = []
    late: list[float] = []
    refused = 0
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, rest)  # inherited by what is started from here on
    try:
        with running("benchmarks.kubernetes.model_servers", NUM_ENDPOINTS) as servers:
            addresses = servers.hear()["addresses"]
            for number in range(int(options.pick(ROUNDS, 1))):
                with picker(addresses, core) as (process, address):
                    arguments = ("--rate", RATE, "--seconds", seconds, "--tokens", PROMPT_TOKENS)
                    began = process.cpu_s
                    with running("benchmarks.kubernetes.gateway_load", address, *arguments) as load:
                        found = load.hear()
                    share.append((process.cpu_s - began) / found["seconds"])
                times = sorted(found["ms"])
                p50.append(statistics.median(times))
                p99.append(times[len(times) * 99 // 100])
                late.append(found["late_ms"])
                refused += found["refused"]
                times_ms = f"p50 {p50[-1]:.3f} ms, p99 {p99[-1]:.3f} ms"
                say(f"round {number + 1}: {times_ms}, {share[-1]:.0%} of the core, load late {late[-1]:.2f} ms")
    finally:
        os.sched_setaffinity(0, before)
    what = f"{NUM_ENDPOINTS} endpoints, prompts of {PROMPT_TOKENS} tokens, {RATE:g} requests/s, one core"
    return [
        Figure(
            f"endpoint picker, {what}: from the end of the body to the endpoint, p50",
            statistics.median(p50),
            "ms",
            "lower",
            P50_MS,
        ),
        Figure(f"endpoint picker, {what}: p99", statistics.median(p99), "ms", "lower", P99_MS),
        Figure(f"endpoint picker, {what}: CPU time", statistics.median(share), "cores", "lower", limit=1.0),
        Figure(f"endpoint picker, {what}: refused", refused, "requests", "lower"),
        Figure("the load's own delay, p99, of the worst round", max(late), "ms", "lower"),
    ]
