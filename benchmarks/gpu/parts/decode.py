"""Decode steps of whole models: how long, which share of the memory's bandwidth, how busy the GPU is.

Each case is measured twice. *Engine*: steps of a real engine, by the host's clock. *Graph*: the replay of the recorded step
alone, by the device's clock. What lies between them is Python, the draw, and what the host has to send.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.busy import traced_share
from benchmarks.gpu.context import Context
from benchmarks.gpu.counts import decode_bytes
from benchmarks.gpu.drawn import engine_config
from benchmarks.gpu.graph_step import graph_step_s
from benchmarks.gpu.steady import Pace, steady_pace
from benchmarks.gpu.weights import Subject, make_subject
from benchmarks.harness import Figure
from engine.engine import Engine

FORMATS = (("1B", "none"), ("8B", "none"), ("8B", "int8"), ("8B", "int4"))
EXPECTED_S = 18.0  # of a model whose kernels are not compiled yet
MILLISECONDS_GOAL = {("1B", "none", 1): 0.80}
TOKENS_GOAL = {("8B", "none", 1): 240.0}
SPEEDUP_GOAL = {"int8": 1.75, "int4": 2.7}
BUSY_GOAL = 98.0


@dataclass(frozen=True)
class Case:
    model: str
    weights: str
    batch: int

    @property
    def name(self) -> str:
        return f"decode {self.model} {'unquantized' if self.weights == 'none' else self.weights}, batch {self.batch}"

    @property
    def key(self) -> tuple[str, str, int]:
        return self.model, self.weights, self.batch


def run(context: Context) -> None:
    speeds: dict[tuple[str, str, int], float] = {}
    for model, weights in FORMATS:
        if context.has_time(EXPECTED_S if context.device == "cuda" else 0.0, f"decode {model}, weights {weights}"):
            _model(context, model, weights, speeds)
    for (model, weights, batch), speed in speeds.items():
        if (plain := speeds.get((model, "none", batch))) and weights in SPEEDUP_GOAL:
            goal = SPEEDUP_GOAL[weights] if batch == 1 else None
            name = f"{Case(model, weights, batch).name}: over unquantized"
            context.add(Figure(name, speed / plain, "x", "higher", goal=goal, peer=f"pdmesh {model} unquantized"))


def _model(context: Context, model: str, weights: str, speeds: dict[tuple[str, str, int], float]) -> None:
    scale = context.scale
    config = engine_config(context.device, max_num_seqs=max(scale.batches), max_context=scale.max_context)
    subject = make_subject(scale.config(model), weights, config, context.dtype)
    for batch in scale.batches:
        case = Case(model, weights, batch)
        speeds[case.key] = _case(context, subject, case)
    subject.close()


def _case(context: Context, subject: Subject, case: Case) -> float:
    """Adds its figures; tokens a second."""
    engine = subject.engine
    pace = steady_pace(engine, context.device, batch=case.batch, prompt=context.scale.prompt, steps=context.scale.steps)
    graph_s = graph_step_s(subject, context.device, [round(pace.mean_context)] * case.batch)
    _add_speed(context, engine, case, pace, graph_s)
    _add_busy(context, engine, case, pace, graph_s)
    return pace.tokens_per_s


def _add_speed(context: Context, engine: Engine, case: Case, pace: Pace, graph_s: float) -> None:
    num_bytes = decode_bytes(engine.cost, [round(pace.mean_context)] * case.batch)
    least_s = num_bytes / context.machine.bytes_per_s
    context.note(f"{case.name}: {num_bytes / 1e9:.4g} GB a step ({engine.cost.weight_bytes / 1e9:.4g} of weights)")
    add, ms_goal, speed_goal = context.add, MILLISECONDS_GOAL.get(case.key), TOKENS_GOAL.get(case.key)
    add(Figure(f"{case.name}: step", pace.step_s * 1e3, "ms", "lower", goal=ms_goal, limit=least_s * 1e3))
    add(Figure(f"{case.name}: tokens", pace.tokens_per_s, "tokens/s", "higher", goal=speed_goal, limit=case.batch / least_s))
    add(Figure(f"{case.name}: graph alone", graph_s * 1e3, "ms", "lower", limit=least_s * 1e3))
    share_goal = 75.0 if speed_goal is not None else None
    add(Figure(f"{case.name}: share of bandwidth", 100 * least_s / pace.step_s, "%", "higher", goal=share_goal, limit=100.0))
    add(Figure(f"{case.name}: share of bandwidth, graph alone", 100 * least_s / graph_s, "%", "higher", limit=100.0))


def _add_busy(context: Context, engine: Engine, case: Case, pace: Pace, graph_s: float) -> None:
    """At least: the draw, which the device also computes, is in the step and not in the graph."""
    share = 100 * min(1.0, graph_s / pace.step_s)
    context.add(Figure(f"{case.name}: device busy, at least", share, "%", "higher", goal=BUSY_GOAL, limit=100.0))
    traced = traced_share(engine, context.device, batch=case.batch, prompt=context.scale.prompt)
    if traced is None:
        context.note(f"{case.name}: no trace of single kernels; the profiler gave none")
    else:
        context.add(Figure(f"{case.name}: some kernel runs, traced", 100 * traced, "%", "higher", limit=100.0))
