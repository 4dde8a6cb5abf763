"""One sequence of 1B: an engine of ours and transformers' `generate` with a static cache, compiled, in turn in one process."""

from __future__ import annotations

import statistics
import time

from benchmarks.gpu.context import Context
from benchmarks.gpu.peers import make_peer, peer_version, static_step_s
from benchmarks.gpu.shapes import decode_bytes
from benchmarks.gpu.steady import prompt_of, whole_run
from benchmarks.harness import Figure
from tests.support.random_models import make_subject
from tests.support.random_weights import engine_config

MODEL, ROUNDS = "1B", 3


def run(context: Context) -> None:
    scale, device = context.scale, context.device
    subject = make_subject(
        scale.config(MODEL), "none", engine_config(device, max_num_seqs=4, max_context=scale.max_context), context.dtype
    )
    peer = make_peer(scale.models[MODEL], device, context.dtype)
    prompt, output = prompt_of(subject.engine, 0, scale.prompt), scale.single_output
    lengths = {"short": max(1, output // 8), "output": output}
    static_step_s(peer, prompt, device, **lengths)  # compiles
    samples: dict[str, list[float]] = {"pdmesh": [], "peer": []}
    for number in range(ROUNDS):
        began = time.monotonic()
        samples["pdmesh"].append(whole_run(subject.engine, device, batch=1, prompt=scale.prompt, output=output).step_s)
        samples["peer"].append(static_step_s(peer, prompt, device, **lengths))
        if number + 1 < ROUNDS and not context.has_time(1.1 * (time.monotonic() - began), "more rounds of generate"):
            break
    num_bytes = decode_bytes(subject.engine.cost, [scale.prompt + output // 2])
    context.note(f"{MODEL} unquantized, one sequence: {num_bytes / 1e9:.4g} GB a step in the mean")
    medians = {name: statistics.median(values) for name, values in samples.items()}
    _add(context, medians, num_bytes / context.machine.bytes_per_s)


def _add(context: Context, seconds: dict[str, float], least_s: float) -> None:
    """`least_s`: a step whose bytes are all that takes time."""
    peer = f"{peer_version()}, generate, static cache{', compiled' if context.device == 'cuda' else ''}"
    name = f"{MODEL} unquantized, one sequence"
    context.add(Figure(f"{name}: pdmesh, step", seconds["pdmesh"] * 1e3, "ms", "lower", limit=least_s * 1e3))
    context.add(Figure(f"{name}: transformers, step", seconds["peer"] * 1e3, "ms", "lower", limit=least_s * 1e3, peer=peer))
    times, most = seconds["peer"] / seconds["pdmesh"], seconds["peer"] / least_s
    context.add(Figure(f"{name}: over transformers", times, "x", "higher", limit=most, peer=peer))
