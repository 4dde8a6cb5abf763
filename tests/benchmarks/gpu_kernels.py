"""Which kernels steps of a model ask for that were not asked for ahead: `python -m tests.benchmarks.gpu_kernels WEIGHTS`, on a
machine without a GPU. One line of JSON. A process of its own: kernels are not interpreted in it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from benchmarks.gpu.context import Context, Deadline
from benchmarks.gpu.parts.compile import recorded, scenes
from benchmarks.gpu.shapes import BLOCK_SIZE, TINY
from pdmesh.engine.kernels.triton.sampling.sampler import DeviceSampler
from pdmesh.engine.runner.batch import StepBatch
from pdmesh.engine.sampling.sampler import SampleRow
from pdmesh.sampling_params import SamplingParams
from tests.engine.kernels.triton.paged import Sequences, Shape
from tests.support.random_models import launched_model, make_decoder
from tests.support.random_weights import engine_config


def batches() -> list[StepBatch]:
    """Decode steps of several sizes, a prompt, chunks, and a mix."""
    decode = [[(40 + index, 1) for index in range(count)] for count in (1, 3, 4)]
    return [Sequences(Shape(1, 1, 1), lengths).batch for lengths in (*decode, [(5, 5)], [(90, 24)], [(300, 24), (41, 1)])]


@torch.inference_mode()
def launch_all(weights: str) -> None:
    """On tensors of the CPU, whose addresses are real ones."""
    shape = TINY.config("8B")
    config = engine_config("cpu", max_num_seqs=4, max_context=TINY.max_context + 300)
    model = launched_model(make_decoder(shape, weights, config, torch.float32), config)
    kv = torch.zeros(shape.num_layers, 2, 100, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    for batch in batches():
        logits = model.forward(batch, kv)
    row = SampleRow(SamplingParams(temperature=0.0, max_tokens=1), 0, 0, (), (), frozenset())
    DeviceSampler().start(logits, [row] * len(logits))


def main(weights: str) -> None:
    context = Context("cpu", TINY, Deadline(100.0), Path("/dev/null"))
    with recorded() as ahead:
        for _, scene in scenes(context):
            scene()
    with recorded() as later:
        launch_all(weights)
    missing = [key for key in later.found if key not in ahead.found]
    print(json.dumps({"ahead": len(ahead.found), "used": len(later.found), "missing": missing}))


if __name__ == "__main__":
    main(sys.argv[1])
