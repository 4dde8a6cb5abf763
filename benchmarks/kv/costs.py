"""What fetching and a disk tier cost where nothing is ever reused: throughput and TTFT of prompts that no worker has seen."""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import AsyncExitStack

from benchmarks.harness import Figure, say
from benchmarks.kv.conversations import ask, tokens_of
from benchmarks.kv.meshes import WITH, WITHOUT, interleaved, running
from pdmesh.client.client import AsyncClient

PROMPT, ANSWER = 256, 32
NUM_ROUNDS, NUM_EACH, NUM_CLIENTS = 12, 12, 4
NUM_ALONE = 24
LEARNING_S = 60.0
"""In which a worker learns that nothing is used again, and begins to write nothing (kvtransfer/tiers/reuse.py)."""


async def figures() -> list[Figure]:
    async with AsyncExitStack() as stack:
        clients = {}
        for name in (WITH, WITHOUT):
            sources = {"has_tiers": name == WITH, "fetches": name == WITH}
            mesh = await stack.enter_async_context(running("--kv-memory-mb", "256", prefill=1, decode=1, **sources))
            clients[name] = await stack.enter_async_context(AsyncClient(mesh.router_addresses))
        began, number = time.monotonic(), -1
        while time.monotonic() < began + LEARNING_S:  # warms up, too
            await _throughputs(clients, number)
            number -= 1
        through = [await _throughputs(clients, number) for number in range(NUM_ROUNDS)]
        say(f"throughput with ÷ without: {[round(each, 3) for each in through]}")
        alone = [await _alone(clients, number) for number in range(NUM_ALONE)]
    words = "with fetching and a disk tier, of that without, where nothing is reused (behind the minute in which that is learned)"
    return [
        Figure(f"throughput {words}", round(statistics.median(through), 3), "ratio", "higher", goal=0.99),
        Figure(f"TTFT {words}", round(statistics.median(alone), 3), "ratio", "lower", goal=1.0),
    ]


async def _throughputs(clients: dict[str, AsyncClient], number: int) -> float:
    """Return requests a second with ÷ without."""
    rates = {}
    for name in interleaved(number):
        began = time.perf_counter()
        await asyncio.gather(*(_several(clients[name], number, client) for client in range(NUM_CLIENTS)))
        rates[name] = NUM_EACH / (time.perf_counter() - began)
    return rates[WITH] / rates[WITHOUT]


async def _several(client: AsyncClient, number: int, which: int) -> None:
    for each in range(NUM_EACH // NUM_CLIENTS):
        await ask(client, tokens_of(10_000 + (number * NUM_CLIENTS + which) * NUM_EACH + each, PROMPT), ANSWER, None)


async def _alone(clients: dict[str, AsyncClient], number: int) -> float:
    seconds = {}
    for name in interleaved(number):
        seconds[name], _ = await ask(clients[name], tokens_of(3_000_000 + number * 131, PROMPT), 4, "remote")
    return seconds[WITH] / seconds[WITHOUT]
