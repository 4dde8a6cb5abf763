"""What a delay in one phase of a request does to the durations of all of them."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness import Figure
from pdmesh.client.client import AsyncClient
from tests.support.traced_mesh import DECODES, PREFILLS, ROUTERS, Traced
from tests.support.traces import REMOTE_SPANS

DELAY_MS = 50
LENGTH, NUM_TOKENS = 20, 3
"""Of the prompts: one step each. Of the answers."""


@dataclass(frozen=True)
class Delay:
    """`point`: a failpoint of these processes, within the phase that `part` is the duration of."""

    part: str
    processes: tuple[str, ...]
    point: str


DELAYS = (
    Delay("route", ROUTERS, "router.route"),
    Delay("admission", ROUTERS, "router.admission"),
    Delay("reserve", DECODES, "decode.reserved"),
    Delay("prefill.queue", PREFILLS, "prefill.accepted"),
    Delay("prefill.compute", PREFILLS, "engine.compute"),
    Delay("first_token_return", ROUTERS, "router.first_token"),
    Delay("kv.exposed", PREFILLS, "push.before_commit"),
    Delay("decode.queue", DECODES, "engine.step"),
)
Parts = Mapping[str, float]
"""Milliseconds by name."""


async def moved(traced: Traced, client: AsyncClient, delay: Delay, repeats: int = 5) -> dict[str, float]:
    """By how much each part is longer with the delay than just before without it: the median of a few pairs."""
    request_ids: list[str] = []
    for _ in range(repeats):
        request_ids.append(await _asked(traced, client))
        traced.arm(delay.processes, delay.point, f"delay:{DELAY_MS}")
        request_ids.append(await _asked(traced, client))
        traced.disarm()
    parts = await _parts(traced, request_ids)
    pairs = list(zip(parts[::2], parts[1::2], strict=True))
    return {name: statistics.median(after[name] - before[name] for before, after in pairs) for name in parts[0]}


async def medians(traced: Traced, client: AsyncClient, repeats: int = 5) -> dict[str, float]:
    """Of a few requests, one after the other."""
    parts = await _parts(traced, [await _asked(traced, client) for _ in range(repeats)])
    return {name: statistics.median(each[name] for each in parts) for name in parts[0]}


async def _asked(traced: Traced, client: AsyncClient) -> str:
    """One separated request, until it is answered; its id."""
    return (await traced.ask(client, length=LENGTH, max_tokens=NUM_TOKENS)).request_id


async def _parts(traced: Traced, request_ids: Sequence[str]) -> list[Parts]:
    traces = await asyncio.gather(*(traced.trace(each, REMOTE_SPANS) for each in request_ids))
    return [trace.ttft_parts_ms() | trace.gap_parts_ms() for trace in traces]


async def figures(traced: Traced, client: AsyncClient, repeats: int) -> list[Figure]:
    """Two for each delay: its own part, and the other one that moved most."""
    found: list[Figure] = []
    for delay in DELAYS:
        parts = await moved(traced, client, delay, repeats)
        found += figures_of(delay, parts)
    return found


def figures_of(delay: Delay, parts: Parts) -> list[Figure]:
    """`parts`: by how much each moved. Pure."""
    other = max((name for name in parts if name != delay.part), key=lambda name: abs(parts[name]))
    name = f"{DELAY_MS} ms in {delay.part}"
    return [
        Figure(f"{name}: it is longer by", round(parts[delay.part], 2), "ms", "higher", goal=0.9 * DELAY_MS),
        Figure(f"{name}: another moves by at most", round(abs(parts[other]), 2), "ms", "lower", goal=DELAY_MS / 2, peer=other),
    ]
