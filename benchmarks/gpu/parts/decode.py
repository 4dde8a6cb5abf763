"""Decode steps of whole models: how long, which share of the memory's bandwidth, how busy the GPU is.

Each case is measured twice. *Engine*: steps of a real engine, by the host's clock. *Graph*: the replay of the recorded step
alone, by the device's clock. What lies between them is Python, the draw, and what the host has to send.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from benchmarks.gpu.context import Context, Span, covered_share, device_s, replayed_s
from benchmarks.gpu.shapes import decode_batch, decode_bytes
from benchmarks.gpu.steady import Pace, started, steady_pace
from benchmarks.harness import Figure
from pdmesh.engine.engine import Engine
from pdmesh.engine.kernels.triton.attention import TritonAttention
from pdmesh.engine.kernels.triton.cuda_graphs import DecodeGraphs, DecodeSizes, Recording, Work, fewest_rows, make_recorder
from pdmesh.engine.kernels.triton.sampling.sampler import GreedyScratch, greedy
from pdmesh.engine.kernels.triton.step import TritonStep
from tests.support.random_models import Subject, make_subject
from tests.support.random_weights import engine_config

STEPS = 50


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


# The recorded decode step of an engine's model, and the draw behind it, each alone on the device: replayed without a host
# between two runs.


class Kept:
    """A recorder that keeps its last recording."""

    def __init__(self, device: torch.device) -> None:
        self._inner = make_recorder(device)
        self.last: Recording | None = None

    def record(self, work: Work) -> Recording:
        self.last = self._inner.record(work)
        return self.last


@torch.inference_mode()
def graph_step_s(subject: Subject, device: str, contexts: list[int]) -> float:
    """Median seconds of one step with these contexts. The engine is idle: its pool is written to."""
    engine, model = subject.engine, subject.model
    kept, config = Kept(model.device), engine.config
    step = TritonStep(model.decoder, TritonAttention(model.config, device, kv_scales=model.kv_scales, splits=model.splits))
    sizes = DecodeSizes(len(contexts), config.max_context, config.block_size, fewest_rows(model.device))
    graphs = DecodeGraphs(step, engine.kv.tensor, sizes, kept)  # owns the buffers that a replay reads
    graphs.run(decode_batch(contexts, config.block_size))
    assert kept.last is not None
    return replayed_s({"step": kept.last.replay}, device)["step"]


@torch.inference_mode()
def draw_s(subject: Subject, device: str, num_rows: int) -> float:
    """Median seconds of a greedy draw from the logits of so many sequences."""
    vocab_size, place = subject.model.config.vocab_size, subject.model.device
    logits, scratch = torch.randn((num_rows, vocab_size), device=place), GreedyScratch.of(num_rows, vocab_size, place)
    return device_s(lambda: greedy(logits, scratch), device)


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
