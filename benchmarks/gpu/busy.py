"""Which share of the time some kernel or copy runs, as the profiler sees it: gaps between a graph's kernels count as idle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.gpu.steady import started
from pdmesh.engine.engine import Engine

STEPS = 50
Span = tuple[float, float]


def covered_share(spans: Sequence[Span]) -> float:
    """Of the time from the first beginning to the last end, that in which at least one span lies; 0 for none."""
    if not spans:
        return 0.0
    ordered = sorted(spans)
    covered, end = 0.0, ordered[0][0]
    for first, last in ordered:
        covered += max(0.0, last - max(first, end))
        end = max(end, last)
    return covered / (end - ordered[0][0]) if end > ordered[0][0] else 0.0


def traced_share(engine: Engine, device: str, *, batch: int, prompt: int) -> float | None:
    """Over some steps of an engine; None where there is no GPU, or its profiler does not answer."""
    if device != "cuda":
        return None
    names = started(engine, batch, prompt, 2 * STEPS)
    try:
        spans = _trace(engine)
    except RuntimeError:
        spans = []
    for name in names:
        engine.release(name)
    while engine.step() is not None:
        """What was launched ahead comes to its end."""
    return covered_share(spans) if spans else None


def _trace(engine: Engine) -> list[Span]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize()
    events = profile.events() or []
    return [(e.time_range.start, e.time_range.end) for e in events if e.device_type.name == "CUDA"]
