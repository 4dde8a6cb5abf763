"""A long prompt through an engine, in one chunk, beside the machine's measured peak of products."""

from __future__ import annotations

import statistics
from functools import partial

from benchmarks.engine_runs import GREEDY
from benchmarks.gpu.context import Context, wall_s
from benchmarks.gpu.shapes import prefill_operations
from benchmarks.gpu.steady import prompt_of
from benchmarks.harness import Figure
from pdmesh.engine.engine import Engine
from pdmesh.engine.request import EngineRequest
from tests.support.random_models import make_subject
from tests.support.random_weights import engine_config

CASES = (("8B", "none", 60.0), ("1B", "none", None), ("8B", "int8", None))
"""Model, weights, and the share of the peak that was asked for."""
EXPECTED_S = 7.0
ROUNDS = 3


def run(context: Context) -> None:
    for model, weights, goal in CASES:
        if context.has_time(EXPECTED_S if context.device == "cuda" else 0.0, f"prefill {model}, weights {weights}"):
            _case(context, model, weights, goal)


def _case(context: Context, model: str, weights: str, goal: float | None) -> None:
    length = context.scale.prefill
    config = engine_config(
        context.device,
        max_num_seqs=4,
        max_context=length + 16,
        max_num_batched_tokens=length,
        num_blocks=2 * (length // 16 + 2),
    )
    subject = make_subject(context.scale.config(model), weights, config, context.dtype)
    name = f"prefill {model} {'unquantized' if weights == 'none' else weights}, {length} tokens"
    _add(context, name, _seconds(subject.engine, context.device, length), prefill_operations(subject.engine.cost, length), goal)
    subject.close()


def _seconds(engine: Engine, device: str, length: int) -> float:
    """To the first token of a prompt; the first prompt warms up."""
    _first_token(engine, 0, length)
    return statistics.median(wall_s(partial(_first_token, engine, number, length), device) for number in range(1, ROUNDS + 1))


def _first_token(engine: Engine, number: int, length: int) -> None:
    params = GREEDY.params(1, ignore_eos=True)
    engine.add(EngineRequest(f"prefill-{number}", prompt_of(engine, number, length), params))
    while engine.has_work:
        engine.step()


def _add(context: Context, name: str, seconds: float, operations: float, goal: float | None) -> None:
    peak = context.machine.operations_per_s
    context.note(f"{name}: {operations / 1e12:.4g} * 10^12 operations")
    context.add(Figure(f"{name}: time to first token", seconds * 1e3, "ms", "lower", limit=operations / peak * 1e3))
    context.add(Figure(f"{name}: rate", operations / seconds / 1e12, "10^12 operations/s", "higher", limit=peak / 1e12))
    context.add(Figure(f"{name}: share of peak", 100 * operations / seconds / peak, "%", "higher", goal=goal, limit=100.0))
