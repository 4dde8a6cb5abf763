"""A decoder on the Triton kernels. Where a recorder is given, decode steps are graphs, and what others do between attentions."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kernels.triton.attention import TritonAttention
from pdmesh.engine.kernels.triton.cuda_graphs import Recorder
from pdmesh.engine.kernels.triton.decode import DecodeGraphs, DecodeSizes
from pdmesh.engine.kernels.triton.linear_fp8 import Fp8Linear
from pdmesh.engine.kernels.triton.linear_words import WordLinear
from pdmesh.engine.kernels.triton.metadata import Capacity, StepMetadata
from pdmesh.engine.kernels.triton.piecewise_graphs import PieceGraphs
from pdmesh.engine.kernels.triton.sampling import DeviceSampler
from pdmesh.engine.kernels.triton.split_bounds import SplitBounds
from pdmesh.engine.kernels.triton.split_kv import SPLITS, Splits
from pdmesh.engine.kernels.triton.step import StepOutput, TritonStep, tell
from pdmesh.engine.kernels.triton.step_memory import StepMemory, bounds_of
from pdmesh.engine.kernels.triton.warmup import warm
from pdmesh.engine.kernels.triton.weight_words import WeightWords
from pdmesh.engine.kv_cache.events import LayerSignal
from pdmesh.engine.memory import MIB, effective_max_context, free_memory
from pdmesh.engine.models.decoder import DecoderModel
from pdmesh.engine.models.layers import ROW_MULTIPLE, Linear
from pdmesh.engine.runner.batch import StepBatch

# Part of the numeric mode: to be raised with every change of the kernels, or of how weights are quantized, that changes bits of a
# logit.
KERNEL_REVISION = 3

logger = logging.getLogger(__name__)


class TritonModel:
    """`forward` as the model runner wants it, with the weights of a loaded decoder."""

    backend = "triton"

    def __init__(
        self,
        decoder: DecoderModel,
        sizes: DecodeSizes | None = None,
        *,
        token_buckets: Sequence[int] = (),
        recorder: Recorder | None = None,
        splits: Splits = SPLITS,
        kv_scales: Tensor | None = None,
        max_rows: int | None = None,
    ) -> None:
        """`sizes`: of decode steps, which then go in buckets, recorded where there is a recorder; `token_buckets` (pieces.py): of
        other steps, likewise. None, and no buckets: each step is as wide as its batch. `splits` of attention: part of the numeric
        mode. `kv_scales` [num_layers, 2] float32 where the pool is fp8. `max_rows` of logits in a step; None: any."""
        self.config, self.decoder, self.sizes, self.token_buckets = decoder.config, decoder, sizes, tuple(token_buckets)
        self.splits, self.recorder, self.kv_scales, self.max_rows = splits, recorder, kv_scales, max_rows
        self._graphs: DecodeGraphs | None = None
        self._pieces: PieceGraphs | None = None
        attention = TritonAttention(decoder.config, str(decoder.device), kv_scales=kv_scales, splits=splits)
        self._step = TritonStep(decoder, attention)

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def embedding(self) -> Tensor:
        return self.decoder.embedding

    def first_layers(self, num_layers: int) -> TritonModel:
        """See DecoderModel.first_layers."""
        return TritonModel(
            self.decoder.first_layers(num_layers),
            self.sizes,
            token_buckets=self.token_buckets,
            recorder=self.recorder,
            splits=self.splits,
            kv_scales=None if self.kv_scales is None else self.kv_scales[:num_layers],
            max_rows=self.max_rows,
        )

    def sampler(self) -> DeviceSampler:
        """One that draws where the logits are."""
        return DeviceSampler(num_seqs=0 if self.sizes is None else self.sizes.max_num_seqs)

    @property
    def bytes_per_step(self) -> int:
        """Weight bytes that a step of few rows reads: its limit is this over the memory's bandwidth."""
        layers = self.decoder.layers
        maps = [self.decoder.head, *(m for layer in layers for m in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down))]
        return sum(map(_num_bytes, maps))

    def step_bytes(self, config: EngineConfig) -> int:
        """Of the device's memory, beside weights and pool: see step_memory.py."""
        return self._memory().num_bytes(bounds_of(config, effective_max_context(config, self.config)))

    def draft_bytes(self, config: EngineConfig) -> int:
        """As `step_bytes`, of a model that drafts for another one, whose sampler draws for both."""
        return self._memory().draft_bytes(bounds_of(config, effective_max_context(config, self.config)))

    def _memory(self) -> StepMemory:
        return StepMemory(
            self.config,
            itemsize=self.decoder.dtype.itemsize,
            is_expanded=isinstance(_inner(self.decoder.head), WordLinear),
            splits=self.splits,
            row_buckets=self.sizes.buckets if self.sizes is not None else (),
            token_buckets=self.token_buckets,
            is_rounded=isinstance(_inner(self.decoder.layers[0].qkv), Fp8Linear),
        )

    def prepare(self, kv: Tensor) -> None:
        """`prepare_steps` and `prepare_draws`, ahead of the first request: a minute or two on a GPU the first time, seconds
        afterwards. Without it each kernel is compiled, and each graph recorded, when it is first needed."""
        self.prepare_steps(kv)
        self.prepare_draws()

    def prepare_draws(self) -> None:
        """Compiles what draws from such a model's logits launch."""
        if self.recorder is not None:
            self.sampler().prepare(self.config.vocab_size, self.device)

    @torch.inference_mode()
    def prepare_steps(self, kv: Tensor) -> None:
        """Compiles what steps launch, and records those of all buckets on this pool."""
        if self.recorder is None:
            return
        started_s, free = time.monotonic(), free_memory(kv.device.type)
        warm(self._step, kv, *(() if self.max_rows is None else (self.max_rows,)))
        for graphs in (self._graphs_of(kv), self._pieces_of(kv)):
            if graphs is not None:
                graphs.prepare()
        logger.info("graphs took %.1f s and %.0f MiB", time.monotonic() - started_s, (free - free_memory(kv.device.type)) / MIB)

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
        graphs = self._graphs_of(kv)
        if graphs is not None and graphs.buffers.why_not(batch) is None:
            output = graphs.run(batch)  # whether or not somebody is to be told: ranks that are not told launch the same
            for index in range(self.config.num_layers):
                tell(signal, index, self.device)
        else:
            output = self._other(batch, kv, signal)
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

    def _pieces_of(self, kv: Tensor) -> PieceGraphs | None:
        """Likewise; blocks may have any size."""
        if not self.token_buckets:
            return None
        if self._pieces is None or not self._pieces.is_of(kv):
            self._pieces = PieceGraphs(self._step, kv, self.token_buckets, self.recorder)
        return self._pieces

    def _other(self, batch: StepBatch, kv: Tensor, signal: LayerSignal | None) -> StepOutput:
        """A step that is none of the decode graphs'."""
        pieces = self._pieces_of(kv)
        bucket = None if pieces is None else pieces.bucket_of(batch.num_tokens)
        capacity = Capacity.of(batch, SplitBounds.of(self.config.num_heads, self.max_rows or 0))
        meta = StepMetadata.of(batch, self.device, padded(capacity, bucket))
        output = self._step.run(meta, kv, signal) if pieces is None or bucket is None else pieces.run(meta, signal)
        num_rows = len(batch.logits_rows)
        return StepOutput(output.logits[:num_rows], output.states[:num_rows])


def _inner(linear: Linear) -> Linear:
    """What a rank has of a map that ranks share (engine/parallel/layers.py)."""
    return getattr(linear, "inner", linear)


def _num_bytes(linear: Linear) -> int:
    weight = getattr(_inner(linear), "weight", None)
    return int(weight.num_bytes if isinstance(weight, WeightWords) else weight.nbytes) if weight is not None else 0


def padded(capacity: Capacity, num_tokens: int | None = None) -> Capacity:
    """With tokens (or `num_tokens` of them) and rows of logits in multiples of 4, as products want them, and sequences for the
    tokens of padding."""
    whole = num_tokens or capacity.num_tokens + -capacity.num_tokens % ROW_MULTIPLE
    num_padding = whole - capacity.num_tokens
    return replace(
        capacity,
        num_tokens=whole,
        num_seqs=capacity.num_seqs + -(-num_padding // max(1, capacity.max_query_len)),
        num_logits=capacity.num_logits + -capacity.num_logits % ROW_MULTIPLE,
    )
