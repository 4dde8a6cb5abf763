"""What the way back of KV is worth. Conversations whose history the decode worker holds, through a mesh whose
prefill workers fetch it, and through one whose prefill workers compute it; both run, and take turns.

Each turn adds 500 tokens: the `ANSWER` tokens of the last answer, and `QUESTION` tokens behind them. A prefill worker that
computed the turns before lacks the answers alone; one that was started anew lacks everything. The model is SmolLM2-135M.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack

from benchmarks.harness import MODEL, PLAIN_FLAGS, Figure, say
from pdmesh.client.client import AsyncClient
from pdmesh.client.types import Completed
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.models.registry import ensure_model

TURNS, QUESTION, ANSWER = 8, 372, 128
NUM_ROUNDS = 3
NUM_FRESH, FIRST_FRESH = 20, 10_000_000
WITH, WITHOUT = "auto", "off"
FIRST_ID, NUM_IDS = 1000, 40_000


class Conversations:
    """Two meshes of one shape, which differ in whether they fetch KV."""

    def __init__(self, clients: dict[str, AsyncClient], mode: str | None) -> None:
        self._clients = clients
        self._mode = mode
        self._numbers = itertools.count(1 if mode else 1001)
        self.later_s: dict[str, list[float]] = {WITH: [], WITHOUT: []}  # medians of rounds

    async def round(self, order: Sequence[str]) -> None:
        """One conversation through each mesh, the same one."""
        number, answers = next(self._numbers), []
        for name in order:
            ttfts, history = await conversation(self._clients[name], number, TURNS, self._mode)
            self.later_s[name].append(statistics.median(ttfts[1:]))
            answers.append(history)
        if answers[0] != answers[1]:
            raise AssertionError(f"conversation {number} differs between the meshes")

    @property
    def ratio(self) -> float:
        """Return the median ratio of rounds, with ÷ without."""
        pairs = zip(self.later_s[WITH], self.later_s[WITHOUT], strict=True)
        return statistics.median(fetched / computed for fetched, computed in pairs)


async def conversation(client: AsyncClient, number: int, num_turns: int, mode: str | None) -> tuple[list[float], list[int]]:
    """Return the time to first token of each turn, and the whole history."""
    history, ttfts = list[int](), list[float]()
    for turn in range(num_turns):
        history += tokens_of(number * TURNS + turn, QUESTION)
        ttft_s, answer = await ask(client, history, ANSWER, mode)
        ttfts.append(ttft_s)
        history += answer
    return ttfts, history


async def restarted_s(mesh: LocalMesh, client: AsyncClient, number: int) -> float:
    """Return the time to first token of a turn after four others, whose prefill worker has been started anew."""
    _, history = await conversation(client, number, 4, "remote")
    for member in mesh.workers:
        if member.roles == ("prefill",):
            await member.restart(1.0)
    for attempt in itertools.count():  # its first prompt warms it up, and shows that the router knows it
        stream = client.generate_stream(tokens_of(number * 1009 + attempt, 64), mode="remote", max_tokens=2, temperature=0.0)
        async with stream:
            events = [event async for event in stream]
        if isinstance(events[-1], Completed) and events[-1].timings.prefill_worker:
            break
        await asyncio.sleep(0.1)
    ttft_s, _ = await ask(client, [*history, *tokens_of(number * 31, QUESTION)], 8, "remote")
    return ttft_s


def tokens_of(number: int, length: int) -> list[int]:
    """Return tokens that no other number begins with."""
    return [FIRST_ID + (number * 7919 + position * 104_729 + position // 9) % NUM_IDS for position in range(length)]


async def ask(client: AsyncClient, prompt: Sequence[int], num_tokens: int, mode: str | None) -> tuple[float, list[int]]:
    """Return the time to the first token, and all tokens."""
    began, first_s, tokens = time.perf_counter(), 0.0, list[int]()
    options = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True, **({"mode": mode} if mode else {})}
    async with client.generate_stream(list(prompt), **options) as stream:  # type: ignore[arg-type]
        async for event in stream:
            got = getattr(event, "token_ids", ())
            if got and not tokens:
                first_s = time.perf_counter() - began
            tokens += got
    return first_s, tokens


async def fresh_ratios(clients: dict[str, AsyncClient], numbers: Iterable[int]) -> list[float]:
    """Return TTFT with ÷ without, of prompts that no worker has seen."""
    ratios = []
    for number in numbers:
        seconds = {}
        for name in (WITH, WITHOUT) if number % 2 else (WITHOUT, WITH):
            seconds[name], _ = await ask(clients[name], tokens_of(FIRST_FRESH + number * 131, QUESTION), 8, "remote")
        ratios.append(seconds[WITH] / seconds[WITHOUT])
    return ratios


async def figures(num_each: int) -> list[Figure]:
    """Return the figures of meshes with so many workers of each kind."""
    model = ensure_model(MODEL, say)
    shape = f"{num_each} + {num_each}"
    async with AsyncExitStack() as stack:
        clients, meshes = {}, {}
        for name in (WITH, WITHOUT):
            flags = ("--kv-memory-mb", "512", *PLAIN_FLAGS, "--kv-pull", name)
            config = LocalMeshConfig(
                model=str(model), num_prefill=num_each, num_decode=num_each, port=0, restart=False, worker_args=flags
            )
            meshes[name] = mesh = await stack.enter_async_context(LocalMesh(config))
            clients[name] = await stack.enter_async_context(AsyncClient(mesh.router_addresses))
        handed_over, by_policy = Conversations(clients, "remote"), Conversations(clients, None)
        await fresh_ratios(clients, range(4))  # warms up
        for number in range(NUM_ROUNDS):
            order = (WITH, WITHOUT) if number % 2 else (WITHOUT, WITH)
            for conversations in (handed_over, by_policy):
                await conversations.round(order)
            say(f"{shape}, round {number + 1}/{NUM_ROUNDS}: {handed_over.ratio:.3f}, by policy {by_policy.ratio:.3f}")
        fresh = await fresh_ratios(clients, range(4, 4 + NUM_FRESH))
        cold: dict[str, list[float]] = {WITH: [], WITHOUT: []}
        for number in range(NUM_ROUNDS):
            for name in (WITH, WITHOUT) if number % 2 else (WITHOUT, WITH):
                cold[name].append(await restarted_s(meshes[name], clients[name], 50_000 + number))
            say(f"{shape}, restarted {number + 1}/{NUM_ROUNDS}: {cold[WITH][-1]:.3f} s with, {cold[WITHOUT][-1]:.3f} s without")
    ratio = statistics.median(fetched / computed for fetched, computed in zip(cold[WITH], cold[WITHOUT], strict=True))
    name = f"TTFT of a turn after 4, prefill workers started anew, with the way back, of that without it, {shape}"
    found = [Figure(name, round(ratio, 3), "ratio", "lower", goal=0.5)]
    for conversations, how in ((handed_over, "all prompts handed over"), (by_policy, "as the router decides")):
        name = f"TTFT of turns 2 to {TURNS} with the way back, of that without it, {shape}, {how}"
        found.append(Figure(name, round(conversations.ratio, 3), "ratio", "lower", goal=0.5))
        for key, words in ((WITH, "with"), (WITHOUT, "without")):
            milliseconds = round(1000 * statistics.median(conversations.later_s[key]), 1)
            found.append(Figure(f"TTFT of turns 2 to {TURNS} {words} the way back, {shape}, {how}", milliseconds, "ms", "lower"))
    name = f"TTFT of prompts that no worker has seen with the way back, of that without it, {shape}"
    return [*found, Figure(name, round(statistics.median(fresh), 3), "ratio", "lower", goal=1.01)]
