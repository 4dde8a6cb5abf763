"""Calibration: measures the cost curve of this engine on this machine by steps of one sequence with more and more rows.

It runs before the first request, in a second or two; the blocks that it writes to are still free. A large model takes longer for
each step, so fewer points are measured: the few most important ones first, then those that halve the gaps between them. Later
steps correct the curve (speculator.py), so a point that is missing, or was measured on a busy machine, does little harm.

The next start reads the curve from the cache folder, and measures again only if those few points have changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from pdmesh.engine.kv_cache.block_pool import num_blocks_for
from pdmesh.engine.loader.hash import cache_folder
from pdmesh.engine.runner.batch import StepBatch
from pdmesh.engine.runner.model_runner import TokenSampler
from pdmesh.engine.sampling.sampler import SampleRow
from pdmesh.engine.speculation.cost_curve import CostCurve, rising
from pdmesh.engine.weight_versions import ForwardModel
from pdmesh.platform import fallbacks
from pdmesh.sampling_params import SamplingParams

# Cost curves of earlier starts, in the user's cache folder: one file for each model, machine and setting
#
# A curve is measured in seconds; whether one is still valid is checked in a few steps (`confirmed`). So workers of a machine
# measure once, not at each start, and a measurement on a busy machine lasts until the next start at most.


_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Circumstances:
    """Hold everything that a step's time depends on. `max_rows` of any step, `max_context` of any sequence."""

    weights_hash: str
    numeric_mode: str
    processor: str
    num_threads: int
    kv_dtype: str
    block_size: int
    max_context: int
    max_rows: int


def recall(of: Circumstances) -> CostCurve | None:
    """Return the curve that was cached last; None without one, or for any other content, garbage included."""
    try:
        content = json.loads(_path(of).read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or content.get("of") != asdict(of):
        return None
    return _curve(content.get("rows"), content.get("seconds"), (content.get("context_s"), content.get("row_context_s")))


def remember(of: Circumstances, curve: CostCurve) -> None:
    """Write the curve and rename the file, so that a reader never sees half. A folder that cannot be written only costs the next
    start a measurement."""
    attention = {"context_s": curve.context_s, "row_context_s": curve.row_context_s}
    with contextlib.suppress(OSError):
        path = _path(of)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".curve-")
        with os.fdopen(handle, "w") as file:
            json.dump({"of": asdict(of), "rows": curve.rows, "seconds": curve.seconds, **attention}, file)
        os.replace(name, path)


def processor_name(device: torch.device) -> str:
    """Return the name of the processor that computes."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in (fallbacks.text(_CPUINFO) or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _path(of: Circumstances) -> Path:
    digest = hashlib.sha256(json.dumps(asdict(of), sort_keys=True).encode()).hexdigest()
    return cache_folder() / "curves" / f"{digest[:32]}.json"


def _curve(rows: object, seconds: object, attention: Sequence[object]) -> CostCurve | None:
    if not (isinstance(rows, list) and isinstance(seconds, list) and rows and len(rows) == len(seconds)):
        return None
    if not all(type(row) is int for row in rows) or rows != sorted(set(rows)) or rows[0] != 1:
        return None
    times = [number for number in (*seconds, *attention) if isinstance(number, float) and 0 < number < math.inf]
    if len(times) != len(rows) + len(attention) or seconds != sorted(seconds):
        return None
    context_s, row_context_s = times[-2:]
    return CostCurve(tuple(rows), tuple(seconds), context_s, row_context_s)


ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
FIRST_ROWS = (1, 8, 4, 2)
"""Numbers of rows that are measured however long they take."""
ROUNDS = 8
"""Rounds of measurements; the best time counts, because the machine may be busy meanwhile."""
FEWEST_ROUNDS = 3
SETTLED = 0.99
"""Rounds end when no point became faster than this part of its time, but not before FEWEST_ROUNDS."""
BUDGET_S = 2.0
"""Time of all steps together, except the first ones."""
WORTH = 8
"""A point is left out if its step takes more than one in this many parts of the time left: a few points are measured often."""
CHECK_ROUNDS = 4
"""Steps that check a cached curve."""
ALIKE = 1.25
"""A cached curve is valid if steps take the same multiple of its times, except for such a factor between the least and the
most: the machine may be slower than it was, for all numbers of rows alike."""
KEPT_S = 0.1
"""A curve that was measured in less time is not cached."""
LONG_CONTEXT = 512
LONGEST = max(LONG_CONTEXT, ROWS[-1])
"""Tokens of the longest sequence that a step is measured with."""
LEAST_CONTEXT_SHARE = 0.01
"""Least share of the shortest step for attention to LONG_CONTEXT: a share of zero could not be corrected in proportion."""
LOCK_S = 20.0
"""The longest wait of a worker for another one that measures on this machine."""
_LOCK_POLL_S = 0.05
_GREEDY = SamplingParams(temperature=0.0, max_tokens=1)

logger = logging.getLogger(__name__)


class Shape(NamedTuple):
    """Describe a step: its tokens, and all tokens of its sequence."""

    num_rows: int
    context: int


def measure_curve(model: ForwardModel, sampler: TokenSampler, kv: Tensor, of: Circumstances) -> CostCurve:
    """Measure the curve. `kv` is the pool, all of whose blocks are free."""
    started_s = time.monotonic()
    meter = Meter(lambda shape: run_step(model, sampler, kv, *shape), time.perf_counter)
    with machine_to_itself(cache_folder() / "calibration.lock"):
        began_s, curve = time.monotonic(), known_curve(of, meter)
        how = "remembered" if curve is not None else "measured"
        if curve is None:
            curve = measured(meter, min(of.max_context, kv.shape[2] * kv.shape[3]), of.max_rows)
            if time.monotonic() - began_s > KEPT_S:
                remember(of, curve)
    points = ", ".join(f"{rows}: {1e3 * seconds:.2f}" for rows, seconds in zip(curve.rows, curve.seconds, strict=True))
    logger.info("speculation: ms of a step by rows: %s (%s, in %.1f s)", points, how, time.monotonic() - started_s)
    return curve


def known_curve(of: Circumstances, meter: Meter) -> CostCurve | None:
    """Return the cached curve, scaled to the present speed; None if there is none, or it is not valid any more."""
    curve = recall(of)
    return None if curve is None else confirmed(curve, meter)


def confirmed(curve: CostCurve, meter: Meter) -> CostCurve | None:
    """Return the curve, scaled to a few short steps that are run to check it; None if they contradict it."""
    shapes = [Shape(rows, rows) for rows in in_order(curve.rows) if rows in FIRST_ROWS]
    meter.run(shapes[0])  # the first step's initialization is not measured
    seconds = meter.measure(shapes, num_certain=len(shapes), num_rounds=CHECK_ROUNDS)
    ratios = [seconds[shape] / curve.step_s(shape.num_rows) for shape in shapes]
    return curve.scaled(median(ratios)) if max(ratios) <= ALIKE * min(ratios) else None


def measured(meter: Meter, max_context: int, max_rows: int) -> CostCurve:
    """Measure a curve by running steps and reading the clock."""
    rows = tuple(r for r in ROWS if r <= min(max_rows, max_context)) or (1,)
    short = meter.measure([Shape(r, r) for r in in_order(rows)], num_certain=len(set(FIRST_ROWS) & set(rows)))
    points = sorted(shape.num_rows for shape in short)
    curve = CostCurve(tuple(points), rising([short[Shape(r, r)] for r in points], len(points) - 1))
    context_s, row_context_s = _attention(meter, curve, min(LONG_CONTEXT, max_context))
    return replace(curve, context_s=context_s, row_context_s=row_context_s)


def _attention(meter: Meter, curve: CostCurve, context: int) -> tuple[float, float]:
    """Return the seconds for each token of the context: of a sequence's first row, and of a further one. Without time to measure
    them, return the least values: steps correct the curve later (`CostCurve.saw`), and long contexts correct these values."""
    least_s = LEAST_CONTEXT_SHARE * curve.seconds[0] / LONG_CONTEXT
    chunk, few = min(curve.rows[-1], context), min(8, curve.rows[-1], context)
    fill = [Shape(min(chunk, context - first), min(first + chunk, context)) for first in range(0, context, chunk)]
    if curve.step_s(chunk) * len(fill) > meter.left_s or few < 2:
        return least_s, least_s / LONG_CONTEXT
    for shape in fill:  # the KV that is attended to must exist
        meter.run(shape)
    shapes = [Shape(1, context), Shape(few, context)]
    seconds = meter.measure(shapes, num_certain=len(shapes))
    one_s, few_s = (max(0.0, seconds[shape] - curve.step_s(shape.num_rows)) / context for shape in shapes)
    return max(least_s, one_s), max(least_s / LONG_CONTEXT, (few_s - one_s) / (few - 1))


class Meter:
    """Time steps, as long as the budget lasts."""

    def __init__(self, run: Callable[[Shape], None], clock_s: Callable[[], float], budget_s: float = BUDGET_S) -> None:
        self.run = run
        self.left_s = budget_s
        self._clock_s = clock_s
        self._best: dict[Shape, float] = {}

    def measure(self, shapes: list[Shape], *, num_certain: int, num_rounds: int = ROUNDS) -> dict[Shape, float]:
        """Return the seconds of each shape; of the first `num_certain` in any case, unless they were measured before. Others are
        left out where they would take too long.

        Rounds are interleaved, so that a slow moment of the machine affects all points.
        """
        best = {shape: self._best.get(shape) or self._time(shape) for shape in shapes[:num_certain]}
        for shape in shapes[num_certain:]:
            nearest = max(best, key=lambda known: (known.num_rows <= shape.num_rows, -abs(known.num_rows - shape.num_rows)))
            if best[nearest] * max(1.0, shape.num_rows / nearest.num_rows) < self.left_s / WORTH:
                best[shape] = self._time(shape)
        for number in range(num_rounds):
            if sum(best.values()) > self.left_s / 2:  # the rest is for later measurements
                break
            before = best
            best = {shape: min(seconds, self._time(shape)) for shape, seconds in before.items()}
            if number >= FEWEST_ROUNDS and all(best[shape] > SETTLED * before[shape] for shape in best):
                break
        self._best |= best
        return best

    def _time(self, shape: Shape) -> float:
        started_s = self._clock_s()
        self.run(shape)
        took_s = self._clock_s() - started_s
        self.left_s -= took_s
        return took_s


def in_order(rows: Iterable[int]) -> list[int]:
    """Order rows, 1 among them: the first ones, the last, then each time the middle of the widest gap (in indices)."""
    rows = sorted(rows)
    first = [r for r in FIRST_ROWS if r in rows]
    ordered, known = list(first), {rows.index(r) for r in first}
    while len(ordered) < len(rows):
        edges = [*sorted(known), *([] if len(rows) - 1 in known else [2 * (len(rows) - 1) - max(known)])]
        low, high = max(pairwise(edges), key=lambda edge: (edge[1] - edge[0], -edge[0]))
        known.add((low + high) // 2)
        ordered.append(rows[(low + high) // 2])
    return ordered


def run_step(model: ForwardModel, sampler: TokenSampler, kv: Tensor, num_rows: int, context: int) -> None:
    """Run a step of one sequence: its last `num_rows` tokens of a context in the first blocks, and a greedy draw after each. Its
    numbers are in host memory, as models need them."""
    positions = torch.arange(context - num_rows, context)
    batch = StepBatch(
        token_ids=torch.zeros(num_rows, dtype=torch.int64),
        positions=positions,
        slot_mapping=positions.clone(),  # slots of the first blocks, in order
        query_starts=[0, num_rows],
        context_lens=[context],
        block_tables=[list(range(num_blocks_for(context, kv.shape[3])))],
        logits_rows=torch.arange(num_rows),
    )
    sampler.sample(model.forward(batch, kv), [_row(index) for index in range(num_rows)])


def _row(index: int) -> SampleRow:
    return SampleRow(_GREEDY, 0, index, (), (), frozenset())


@contextmanager
def machine_to_itself(lock: Path, wait_s: float = LOCK_S) -> Iterator[None]:
    """Hold a lock against other measurements; go on without it after `wait_s`, or where locks are not available. The kernel
    releases the lock when its process ends."""
    with ExitStack() as stack:
        with suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            _acquire(stack.enter_context(lock.open("w")).fileno(), time.monotonic() + wait_s)
        yield


def _acquire(descriptor: int, until_s: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until_s:
                return
            time.sleep(_LOCK_POLL_S)
