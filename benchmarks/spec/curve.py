"""Items 5 and 6: what verifying costs, and that nothing else does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import mean, median

from benchmarks.harness import Figure, say
from benchmarks.spec.runs import Bench, Task, answer
from benchmarks.spec.scripted import Scripted
from engine.engine import Engine
from engine.sampling_params import SamplingParams
from engine.speculation.calibrate import run_step

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
CONTEXTS = (64, 256, 1024)
NUM_FORCED = 400
FORCED = ((0.5, 1), (0.5, 3), (0.7, 3), (0.8, 4), (0.8, 7), (0.9, 7), (1.0, 7), (0.9, 15))


def measure_rows(bench: Bench, engine: Engine, rows: Sequence[int], context: int, rounds: int) -> dict[int, float]:
    """Seconds of a forward pass and its draws, by tokens verified, all at one sequence's end; medians of interleaved runs."""
    taken: dict[int, list[float]] = {count: [] for count in rows}
    model, sampler, kv = bench.loaded.model, engine.sampler, engine.kv.tensor
    for number in range(rounds + 1):
        for count in rows:
            started_s = time.perf_counter()
            run_step(model, sampler, kv, count, context)
            if number:
                taken[count].append(time.perf_counter() - started_s)
    return {count: median(times) for count, times in taken.items()}


def cost_figures(bench: Bench, rounds: int = 40) -> list[Figure]:
    """t(verify k) ÷ t(1)."""
    engine = bench.engine()
    engine.kv.reach(max(CONTEXTS) // bench.config.block_size)
    figures = []
    for context in CONTEXTS:
        seconds = measure_rows(bench, engine, ROWS, context, rounds)
        say(f"context {context}: " + "  ".join(f"{r}: {1e3 * s:.2f} ms ({s / seconds[1]:.2f})" for r, s in seconds.items()))
        for count in ROWS[1:]:
            goal = 1.6 if count == 8 else None
            name = f"t(verify {count}) / t(1), context {context}"
            figures.append(Figure(name, round(seconds[count] / seconds[1], 3), "x", "lower", goal))
    return figures


def forced_figures(bench: Bench, prompts: Sequence[tuple[int, ...]], rounds: int = 3) -> list[Figure]:
    """Speed-up at a forced acceptance ÷ what the measured curve allows. Long answers, so that chance has little to say."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_FORCED, ignore_eos=True)
    tasks, plain, figures = [Task(prompt, params) for prompt in prompts], bench.engine(), []
    answers = [answer(plain, [task]).outputs for task in tasks]
    context = round(mean(len(task.prompt) for task in tasks)) + NUM_FORCED // 2
    for right, length in FORCED:
        scripted = Scripted(right, length, bench.loaded.config.vocab_size)
        engine = bench.engine([scripted], draft_length=length, max_draft_tokens=length)
        reached, allowed = [], []
        for _ in range(rounds):
            seconds = measure_rows(bench, plain, (1, length + 1), context, 20)
            slow_s = fast_s = 0.0
            for task, scripted.answers in zip(tasks, answers, strict=True):
                slow, fast = answer(plain, [task]), answer(engine, [task])
                assert slow.outputs == fast.outputs, "speculation changed a token"
                slow_s, fast_s = slow_s + slow.decode_s, fast_s + fast.decode_s
            reached.append(slow_s / fast_s)
            allowed.append(expected(right, length) * seconds[1] / seconds[length + 1])
        share = median(r / a for r, a in zip(reached, allowed, strict=True))
        kind = f"acceptance {right}, draft of {length}"
        figures.append(Figure(f"share of the possible speed-up, {kind}", round(share, 3), "x", "higher", 0.9))
        figures.append(Figure(f"speed-up, {kind}", round(median(reached), 2), "x", "higher", None, round(mean(allowed), 2)))
    return figures


def expected(right: float, length: int) -> float:
    """Tokens of a step: 1 + a + a² + … + a^k."""
    return sum(right**place for place in range(length + 1))
