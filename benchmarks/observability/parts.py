"""Whether the parts of the time to the first token add up to it, for each of many requests under load."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from benchmarks.harness import Figure
from pdmesh.client.client import AsyncClient
from pdmesh.client.types import Generation
from tests.support.traced_mesh import Traced
from tests.support.traces import LOCAL_SPANS, REMOTE_SPANS, Trace

AT_ONCE = 8
MOST_SHARE, MOST_MS = 0.02, 1.0
"""That may be missing: whichever is more."""


async def under_load(traced: Traced, client: AsyncClient, num_requests: int) -> list[tuple[Generation, Trace]]:
    """Prompts of many lengths, separated and not, `AT_ONCE` at a time; each answer with its trace, which is complete."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> tuple[Generation, Trace]:
        async with gate:
            mode = ("remote", "local")[number % 2]
            result = await traced.ask(client, mode, length=40 + 13 * (number % 17), max_tokens=4)
        return result, await traced.trace(result.request_id, REMOTE_SPANS if mode == "remote" else LOCAL_SPANS)

    return await asyncio.gather(*(one(number) for number in range(num_requests)))


def may_miss_ms(ttft_ms: float) -> float:
    """So much of it may be in no part."""
    return max(MOST_MS, MOST_SHARE * ttft_ms)


def figures(traces: Sequence[Trace]) -> list[Figure]:
    """Of all of them. Pure."""
    missing = {trace: abs(trace.missing_ms) for trace in traces}
    share = sum(ms <= may_miss_ms(trace.ttft_ms) for trace, ms in missing.items()) / len(traces)
    worst = max(missing, key=lambda trace: missing[trace])
    relative = max(ms / trace.ttft_ms for trace, ms in missing.items())
    of = f"{len(traces)} requests, {AT_ONCE} at a time, half of them separated"
    limits = f"requests whose parts of TTFT add up to it within {MOST_SHARE:.0%} or {MOST_MS:g} ms"
    return [
        Figure(limits, round(share, 4), "share", "higher", goal=1.0, peer=of),
        Figure("the most that is missing of a TTFT", round(missing[worst], 3), "ms", "lower", peer=f"of {worst.ttft_ms:.1f} ms"),
        Figure("the most that is missing, of its TTFT", round(100 * relative, 3), "%", "lower"),
    ]
