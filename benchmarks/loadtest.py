"""`make bench-loadtest`: what the load test reports of a server whose latencies are known exactly, at 500 requests a second.

The server (loadtest_stub.py, a process of its own) draws the latency of each request from a lognormal distribution with a seed,
so the true quantiles are computed here from the same seed and the plan: no measurement is compared with another. With a stall
the server answers nothing for a second in the middle; with a freeze it is stopped (SIGSTOP) for a second, sockets and all. Then
it has 500 requests to take in at once, and its answers wait for that: there the truth is when tokens left the server, by its
own clock. What a closed loop would report stands beside it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field

import httpx

from benchmarks.harness import Figure, parser_of, say, write
from pdmesh.loadtest.arrivals import fixed
from pdmesh.loadtest.record import ObjectiveBook, Objectives, Outcome
from pdmesh.loadtest.runner import RunLog, Runner, RunSettings
from pdmesh.loadtest.stats import Latency, Window, quantile, summarise
from pdmesh.loadtest.targets.grpc import GrpcSettings, GrpcTarget
from pdmesh.loadtest.targets.openai import OpenAiSettings, OpenAiTarget
from pdmesh.loadtest.targets.target import Target
from pdmesh.loadtest.workload import Arrivals, PlannedSession, TrafficClass, Workload, plan
from tests.support.loadtest_stub import Latencies

RATE, DURATION_S, WARMUP_S = 500.0, 20.0, 2.0
INPUT_TOKENS, OUTPUT_TOKENS = 64, 4
STALL_AT_S, STALL_S = 10.0, 1.0
GOAL = 0.02
# Of the closed loop: so many clients that wait for each answer carry 500 requests a second without a stall.
CLOSED_CLIENTS = 170
SEED = 11


@dataclass(frozen=True)
class Case:
    """A protocol, and what the server does in the middle."""

    kind: str
    disturbance: str

    @property
    def latencies(self) -> Latencies:
        return Latencies(stall_at_s=STALL_AT_S, stall_s=STALL_S) if self.disturbance == "stall" else Latencies()


@dataclass
class Server:
    """The stub's process; known after its end: `started`, when its first request arrived, and `left`, when the first and the last
    token of each request left."""

    process: subprocess.Popen[str]
    address: str
    started: float = 0.0
    left: Mapping[int, tuple[float, float]] = field(default_factory=dict)


@asynccontextmanager
async def serving(case: Case) -> AsyncIterator[Server]:
    """A stub for the case."""
    given = {name: value for name, value in asdict(case.latencies).items() if value != float("inf")}
    command = [sys.executable, "-m", "tests.support.loadtest_stub", case.kind, "--latencies", json.dumps(given)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)  # noqa: ASYNC220 - before any load
    assert process.stdin is not None and process.stdout is not None
    try:
        server = Server(process, (await asyncio.to_thread(process.stdout.readline)).strip())
        yield server
        process.stdin.close()
        server.started = float(await asyncio.to_thread(process.stdout.readline))
        left = json.loads(await asyncio.to_thread(process.stdout.readline))
        server.left = {int(number): (first_s, last_s) for number, (first_s, last_s) in left.items()}
    finally:
        process.kill()
        process.wait()


def open_target(case: Case, address: str) -> Target:
    return GrpcTarget(address, GrpcSettings()) if case.kind == "grpc" else OpenAiTarget(address, OpenAiSettings())


def sessions() -> list[PlannedSession]:
    """10 000 requests and those of the warm-up."""
    traffic = TrafficClass(input_tokens=fixed(INPUT_TOKENS), output_tokens=fixed(OUTPUT_TOKENS))
    return list(plan(Workload(Arrivals(rate=RATE), (traffic,)), SEED, WARMUP_S + DURATION_S))


async def freeze(process: subprocess.Popen[str]) -> None:
    """Stops a process for STALL_S."""
    await asyncio.sleep(STALL_AT_S)
    os.kill(process.pid, signal.SIGSTOP)
    await asyncio.sleep(STALL_S)
    os.kill(process.pid, signal.SIGCONT)


async def run(case: Case) -> tuple[RunLog, dict[str, list[float]]]:
    """One run, and the truth about it."""
    async with serving(case) as server:
        target = open_target(case, server.address)
        try:
            await target.check()
            runner = Runner(target, RunSettings())
            frozen = asyncio.create_task(freeze(server.process)) if case.disturbance == "freeze" else None
            log = await runner.run(sessions())
        finally:
            await target.close()
    if frozen is None:
        return log, truth(case.latencies, server.started - log.started_at, sessions())
    await frozen
    return log, truth_by_the_server(server.left, log.started_at, sessions())


def truth_by_the_server(
    left: Mapping[int, tuple[float, float]], started_at: float, planned: Sequence[PlannedSession]
) -> dict[str, list[float]]:
    """Sorted TTFT and end-to-end latencies, in seconds since a request was due, of when tokens left a server. `started_at`: the
    run, by the server's clock."""
    due = {s.index: started_at + s.at_s for s in planned if s.at_s >= WARMUP_S}
    return {
        "TTFT": sorted(left[index][0] - at_s for index, at_s in due.items()),
        "end to end": sorted(left[index][1] - at_s for index, at_s in due.items()),
    }


def truth(latencies: Latencies, offset: float, planned: Sequence[PlannedSession]) -> dict[str, list[float]]:
    """Sorted TTFT and end-to-end latencies, in seconds, of requests that arrive when they are due. `offset`: when the server's
    clock started, in seconds since the run did."""
    times = {s.at_s: latencies.token_times(s.index, s.at_s - offset, OUTPUT_TOKENS) for s in planned if s.at_s >= WARMUP_S}
    return {
        "TTFT": sorted(tokens[0] + offset - at_s for at_s, tokens in times.items()),
        "end to end": sorted(tokens[-1] + offset - at_s for at_s, tokens in times.items()),
    }


def closed_loop(latencies: Latencies) -> list[float]:
    """TTFT that CLOSED_CLIENTS clients see (computed: each sends its next request when the last is answered)."""
    free, seen = [0.0] * CLOSED_CLIENTS, []
    for number in range(int(RATE * (WARMUP_S + DURATION_S))):
        client = min(range(CLOSED_CLIENTS), key=free.__getitem__)
        sent = free[client]
        times = latencies.token_times(number, sent, OUTPUT_TOKENS)
        free[client] = times[-1]
        if sent >= WARMUP_S:
            seen.append(times[0] - sent)
    return sorted(seen)


async def case_figures(case: Case) -> list[Figure]:
    """p50 and p99 as reported, and how far they are from the truth."""
    before = time.process_time()
    log, true = await run(case)
    cpu_s = time.process_time() - before
    window = Window(WARMUP_S, WARMUP_S + DURATION_S)
    summary = summarise(log.records, window, ObjectiveBook(Objectives()))
    assert summary.outcomes == {Outcome.OK.value: summary.num_requests}, (summary.outcomes, summary.errors)
    label = f"{case.kind}, {case.disturbance}" if case.disturbance else case.kind
    figures = []
    for name, latency in (("TTFT", summary.ttft), ("end to end", summary.e2e)):
        for q, reported in ((0.5, latency.p50), (0.99, latency.p99)):
            exact = 1e3 * quantile(true[name], q)
            error = abs(reported - exact) / exact
            say(f"{label}: {name} p{100 * q:g} {reported:.1f} ms, true {exact:.1f} ms: {100 * error:.2f} % off")
            figures.append(Figure(f"{label}: {name} p{100 * q:g}, reported", reported, "ms", "lower", limit=exact))
            figures.append(Figure(f"{label}: {name} p{100 * q:g}, off the truth by", 100 * error, "%", "lower", goal=100 * GOAL))
    lateness = Latency.of(record.lateness_s for record in log.records if window.holds(record))
    figures.append(Figure(f"{label}: requests sent late by, p50", lateness.p50, "ms", "lower"))
    figures.append(Figure(f"{label}: requests sent late by, p99", lateness.p99, "ms", "lower"))
    figures.append(Figure(f"{label}: processor time of a request", 1e3 * cpu_s / len(log.records), "ms", "lower"))
    return figures


async def httpx_cpu_ms(num: int = 1000, in_flight: int = 125) -> float:
    """Processor time of a streamed request with httpx, with as many in flight as 500 a second have, in milliseconds."""
    async with serving(Case("http", "")) as server, httpx.AsyncClient(limits=httpx.Limits(max_connections=None)) as client:
        body = {"max_tokens": OUTPUT_TOKENS, "prompt": [1000] * INPUT_TOKENS}
        places = asyncio.Semaphore(in_flight)

        async def one(number: int) -> None:
            headers = {"X-Request-Id": f"x-{number}-0"}
            async with places, client.stream("POST", f"{server.address}/completions", json=body, headers=headers) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        json.loads(line[6:])

        before = time.process_time()
        await asyncio.gather(*(one(number) for number in range(num)))
        return 1e3 * (time.process_time() - before) / num


async def main() -> None:
    load_before, real_time = os.getloadavg()[0], os.sched_getscheduler(0) == os.SCHED_RR
    figures: list[Figure] = []
    for disturbance in ("", "stall", "freeze"):
        for kind in ("grpc", "http"):
            figures += await case_figures(Case(kind, disturbance))
    stalled = Case("grpc", "stall").latencies
    closed = 1e3 * quantile(closed_loop(stalled), 0.99)
    figures.append(
        Figure("stall: TTFT p99 that a closed loop reports", closed, "ms", "lower", peer=f"{CLOSED_CLIENTS} waiting clients")
    )
    figures.append(Figure("processor time of a streamed request with httpx", await httpx_cpu_ms(), "ms", "lower", peer="httpx"))
    # Another load on the machine would be measured as latency of the server: whoever reads the result may want to know of it.
    circumstances = {"real_time": real_time, "load_average_before": load_before}
    settings = {"rate": RATE, "output_tokens": OUTPUT_TOKENS, "duration_s": DURATION_S, "stall_s": STALL_S}
    write("loadtest", figures, **settings, **circumstances)


if __name__ == "__main__":
    parser_of("benchmarks.loadtest", __doc__).parse_args()
    asyncio.run(main())
