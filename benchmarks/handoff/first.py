"""The first hand-off after a start beside the ones that follow: what it takes besides the prefill, over several starts."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

from benchmarks.engine_runs import prompt
from benchmarks.handoff.exposed import LINKS, Link, running
from benchmarks.harness import Figure, say
from benchmarks.spread import Spread
from pdmesh.models.registry import DEFAULT_MODEL, ensure_model

NUM_TOKENS, NUM_LATER = 500, 5
MAX_RATIO = 1.1  # "no more than the others", within what they differ from each other


def first_figures(rounds: int) -> list[Figure]:
    """On SmolLM2, over the links of this host; as many starts of both workers as `rounds`, five at least."""
    return asyncio.run(_measure_links(ensure_model(DEFAULT_MODEL), max(5, rounds)))


async def _measure_links(model: Path, num_starts: int) -> list[Figure]:
    figures = []
    for link in LINKS:
        if not link.is_remote:
            figures += _figures_of(link, [await _first_and_later(model, link) for _ in range(num_starts)])
    return figures


async def _first_and_later(model: Path, link: Link) -> tuple[float, float]:
    """Seconds from Submit to decode's commit, without those in which the prefill was computed: the engine's first step is no part
    of the hand-off. Of the first one, and the median of later ones."""
    async with running(model, link) as pair:
        seconds = []
        for seed in range(1 + NUM_LATER):
            await pair.hand_off(prompt(seed, NUM_TOKENS), push=True)
            seconds.append(pair.beside_s)
    first, later = seconds[0], statistics.median(seconds[1:])
    say(f"{link.name}: the first hand-off after a start takes {first * 1e3:.2f} ms, later ones {later * 1e3:.2f} ms")
    return first, later


def _figures_of(link: Link, starts: list[tuple[float, float]]) -> list[Figure]:
    name = f"{link.name}, {NUM_TOKENS} tokens: hand-off without its compute, the first one after a start"
    ratio = Spread.of(first / later for first, later in starts)
    first, later = (statistics.median(1e3 * each[index] for each in starts) for index in (0, 1))
    return [
        Figure(name, first, "ms", "lower", limit=later, peer="the later ones"),
        Figure(f"{name} / later ones", ratio.median, "x", "lower", goal=MAX_RATIO, peer=ratio.in_words),
    ]
