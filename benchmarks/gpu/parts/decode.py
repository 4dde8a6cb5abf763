"""Decode steps of whole models: how long, which share of the memory's bandwidth, how busy the GPU is.

Each case is measured twice. *Engine*: steps of a real engine, by the host's clock. *Graph*: the replay of the recorded step
alone, by the device's clock. What lies between them is Python, the draw, and what the host has to send.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu.busy import traced_share
from benchmarks.gpu.context import Context
from benchmarks.gpu.counts import decode_bytes
from benchmarks.gpu.drawn import engine_config
from benchmarks.gpu.graph_step import graph_step_s
from benchmarks.gpu.steady import Pace, steady_pace
from benchmarks.gpu.weights import Subject, make_subject
from benchmarks.harness import Figure
from engine.engine import Engine

FORMATS = (("1B", "none"), ("8B", "none"), ("8B", "int8"), ("8B", "int4"), ("8B", "fp8"))
EXPECTED_S = 18.0  # of a model whose kernels are not compiled yet
EXPECTED_LONG_S = 10.0
LONG = "decode 8B fp8, batch 1"
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
        if (plain := speeds.get((model, "none", batch))) and weights != "none":
            goal = SPEEDUP_GOAL.get(weights) if batch == 1 else None
            name = f"{Case(model, weights, batch).name}: over unquantized"
            context.add(Figure(name, speed / plain, "x", "higher", goal=goal, peer=f"pdmesh {model} unquantized"))
    if context.has_time(2 * EXPECTED_LONG_S if context.device == "cuda" else 0.0, "decode 8B, a long context with KV in fp8"):
        wide, narrow = (_long_context(context, kv_dtype) for kv_dtype in ("auto", "fp8"))
        context.add(Figure(f"{LONG}: KV in fp8 over {context.scale.dtype}", wide / narrow, "x", "higher"))


def _long_context(context: Context, kv_dtype: str) -> float:
    """Seconds of a recorded step of one sequence; weights in fp8, so that KV is much of what it reads. Nothing computes the
    prompt: the pool is random."""
    length, device = context.scale.long_context, context.device
    config = engine_config(device, max_num_seqs=1, max_context=length, kv_dtype=kv_dtype)
    subject = make_subject(context.scale.config("8B"), "fp8", config, context.dtype)
    for layer in subject.engine.kv.tensor:
        layer.copy_(torch.randn(layer.shape, device=device, dtype=context.dtype))
    step_s, cost = graph_step_s(subject, device, [length]), subject.engine.cost
    least_s = decode_bytes(cost, [length]) / context.machine.bytes_per_s
    name = f"{LONG}, KV in {context.scale.dtype if kv_dtype == 'auto' else kv_dtype}, {length} tokens"
    context.add(Figure(f"{name}: graph alone", step_s * 1e3, "ms", "lower", limit=least_s * 1e3))
    context.add(Figure(f"{name}: share of bandwidth, graph alone", 100 * least_s / step_s, "%", "higher", limit=100.0))
    subject.close()
    return step_s


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
