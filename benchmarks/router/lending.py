"""What cores that workers lend each other bring: one prefill and one decode worker of a core each, with them and without, beside
one worker with both roles on the same two cores. All three run; who is not asked sleeps. They are asked in turn, in either order.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from benchmarks.harness import Figure, Options, say
from benchmarks.router.meshes import SEPARATED, TWO_CORES, WARMUP_S, Running, alone, call, running, warm_up
from benchmarks.spread import Spread

LENDING = replace(SEPARATED, key="lending", name="separated, idle cores are lent")
DIVIDED = replace(SEPARATED, key="divided", name="separated, each keeps its core", lend_cores=False)
# One prompt alone needs the decode worker's core; streams without prompts need the prefill worker's.
PROMPT_TOKENS, STREAMS, STREAM_PROMPT_TOKENS = 420, 8, 32
TURNS = 9


@dataclass(frozen=True)
class Turn:
    """One mesh in one turn: seconds to the first token of a prompt alone, and tokens a second of all streams."""

    ttft_s: float
    tokens_per_s: float


async def measured(one: Running, seed: int, num_tokens: int) -> Turn:
    """Asks for both. Raises RuntimeError where a request fails."""
    ttft_s, _ = await alone(one.target, PROMPT_TOKENS, 8, seed, rounds=2)
    calls = await asyncio.gather(
        *(call(one.target, f"stream-{number}", STREAM_PROMPT_TOKENS, num_tokens, seed) for number in range(STREAMS))
    )
    if failed := [each.error for each in calls if each.error]:
        raise RuntimeError(f"{one.shape.name}: {failed[0]}")
    took_s = max(each.times[-1] for each in calls) - min(each.times[0] for each in calls)
    return Turn(ttft_s, sum(each.num_tokens for each in calls) / took_s)


async def figures(options: Options) -> list[Figure]:
    """Measures the three in turn."""
    turns: dict[str, list[Turn]] = {shape.key: [] for shape in (TWO_CORES, LENDING, DIVIDED)}
    async with AsyncExitStack() as stack:
        meshes = [await stack.enter_async_context(running(shape, options)) for shape in (TWO_CORES, LENDING, DIVIDED)]
        for one in meshes:
            await warm_up(one.target, options.pick(WARMUP_S, 1.0))
        for turn in range(int(options.pick(TURNS, 2))):
            for one in meshes if turn % 2 == 0 else meshes[::-1]:
                found = await measured(one, turn, int(options.pick(96, 16)))
                turns[one.shape.key].append(found)
                say(f"{one.shape.name}: TTFT {found.ttft_s:.3f} s, {found.tokens_per_s:.0f} tokens/s")
    return of(turns)


def of(turns: dict[str, list[Turn]]) -> list[Figure]:
    """Return ratios to one worker with both roles, turn by turn. Pure."""
    both = turns[TWO_CORES.key]
    found = []
    for shape in (LENDING, DIVIDED):
        own = list(zip(turns[shape.key], both, strict=True))
        ttft = Spread.of(mine.ttft_s / theirs.ttft_s for mine, theirs in own)
        rate = Spread.of(mine.tokens_per_s / theirs.tokens_per_s for mine, theirs in own)
        prompt = f"{shape.name}: TTFT of a prompt of {PROMPT_TOKENS} alone, over both roles on two cores"
        streams = f"{shape.name}: tokens/s of {STREAMS} streams, over both roles on two cores"
        found += [
            Figure(prompt, ttft.median, "ratio", "lower", peer=ttft.in_words),
            Figure(streams, rate.median, "ratio", "higher", peer=rate.in_words),
        ]
    return found
