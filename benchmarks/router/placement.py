"""Conversations that share system prompts, on four workers whose KV pools hold a part of them: the policy beside round-robin.

Both meshes run throughout and are asked the same in turn, round after round with fresh words; the first seconds of a round, in
which nobody can have anything, do not count.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import count, takewhile

from benchmarks.harness import Figure, Options, say
from benchmarks.router.meshes import MESH, closed_loop, load_of, running, warm_up, window, with_policy
from pdmesh.client.client import AsyncClient
from pdmesh.loadtest import arrivals
from pdmesh.loadtest.arrivals import Distribution
from pdmesh.loadtest.record import ObjectiveBook, Objectives, Record
from pdmesh.loadtest.stats import Latency
from pdmesh.loadtest.workload import Arrivals, PlannedSession, PlannedTurn, Segment, TrafficClass, Workload
from pdmesh.v1.mesh_pb2 import GetStatusResponse

# What the policy predicts when it places a request, beside what came, after a minute of mixed traffic.


TTFT_GOAL, TPOT_GOAL = 0.10, 0.08
NUM_REQUESTS, QUICK_S, LONGEST_S = 60, 8.0, 300.0
SHARE, MOST_PER_S = 0.4, 1.0
"""The rate is this share of what the machine bears in a closed loop, and at most so many requests a second: queues that only grow
would be all that is predicted."""
CONCURRENCY = 8
TYPICAL = ((166, 80), (166, 80), (166, 80), (600, 40), (600, 40), (1700, 40))
TRAFFIC = Workload(
    arrivals=Arrivals(rate=MOST_PER_S),
    classes=(
        TrafficClass(
            "chat", 3, input_tokens=Distribution("uniform", (32, 300)), output_tokens=Distribution("uniform", (32, 128))
        ),
        TrafficClass(
            "task", 2, input_tokens=Distribution("uniform", (300, 900)), output_tokens=Distribution("uniform", (16, 64))
        ),
        TrafficClass(
            "paper", 1, input_tokens=Distribution("uniform", (900, 2500)), output_tokens=Distribution("uniform", (16, 64))
        ),
    ),
)


def prediction_figures_of(status: GetStatusResponse) -> list[Figure]:
    """Medians as the router has them, and how well the workers' own models fit their steps. Pure."""
    seen = status.prediction
    compared = "median of |predicted - observed| / observed"
    ttft = seen.ttft_error if seen.num_requests else "no request was compared"
    tpot = seen.tpot_error if seen.num_requests else "no request was compared"
    listed = [
        Figure(f"TTFT predicted when the request was placed: {compared}", ttft, "share", "lower", TTFT_GOAL),
        Figure(f"TPOT predicted when the request was placed: {compared}", tpot, "share", "lower", TPOT_GOAL),
        Figure("TTFT predicted: bias, median of (predicted - observed) / observed", seen.ttft_bias, "share", "lower"),
        Figure("TPOT predicted: bias, median of (predicted - observed) / observed", seen.tpot_bias, "share", "lower"),
        Figure("requests compared", seen.num_requests, "requests", "higher"),
    ]
    for worker in status.workers:
        if worker.load.HasField("latency_model"):
            name, model = worker.info.worker_id, worker.load.latency_model
            listed += [
                Figure(f"{name}: step with prompt tokens: {compared}", model.prefill_error, "share", "lower"),
                Figure(f"{name}: step without prompt tokens: {compared}", model.decode_error, "share", "lower"),
                Figure(f"{name}: steps that its model was fitted to", model.num_steps, "steps", "higher"),
            ]
    return listed


async def prediction_figures(options: Options) -> list[Figure]:
    """Some minutes of traffic, then what the router says of it."""
    async with running(MESH, options) as system:
        await warm_up(system.target, 1.0)
        capacity, _ = await closed_loop(system.target, TYPICAL, CONCURRENCY, options.pick(20.0, 2.0), seed=50)
    async with running(MESH, options) as system:  # another one: those requests are not to be compared
        await warm_up(system.target, 1.0)
        rate = min(MOST_PER_S, SHARE * capacity)
        traffic = replace(TRAFFIC, arrivals=Arrivals(rate=rate))
        seconds = options.pick(min(LONGEST_S, NUM_REQUESTS / rate), QUICK_S)
        load = load_of(traffic, ObjectiveBook(Objectives()), 51, seconds, warmup_s=0.0)
        summary = (await window(system.target, load)).summary
        say(f"prediction: {summary.num_requests} requests, {dict(summary.outcomes)}")
        asked = Figure("prediction: requests asked", rate, "1/s", "higher", limit=capacity)
        async with AsyncClient(system.mesh.router_address) as client:
            return [*prediction_figures_of(await client.status(timeout=5.0)), asked]


NUM_PROMPTS, PROMPT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS, TURNS = 16, 1000, 60, 24, 4
SESSIONS_PER_S, THINK_S = 0.25, 1.0
# Of 16 tokens: a third of the system prompts fit into one pool, all into the four together, with the conversations on them.
NUM_BLOCKS = 400
OURS, THEIRS = "predict", "round-robin"
GOAL = 2.0
SHAPE = replace(
    MESH, key="prefix", name="four workers", num_both=4, kv_memory_mb=0, worker_args=("--num-blocks", str(NUM_BLOCKS))
)


def conversations(seed: int, duration_s: float) -> Iterator[PlannedSession]:
    """Those that start within so many seconds, each of TURNS turns on one of the system prompts. Pure."""
    rng = random.Random(f"{seed}/conversations")
    starts = takewhile(lambda at_s: at_s < duration_s, arrivals.poisson(SESSIONS_PER_S, rng))
    for index, at_s in zip(count(), starts, strict=False):
        system = Segment(f"system{rng.randrange(NUM_PROMPTS)}", PROMPT_TOKENS)
        questions = [Segment(f"{index}.{turn}", QUESTION_TOKENS) for turn in range(TURNS)]
        first = PlannedTurn(0.0, (system, questions[0]), ANSWER_TOKENS)
        later = [PlannedTurn(rng.expovariate(1 / THINK_S), (question,), ANSWER_TOKENS) for question in questions[1:]]
        yield PlannedSession(index, at_s, TrafficClass(), (first, *later))


def figures_of(records: Mapping[str, Sequence[Record]]) -> list[Figure]:
    """By policy. Pure. Raises ValueError where a policy has no answers."""
    ttft = {policy: Latency.of(record.ttft_s for record in listed) for policy, listed in records.items()}
    if silent := [policy for policy, latency in ttft.items() if not latency.num_values]:
        raise ValueError(f"{silent[0]}: nothing was answered")
    what = f"{NUM_PROMPTS} system prompts of {PROMPT_TOKENS} tokens, conversations of {TURNS} turns"
    times = ttft[THEIRS].p50 / ttft[OURS].p50
    return [Figure(f"{what}: TTFT p50, {THEIRS} over {OURS}", times, "times", "higher", GOAL, peer=THEIRS), *each(what, records)]


def each(what: str, records: Mapping[str, Sequence[Record]]) -> Iterator[Figure]:
    """Yield TTFT, cached tokens and turns of each way of placing. Pure."""
    for name, listed in records.items():
        latency = Latency.of(record.ttft_s for record in listed)
        cached = sum(record.cached_tokens for record in listed)
        share = cached / max(1, sum(record.input_tokens for record in listed))
        yield Figure(f"{what}: {name}: TTFT p50", latency.p50, "ms", "lower")
        yield Figure(f"{what}: {name}: TTFT p99", latency.p99, "ms", "lower")
        yield Figure(f"{what}: {name}: prompt tokens from caches", share, "share", "higher")
        yield Figure(f"{what}: {name}: turns", latency.num_values, "turns", "higher")


async def figures(options: Options) -> list[Figure]:
    """Two rounds of each policy, in turn."""
    records: dict[str, list[Record]] = {OURS: [], THEIRS: []}
    warmup_s, duration_s = options.pick(20.0, 4.0), options.pick(45.0, 5.0)
    async with AsyncExitStack() as stack:
        systems = {policy: await stack.enter_async_context(running(with_policy(SHAPE, policy), options)) for policy in records}
        for round_number in range(int(options.pick(2, 1))):
            for policy, system in systems.items():
                await warm_up(system.target, 1.0)
                seed = 71 + round_number
                load = load_of(Workload(), ObjectiveBook(Objectives()), seed, duration_s, warmup_s)
                seen = await window(system.target, load, conversations(seed, warmup_s + duration_s))
                records[policy] += seen.counted
                say(f"{policy}: TTFT p50 {seen.summary.ttft.p50:.4g} ms, {dict(seen.summary.outcomes)}")
    return figures_of(records)
