"""A decoder on the Triton kernels: prompts' chunks launch by launch, decode steps as graphs where a recorder is given."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.batch import StepBatch
from engine.exports import LayerSignal
from engine.kernels.triton.attention import TritonAttention
from engine.kernels.triton.decode import DecodeGraphs, DecodeSizes
from engine.kernels.triton.graphs import Recorder
from engine.kernels.triton.metadata import Capacity, StepMetadata
from engine.kernels.triton.sampling import DeviceSampler
from engine.kernels.triton.splits import SPLITS, Splits
from engine.kernels.triton.step import StepOutput, TritonStep
from engine.kernels.triton.weight_words import WeightWords
from engine.layers import ROW_MULTIPLE, Linear
from engine.model import DecoderModel

# Part of the numeric mode: to be raised with every change of the kernels that changes bits of a logit.
KERNEL_REVISION = 1


class TritonModel:
    """`forward` as the model runner wants it, with the weights of a loaded decoder."""

    backend = "triton"

    def __init__(
        self,
        decoder: DecoderModel,
        sizes: DecodeSizes | None = None,
        *,
        recorder: Recorder | None = None,
        splits: Splits = SPLITS,
    ) -> None:
        """`sizes`: of decode steps, which then go in buckets, recorded where there is a recorder. None: each step is as wide as
        its batch. `splits` of attention: part of the numeric mode."""
        self.config, self.decoder, self.sizes = decoder.config, decoder, sizes
        self.splits, self.recorder = splits, recorder
        self._graphs: DecodeGraphs | None = None
        attention = TritonAttention(decoder.config, str(decoder.device), splits=splits)
        self._step = TritonStep(decoder, attention)

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def embedding(self) -> Tensor:
        return self.decoder.embedding

    def first_layers(self, num_layers: int) -> TritonModel:
        """See DecoderModel.first_layers."""
        return TritonModel(self.decoder.first_layers(num_layers), self.sizes, recorder=self.recorder, splits=self.splits)

    def sampler(self) -> DeviceSampler:
        """One that draws where the logits are."""
        return DeviceSampler()

    @property
    def bytes_per_step(self) -> int:
        """Weight bytes that a step of few rows reads: its limit is this over the memory's bandwidth."""
        layers = self.decoder.layers
        maps = [self.decoder.head, *(m for layer in layers for m in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down))]
        return sum(map(_num_bytes, maps))

    @torch.inference_mode()
    def prepare(self, kv: Tensor) -> None:
        """Records the decode steps of all buckets on this pool ahead of the first request: seconds on a GPU. Without it each is
        recorded when it is first needed. Compiles what draws."""
        self.sampler().prepare(self.config.vocab_size, self.device)
        graphs = self._graphs_of(kv)
        if graphs is not None and self.recorder is not None:
            graphs.prepare()

    def is_graph_step(self, batch: StepBatch, kv: Tensor) -> bool:
        """See engine/ahead.py: whether `forward` takes tokens of this batch that `keep_drawn` was given."""
        graphs = self._graphs_of(kv)
        return graphs is not None and graphs.buffers.why_not(batch) is None

    def keep_drawn(self, tokens: Tensor) -> None:
        """tokens [R], on the device: in a decode step that comes next, token -1 - r is the r-th of them."""
        if self._graphs is not None:
            self._graphs.buffers.drawn[: len(tokens)].copy_(tokens)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: Tensor, signal: LayerSignal | None = None, hidden: Tensor | None = None) -> Tensor:
        """See DecoderModel.forward. Logits hold until the next call. On a GPU the work is queued: nothing here waits for it,
        unless `signal` is to be told and has no marks."""
        graphs = self._graphs_of(kv) if signal is None else None
        if graphs is not None and graphs.buffers.why_not(batch) is None:
            output = graphs.run(batch)
        else:
            output = self._eager(batch, kv, signal)
        if hidden is not None:
            hidden.copy_(output.states)
        return output.logits

    def _graphs_of(self, kv: Tensor) -> DecodeGraphs | None:
        """Of this pool; those of another, if there are some, are given up. None for a pool with other blocks than planned for."""
        if self.sizes is None or kv.shape[3] != self.sizes.block_size:
            return None
        if self._graphs is None or not self._graphs.is_of(kv):
            self._graphs = DecodeGraphs(self._step, kv, self.sizes, self.recorder)
        return self._graphs

    def _eager(self, batch: StepBatch, kv: Tensor, signal: LayerSignal | None) -> StepOutput:
        num_rows = len(batch.logits_rows)
        meta = StepMetadata.of(batch, self.device, padded(Capacity.of(batch)))
        output = self._step.run(meta, kv, signal)
        return StepOutput(output.logits[:num_rows], output.states[:num_rows])


def _num_bytes(linear: Linear) -> int:
    weight = getattr(linear, "weight", None)
    return int(weight.num_bytes if isinstance(weight, WeightWords) else weight.nbytes) if weight is not None else 0


def padded(capacity: Capacity) -> Capacity:
    """With tokens and rows of logits in multiples of 4, as products want them, and sequences for the tokens of padding."""
    num_padding = -capacity.num_tokens % ROW_MULTIPLE
    return replace(
        capacity,
        num_tokens=capacity.num_tokens + num_padding,
        num_seqs=capacity.num_seqs + -(-num_padding // max(1, capacity.max_query_len)),
        num_logits=capacity.num_logits + -capacity.num_logits % ROW_MULTIPLE,
    )
