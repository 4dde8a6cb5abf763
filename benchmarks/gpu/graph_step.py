"""The recorded decode step of an engine's model, alone on the device: replayed without a host between two runs."""

from __future__ import annotations

import torch

from benchmarks.gpu.batches import decode_batch
from benchmarks.gpu.timing import replayed_s
from benchmarks.gpu.weights import Subject
from engine.kernels.triton.attention import TritonAttention
from engine.kernels.triton.decode import DecodeGraphs, DecodeSizes
from engine.kernels.triton.graphs import Recording, Work, make_recorder
from engine.kernels.triton.step import TritonStep


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
