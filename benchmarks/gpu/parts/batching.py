"""Many sequences of 8B at once: an engine of ours and transformers' continuous batching, in turn in one process."""

from __future__ import annotations

import statistics
import time

from benchmarks.gpu.context import Context
from benchmarks.gpu.peers import affordable_output, continuous_batching, make_peer, peer_version
from benchmarks.gpu.shapes import decode_bytes
from benchmarks.gpu.steady import prompt_of, whole_run
from benchmarks.harness import Figure
from tests.support.random_models import Subject, make_subject
from tests.support.random_weights import engine_config

GOAL = 2.5
MODEL, ROUNDS, SHORT = "8B", 2, 20


def run(context: Context) -> None:
    scale = context.scale
    config = engine_config(context.device, max_num_seqs=scale.many, max_context=scale.max_context)
    subject = make_subject(scale.config(MODEL), "none", config, context.dtype)
    peer = make_peer(scale.models[MODEL], context.device, context.dtype)
    prompts = [prompt_of(subject.engine, number, scale.prompt) for number in range(scale.many)]
    _ours(context, subject, SHORT if context.device == "cuda" else 2)
    speed = continuous_batching(peer, prompts, SHORT if context.device == "cuda" else 2).tokens_per_s
    output = affordable_output(scale.output, scale.many, speed, context.deadline.left_s)
    samples: dict[str, list[float]] = {"pdmesh": [], "peer": []}
    for number in range(ROUNDS):
        began = time.monotonic()
        samples["pdmesh"].append(_ours(context, subject, output))
        samples["peer"].append(continuous_batching(peer, prompts, output).tokens_per_s)
        took = time.monotonic() - began
        if number + 1 < ROUNDS and not context.has_time(1.1 * took, "a second round of continuous batching"):
            break
    attention = getattr(peer.config, "_attn_implementation", None) or "its default"
    context.note(f"transformers' continuous batching attends by {attention}; without flash-attn it has torch's SDPA over pages")
    _add(context, output, {name: statistics.median(values) for name, values in samples.items()}, _most(context, subject, output))


def _ours(context: Context, subject: Subject, output: int) -> float:
    scale = context.scale
    return whole_run(subject.engine, context.device, batch=scale.many, prompt=scale.prompt, output=output).tokens_per_s


def _most(context: Context, subject: Subject, output: int) -> float:
    """Tokens a second, were each step's bytes all that took time."""
    many = context.scale.many
    num_bytes = decode_bytes(subject.engine.cost, [context.scale.prompt + output // 2] * many)
    context.note(f"{MODEL} unquantized, {many} sequences, {output} tokens each: {num_bytes / 1e9:.4g} GB a step in the mean")
    return many * context.machine.bytes_per_s / num_bytes


def _add(context: Context, output: int, speeds: dict[str, float], most: float) -> None:
    """`most`: of any engine, in tokens/s."""
    name = f"{MODEL} unquantized, {context.scale.many} sequences, {output} tokens each"
    peer = f"{peer_version()}, continuous batching"
    context.add(Figure(f"{name}: pdmesh", speeds["pdmesh"], "tokens/s", "higher", limit=most))
    context.add(Figure(f"{name}: transformers", speeds["peer"], "tokens/s", "higher", limit=most, peer=peer))
    times, at_most = speeds["pdmesh"] / speeds["peer"], most / speeds["peer"]
    context.add(Figure(f"{name}: over transformers", times, "x", "higher", goal=GOAL, limit=at_most, peer=peer))
