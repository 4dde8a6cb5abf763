"""Decode steps of whole models: how long, which share of the memory's bandwidth, how busy the GPU is.

Each case is measured twice. *Engine*: steps of a real engine, by the host's clock. *Graph*: the replay of the recorded step
alone, by the device's clock. What lies between them is Python, the draw, and what the host has to send.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from benchmarks.gpu.busy import traced_share
from benchmarks.gpu.context import Context
from benchmarks.gpu.counts import decode_bytes
from benchmarks.gpu.drawn import engine_config
from benchmarks.gpu.graph_step import draw_s, graph_step_s
from benchmarks.gpu.steady import Pace, steady_pace
from benchmarks.gpu.weights import Subject, make_subject
from benchmarks.harness import Figure
from pdmesh.engine.engine import Engine

FORMATS = (("1B", "none"), ("8B", "none"), ("8B", "int8"), ("8B", "int4"), ("8B", "fp8"))
EXPECTED_S = 14.0  # of a model
EXPECTED_LONG_S = 6.0
LONG = "decode 8B fp8, batch 1"
MILLISECONDS_GOAL = {("1B", "none", 1): 0.80}
TOKENS_GOAL = {("8B", "none", 1): 240.0}
SPEEDUP_GOAL = {"int8": 1.75, "int4": 2.7}
BUSY_GOAL = 98.0


@dataclass(frozen=True)
class Measured:
    """A step."""

    step_s: float
    num_bytes: int  # that it reads


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
    measured: dict[Case, Measured] = {}
    for model, weights in FORMATS:
        if context.has_time(EXPECTED_S if context.device == "cuda" else 0.0, f"decode {model}, weights {weights}"):
            _model(context, model, weights, measured)
    for case, narrow in measured.items():
        plain = measured.get(replace(case, weights="none"))
        if plain is not None and case.weights != "none":
            goal = SPEEDUP_GOAL.get(case.weights) if case.batch == 1 else None
            _add_ratio(context, f"{case.name}: over unquantized", plain, narrow, f"pdmesh {case.model} unquantized", goal)
    if context.has_time(2 * EXPECTED_LONG_S if context.device == "cuda" else 0.0, "decode 8B, a long context with KV in fp8"):
        wide, narrow = (_long_context(context, kv_dtype) for kv_dtype in ("auto", "fp8"))
        _add_ratio(context, f"{LONG}: KV in fp8 over {context.scale.dtype}", wide, narrow, f"KV in {context.scale.dtype}", None)


def _add_ratio(context: Context, name: str, wide: Measured, narrow: Measured, peer: str, goal: float | None) -> None:
    """The limit: how many times fewer bytes a step reads. It binds where both have the same share of the bandwidth."""
    times, most = wide.step_s / narrow.step_s, wide.num_bytes / narrow.num_bytes
    context.add(Figure(name, times, "x", "higher", goal=goal, limit=most, peer=peer))


def _long_context(context: Context, kv_dtype: str) -> Measured:
    """A recorded step of one sequence; weights in fp8, so that KV is much of what it reads. Nothing computes the prompt: the
    pool is random."""
    length, device = context.scale.long_context, context.device
    config = engine_config(device, max_num_seqs=1, max_context=length, kv_dtype=kv_dtype)
    subject = make_subject(context.scale.config("8B"), "fp8", config, context.dtype)
    for layer in subject.engine.kv.tensor:
        layer.copy_(torch.randn(layer.shape, device=device, dtype=context.dtype))
    step_s, cost = graph_step_s(subject, device, [length]), subject.engine.cost
    num_bytes = decode_bytes(cost, [length])
    least_s = num_bytes / context.machine.bytes_per_s
    name = f"{LONG}, KV in {context.scale.dtype if kv_dtype == 'auto' else kv_dtype}, {length} tokens"
    context.add(Figure(f"{name}: graph alone", step_s * 1e3, "ms", "lower", limit=least_s * 1e3))
    context.add(Figure(f"{name}: share of bandwidth, graph alone", 100 * least_s / step_s, "%", "higher", limit=100.0))
    subject.close()
    return Measured(step_s, num_bytes)


def _model(context: Context, model: str, weights: str, measured: dict[Case, Measured]) -> None:
    scale = context.scale
    config = engine_config(context.device, max_num_seqs=max(scale.batches), max_context=scale.max_context)
    subject = make_subject(scale.config(model), weights, config, context.dtype)
    for batch in scale.batches:
        case = Case(model, weights, batch)
        measured[case] = _case(context, subject, case)
    subject.close()


def _case(context: Context, subject: Subject, case: Case) -> Measured:
    """Adds its figures."""
    engine = subject.engine
    pace = steady_pace(engine, context.device, batch=case.batch, prompt=context.scale.prompt, steps=context.scale.steps)
    contexts = [round(pace.mean_context)] * case.batch
    graph_s, num_bytes = graph_step_s(subject, context.device, contexts), decode_bytes(engine.cost, contexts)
    _add_speed(context, engine, case, pace, graph_s, num_bytes)
    _add_busy(context, engine, case, pace, graph_s + draw_s(subject, context.device, case.batch))
    return Measured(pace.step_s, num_bytes)


def _add_speed(context: Context, engine: Engine, case: Case, pace: Pace, graph_s: float, num_bytes: int) -> None:
    least_s = num_bytes / context.machine.bytes_per_s
    context.note(f"{case.name}: {num_bytes / 1e9:.4g} GB a step ({engine.cost.weight_bytes / 1e9:.4g} of weights)")
    add, ms_goal, speed_goal = context.add, MILLISECONDS_GOAL.get(case.key), TOKENS_GOAL.get(case.key)
    add(Figure(f"{case.name}: step", pace.step_s * 1e3, "ms", "lower", goal=ms_goal, limit=least_s * 1e3))
    add(Figure(f"{case.name}: tokens", pace.tokens_per_s, "tokens/s", "higher", goal=speed_goal, limit=case.batch / least_s))
    add(Figure(f"{case.name}: graph alone", graph_s * 1e3, "ms", "lower", limit=least_s * 1e3))
    share_goal = 75.0 if speed_goal is not None else None
    add(Figure(f"{case.name}: share of bandwidth", 100 * least_s / pace.step_s, "%", "higher", goal=share_goal, limit=100.0))
    add(Figure(f"{case.name}: share of bandwidth, graph alone", 100 * least_s / graph_s, "%", "higher", limit=100.0))


def _add_busy(context: Context, engine: Engine, case: Case, pace: Pace, device_s: float) -> None:
    """What of a step the device needs by itself for graph and draw; the rest it waited for the host, but for what is copied (a
    message and the tokens, some microseconds), which is work and not counted. The trace counts it, and does not count the gaps
    between a graph's kernels, which no host can close."""
    share = 100 * min(1.0, device_s / pace.step_s)
    context.add(Figure(f"{case.name}: device busy, at least", share, "%", "higher", goal=BUSY_GOAL, limit=100.0))
    traced = traced_share(engine, context.device, batch=case.batch, prompt=context.scale.prompt)
    if traced is None:
        context.note(f"{case.name}: no trace of single kernels; the profiler gave none")
    else:
        context.add(Figure(f"{case.name}: some kernel runs, traced", 100 * traced, "%", "higher", limit=100.0))
