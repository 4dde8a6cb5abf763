"""The recorded decode step of an engine's model, and the draw behind it, each alone on the device: replayed without a host
between two runs."""

from __future__ import annotations

import torch

from benchmarks.gpu.batches import decode_batch
from benchmarks.gpu.timing import device_s, replayed_s
from benchmarks.gpu.weights import Subject
from pdmesh.engine.kernels.triton.attention import TritonAttention
from pdmesh.engine.kernels.triton.cuda_graphs import DecodeGraphs, DecodeSizes, Recording, Work, make_recorder
from pdmesh.engine.kernels.triton.sampling.sampler import GreedyScratch, greedy
from pdmesh.engine.kernels.triton.step import TritonStep


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
    sizes = DecodeSizes(len(contexts), config.max_context, config.block_size)
    DecodeGraphs(step, engine.kv.tensor, sizes, kept).run(decode_batch(contexts, config.block_size))
    assert kept.last is not None
    return replayed_s({"step": kept.last.replay}, device)["step"]


@torch.inference_mode()
def draw_s(subject: Subject, device: str, num_rows: int) -> float:
    """Median seconds of a greedy draw from the logits of so many sequences."""
    vocab_size, place = subject.model.config.vocab_size, subject.model.device
    logits, scratch = torch.randn((num_rows, vocab_size), device=place), GreedyScratch.of(num_rows, vocab_size, place)
    return device_s(lambda: greedy(logits, scratch), device)
