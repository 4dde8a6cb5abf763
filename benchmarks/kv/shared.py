"""System prompts that sessions share, over 4 workers that each prefill and decode: how often a block is computed."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator

from benchmarks.harness import Figure
from benchmarks.kv.conversations import tokens_of
from benchmarks.kv.meshes import num_computed, running
from pdmesh.client.client import AsyncClient

NUM_WORKERS, NUM_PROMPTS, PROMPT, QUESTION, ANSWER = 4, 6, 1024, 48, 24
NUM_REQUESTS = 60
SPACING_S = {"all at once": 0.0, "one every 0.7 s": 0.7}


async def computed_share(spacing_s: float, *, keeps: bool) -> float:
    """Return the tokens that were computed, of the distinct ones: each system prompt once, and each question. A request comes
    every `spacing_s`."""
    async with (
        running("--kv-memory-mb", "256", both=NUM_WORKERS, has_tiers=keeps, fetches=keeps) as mesh,
        AsyncClient(mesh.router_addresses) as client,
    ):
        for number in range(NUM_WORKERS):  # warms up
            await client.generate(tokens_of(900 + number, 64), max_tokens=2, temperature=0.0)
        before = await num_computed(mesh)
        await asyncio.gather(*(_ask(client, prompt, number * spacing_s) for number, prompt in enumerate(_prompts())))
        return (await num_computed(mesh) - before) / (NUM_PROMPTS * PROMPT + NUM_REQUESTS * QUESTION)


def _prompts() -> Iterator[list[int]]:
    """Yield the requests: each system prompt as often as the others, in a drawn order."""
    systems = [tokens_of(1000 + number, PROMPT) for number in range(NUM_PROMPTS)]
    order = [number % NUM_PROMPTS for number in range(NUM_REQUESTS)]
    random.Random(1).shuffle(order)
    for number, system in zip(itertools.count(2000), order, strict=False):
        yield [*systems[system], *tokens_of(number, QUESTION)]


async def _ask(client: AsyncClient, prompt: list[int], after_s: float) -> None:
    await asyncio.sleep(after_s)
    await client.generate(prompt, max_tokens=ANSWER, temperature=0.0, ignore_eos=True)


async def figures() -> list[Figure]:
    found = []
    for words, spacing_s in SPACING_S.items():
        name = f"prompt tokens computed, of the distinct ones: {NUM_PROMPTS} system prompts over {NUM_WORKERS} workers, {words}"
        kept, neither = [await computed_share(spacing_s, keeps=keeps) for keeps in (True, False)]
        found += [
            Figure(f"{name}, fetched and kept", round(kept, 3), "ratio", "lower", goal=1.05, limit=1.0),
            Figure(f"{name}, neither", round(neither, 3), "ratio", "lower"),
        ]
    return found
