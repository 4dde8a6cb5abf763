"""Measures the cost curve of this engine on this machine: steps of one sequence with more and more rows.

Before the first request, in about a second on a laptop's model; the blocks that it writes to are nobody's yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from engine.batch import StepBatch
from engine.blocks import num_blocks_for
from engine.runner import ForwardModel, TokenSampler
from engine.sampling import SampleRow
from engine.sampling_params import SamplingParams
from engine.speculation.cost_curve import CostCurve

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
ROUNDS = 8
MAX_S = 2.0
"""Of rounds after the first: a large model is measured once or twice. The best time counts: others had the machine meanwhile."""
LONG_CONTEXT = 512
_GREEDY = SamplingParams(temperature=0.0, max_tokens=1)


def measure_curve(model: ForwardModel, sampler: TokenSampler, kv: Tensor, *, max_context: int, max_rows: int) -> CostCurve:
    """`kv`: the pool, of which nobody has a block. Rounds are interleaved, so that a machine's bad moment meets all points."""
    num_slots = kv.shape[2] * kv.shape[3]
    most = min(max_context, num_slots)
    rows = tuple(r for r in ROWS if r <= min(max_rows, most)) or (1,)
    long = min(LONG_CONTEXT, most)
    few = [r for r in (1, 8) if r <= min(rows[-1], long)]
    points = [(r, r) for r in rows] + [(r, long) for r in few]
    for first in range(0, long, rows[-1]):  # what is attended to is to be there
        run_step(model, sampler, kv, min(rows[-1], long - first), min(first + rows[-1], long))
    seconds = _measure(points, lambda point: run_step(model, sampler, kv, *point))
    short = [seconds[(r, r)] for r in rows]
    curve = CostCurve(rows, _rising(short))
    slopes = [max(0.0, seconds[(r, long)] - curve.step_s(r)) / max(1, long - r) for r in few]
    per_row = (slopes[-1] - slopes[0]) / (few[-1] - few[0]) if len(few) > 1 else 0.0
    return CostCurve(rows, curve.seconds, slopes[0], max(0.0, per_row))


def _measure(points: list[tuple[int, int]], run: Callable[[tuple[int, int]], None]) -> dict[tuple[int, int], float]:
    taken: dict[tuple[int, int], list[float]] = {point: [] for point in points}
    for point in points:
        run(point)  # buffers grow, pages are touched
    started_s = time.monotonic()
    for _ in range(ROUNDS):
        for point in points:
            before_s = time.perf_counter()
            run(point)
            taken[point].append(time.perf_counter() - before_s)
        if time.monotonic() - started_s > MAX_S:
            break
    return {point: min(times) for point, times in taken.items()}


def run_step(model: ForwardModel, sampler: TokenSampler, kv: Tensor, num_rows: int, context: int) -> None:
    """A step of one sequence: its last `num_rows` tokens of a context in the first blocks, and a greedy draw behind each."""
    first, device = context - num_rows, kv.device
    positions = torch.arange(first, context, device=device)
    batch = StepBatch(
        token_ids=torch.zeros(num_rows, dtype=torch.int64, device=device),
        positions=positions,
        slot_mapping=positions.clone(),  # of the first blocks, in order
        query_starts=[0, num_rows],
        context_lens=[context],
        block_tables=[list(range(num_blocks_for(context, kv.shape[3])))],
        logits_rows=torch.arange(num_rows, device=device),
    )
    sampler.sample(model.forward(batch, kv), [_row(index) for index in range(num_rows)])


def _row(index: int) -> SampleRow:
    return SampleRow(_GREEDY, 0, index, (), (), frozenset())


def _rising(seconds: list[float]) -> tuple[float, ...]:
    """More rows never take less: what was measured as if they did is noise."""
    for index in range(len(seconds) - 2, -1, -1):
        seconds[index] = min(seconds[index], seconds[index + 1])
    return tuple(seconds)
