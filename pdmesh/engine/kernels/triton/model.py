"""A decoder on the Triton kernels. With a recorder, decode steps are graphs, and in other steps the pieces between attentions
are."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kernels.triton.attention import TritonAttention
from pdmesh.engine.kernels.triton.blocks import TritonBlocks
from pdmesh.engine.kernels.triton.cuda_graphs import DecodeGraphs, DecodeSizes, Recorder, fewest_rows
from pdmesh.engine.kernels.triton.experts.experts import GroupedExperts
from pdmesh.engine.kernels.triton.linear.linear import Fp8Linear, WordLinear
from pdmesh.engine.kernels.triton.linear.mlps import MLPStep
from pdmesh.engine.kernels.triton.linear.weight_product import PRODUCT_ROWS_MAX
from pdmesh.engine.kernels.triton.linear.weight_words import WeightWords
from pdmesh.engine.kernels.triton.metadata import Capacity, StepMetadata, has_adapters
from pdmesh.engine.kernels.triton.piecewise_graphs import PieceGraphs
from pdmesh.engine.kernels.triton.sampling.batch import MOST_ROWS
from pdmesh.engine.kernels.triton.sampling.sampler import DeviceSampler
from pdmesh.engine.kernels.triton.split_kv import SPLITS, SplitBounds, Splits
from pdmesh.engine.kernels.triton.step import StepOutput, TritonStep, query_dims, tell
from pdmesh.engine.kv_cache.block_moves import Move
from pdmesh.engine.kv_cache.events import LayerReadiness
from pdmesh.engine.lora.triton_maps import TritonAdapters
from pdmesh.engine.memory import MIB, effective_max_context, free_memory
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.decoder import DecoderModel, LatentMaps, sinks_of
from pdmesh.engine.models.layers import ROW_MULTIPLE, Linear, Norm
from pdmesh.engine.runner.batch import StepBatch

# Compilation and loading of every kernel that steps of a model launch, before the first request.
#
# Triton compiles a kernel when it is first launched with other constants, which takes seconds in which nothing else is computed.
# Steps of one model differ in little: a product's rows, up to the next power of two and once beyond the last; short
# sequences (split, merge) or long ones (walk); with tails or without. Numbers that grow (tokens, sequences, widths of tables) are
# constants to no kernel. So some ten steps without a sequence launch all that any step will, and write nothing.
#
# Not included: sampling (sampling/sampler.py), and a decode step's message (cuda_graphs.py), which belongs to its graph.


@torch.inference_mode()
def warm(step: TritonStep, kv: Tensor, max_logits: int = PRODUCT_ROWS_MAX + ROW_MULTIPLE) -> None:
    """Launch the kernels of all kinds of steps. kv is the pool, which is not changed. `max_logits`: the most rows of logits of a
    step. Takes the memory of a step of 132 tokens."""
    for capacity in padding_steps(step.attention.splits, max_logits, fewest_rows(kv.device)):
        step.run(StepMetadata.of(_nothing(), kv.device, capacity), kv)
    if True in step.kinds:  # whose kernels are the same for all steps
        step.run(StepMetadata.of(_nothing(), kv.device, capacity), kv, adapted=True)


@torch.inference_mode()
def warm_moves(kv: Tensor) -> None:
    """Compile the copies of blocks with all their heads (blocks.py), by one token that is read and put back: before the pool is
    used."""
    heads, copies = range(kv.shape[4]), TritonBlocks()
    piece = kv.new_empty((1, 2, 1, *kv.shape[4:]))
    ids = torch.zeros(1, dtype=torch.int32, device=kv.device)
    move = Move(kv, range(1), ids, piece, 0, heads)
    copies.gather(move)
    copies.scatter(move)


def padding_steps(splits: Splits, max_logits: int, fewest: int = ROW_MULTIPLE) -> Iterator[Capacity]:
    """Yield one step for each kind, each with one sequence without context. `splits` are attention's."""
    kinds = [(rows, 0) for rows in _rows(fewest)] + [(ROW_MULTIPLE, 1), (2 * ROW_MULTIPLE, 1)]
    for rows, tail_width in kinds:
        yield Capacity(
            num_tokens=rows,
            num_seqs=1,
            table_width=1,
            tail_width=tail_width,
            num_logits=min(rows, max_logits + -max_logits % ROW_MULTIPLE),
            max_query_len=rows,
            max_context=2 * splits.min_keys,  # two parts, so that there is something to merge
            num_split_tokens=0,
            max_split_len=ROW_MULTIPLE,  # the others are walked
        )


def _rows(fewest: int) -> list[int]:
    powers = [fewest]
    while powers[-1] < PRODUCT_ROWS_MAX:
        powers.append(2 * powers[-1])
    return [*powers, PRODUCT_ROWS_MAX + ROW_MULTIPLE]


def _nothing() -> StepBatch:
    none = torch.zeros(0, dtype=torch.int64)
    return StepBatch(
        token_ids=none, positions=none, slot_mapping=none, query_starts=[0], context_lens=[], block_tables=[], logits_rows=none
    )


# What steps take of the device's memory besides weights and pool: counted before the pool is sized, so that it leaves enough free
#
#     activations     of the widest step, launched one by one: what lives at once within a layer
#     graphs          the decode buckets' logits, which are kept; buffers between pieces; the graphs themselves
#     attention       parts of split queries
#     sampling        logits, rounded and wide, and the sampler's buffers
#     expanded        one map of quantized weights, for more rows than the kernels on words take; once more where graphs hold one
#     rounded         activations in fp8 and a product that is not yet what it will be, where products round them
#     adapters        ranks of a token between A and B of LoRA adapters; graphs once more, of steps with adapters
#
# They are upper bounds of what is allocated, except for two estimates that were not measured: NODE_BYTES for a launch in a graph,
# and OTHERS_BYTES for code of kernels and memory of libraries. The memory that graphs took is logged at start.


NODE_BYTES = 16 << 10
OTHERS_BYTES = 256 << 20
LAUNCHES_PER_LAYER = 11
ADAPTER_LAUNCHES = 8  # of a layer: two around each of four products
EXPANDED_FROM = 129  # rows: above PRODUCT_ROWS_MAX of weight_product.py
WIDE_EXPANDED_FROM = 1  # rows of float32, which tiles do not take
_SCRATCH_BYTES = 12  # of the sampler for a row and token of the vocabulary
_LOGIT_BYTES = 4
_SELECTED_BYTES = 28  # of a row with log-probabilities: those, logits once more, keys of 8 bytes, temporaries


@dataclass(frozen=True)
class StepBounds:
    """Hold the limits of a step. `num_rows` of logits; `max_context` of a sequence in tokens."""

    num_tokens: int
    num_rows: int
    max_context: int


@dataclass(frozen=True)
class StepMemory:
    """Compute the memory that steps of one model take. `itemsize` of activations; `is_expanded`: its weights are words;
    `is_rounded`: activations of wide products are rounded to fp8. `adapter_columns`: numbers of a token between A and B of LoRA
    adapters, where there are places for some."""

    config: ModelConfig
    itemsize: int
    is_expanded: bool
    splits: Splits
    row_buckets: Sequence[int]
    token_buckets: Sequence[int]
    is_rounded: bool = False
    adapter_columns: int = 0

    def num_bytes(self, bounds: StepBounds) -> int:
        return OTHERS_BYTES + self._draw(bounds.num_rows) + self.draft_bytes(bounds)

    def draft_bytes(self, bounds: StepBounds) -> int:
        """Return the bytes of a draft model beside another: its sampling uses the other's buffers."""
        expanded = self._expanded(bounds.num_tokens, bounds.num_rows)
        split_tokens = SplitBounds.of(self.config.num_heads, bounds.num_rows).num_tokens
        parts = self._parts(min(split_tokens, bounds.num_tokens), bounds.max_context)
        return self.activations(bounds.num_tokens) + parts + expanded + self.graphs(bounds.max_context)

    def activations(self, num_tokens: int) -> int:
        """Return bytes: residuals, queries and attention's output stay; besides them either all heads or the wide half of a
        layer."""
        config = self.config
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention = query + 2 * kv if config.latent is None else self._latent(query)
        widest = max(attention, 3 * config.intermediate_size, self._experts())
        a_token = (4 * config.hidden_size + config.num_heads * sum(query_dims(config)) + widest) * self.itemsize
        a_token += self._rounded(query) if self.is_rounded and num_tokens >= EXPANDED_FROM else 0
        return num_tokens * (a_token + 4 * self.adapter_columns)

    def _latent(self, query: int) -> int:
        """Return numbers of a token before latent attention, or behind it: the layer's first product, the query's bottleneck, the
        queries, absorbed ones before they lie beside the rotated, the latent; or values twice."""
        config, latent = self.config, self.config.latent
        assert latent is not None
        before = 2 * latent.query_rank + 2 * query + latent.width + (config.num_heads + 1) * latent.kv_rank
        return max(before, 2 * config.num_heads * latent.value_dim)

    def _experts(self) -> int:
        """Return numbers of a token in a mixture of experts: what its experts read and give, or the shared expert's besides what
        they gave; scores, choices and their order count as whole numbers of 32 bits."""
        experts, hidden = self.config.experts, self.config.hidden_size
        if experts is None:
            return 0
        given, scores = experts.top_k * hidden, 2 * (experts.num_experts + 1 + 3 * experts.top_k)
        return given + max(experts.top_k * experts.intermediate_size, 3 * experts.shared_intermediate_size + hidden) + scores

    def _rounded(self, query: int) -> int:
        """Return bytes of a token: codes of a product's input and their scale; half of gate and up in bfloat16 besides the
        result."""
        config = self.config
        return max(config.hidden_size, query, config.intermediate_size) + 4 + config.intermediate_size * self.itemsize

    def graphs(self, max_context: int) -> int:
        """Return bytes of graphs: those of decode steps keep their logits and parts of their own; those between attentions keep
        what the last one hands on. All compute in the memory of the widest, which is not that of steps without graphs."""
        config, buckets = self.config, (*self.row_buckets, *self.token_buckets)
        launches, kinds = LAUNCHES_PER_LAYER + _more_launches(config), 2 if self.adapter_columns else 1
        nodes = len(buckets) * (kinds * launches + (ADAPTER_LAUNCHES if self.adapter_columns else 0)) * (config.num_layers + 1)
        outputs = sum(self.row_buckets) * (config.vocab_size * _LOGIT_BYTES + config.hidden_size * self.itemsize)
        handed_on = sum(self.token_buckets) * config.hidden_size * self.itemsize
        most_rows = max(self.row_buckets, default=0)
        pool = self.activations(max(buckets, default=0)) + most_rows * config.vocab_size * self.itemsize
        pool += self._expanded(max(buckets, default=0), most_rows)  # pieces between attentions do not multiply with the head
        return nodes * NODE_BYTES + kinds * outputs + handed_on + pool + self._parts(most_rows, max_context)

    def _parts(self, num_queries: int, max_context: int) -> int:
        config = self.config
        return num_queries * config.num_heads * self.splits.bound(max_context) * (query_dims(config)[1] + 2) * 4

    def _draw(self, num_rows: int) -> int:
        """Return bytes of sampling: counts for penalties too, and the selection of log-probabilities, should all rows need
        them."""
        rows = 1 << max(0, num_rows - 1).bit_length()
        counts = 4 * max(MOST_ROWS, rows)
        a_row = _LOGIT_BYTES + self.itemsize + _SELECTED_BYTES
        return self.config.vocab_size * (num_rows * a_row + rows * _SCRATCH_BYTES + counts)

    def _expanded(self, num_tokens: int, num_rows: int) -> int:
        """Return the bytes of the largest expanded map that so many tokens, or rows of logits, are multiplied with."""
        config, fewest = self.config, EXPANDED_FROM if self.itemsize == 2 else WIDE_EXPANDED_FROM
        of_layer = self._widest_map() if num_tokens >= fewest else 0
        of_head = config.vocab_size if num_rows >= fewest else 0
        return max(of_layer, of_head) * config.hidden_size * self.itemsize if self.is_expanded else 0

    def _widest_map(self) -> int:
        """Return the outputs of a layer's largest map. The experts' own are multiplied as words however many tokens there are."""
        config = self.config
        if config.experts is None:
            return 2 * config.intermediate_size
        dense = 0 if all(config.experts.layers) else config.intermediate_size
        heads = config.head_dim * (config.num_heads + 2 * config.num_kv_heads)
        return max(heads, 2 * dense, 2 * config.experts.shared_intermediate_size)


def _more_launches(config: ModelConfig) -> int:
    """Return the launches of a layer that a Llama's has not, at most."""
    latent = 6 if config.latent is not None else 0
    norms = latent + 2 * config.post_norm + 2 * (config.qk_norm == "all") + 2 * (not config.pre_norm or config.parallel)
    return norms + (6 if config.experts is not None else 0)


def bounds_of(config: EngineConfig, max_context: int) -> StepBounds:
    """Return bounds whose rows are one for each sequence, and one for each draft token."""
    guesses = config.max_num_seqs * config.max_draft_tokens if config.names_drafts else 0
    spare = max(0, config.max_num_batched_tokens - config.max_num_seqs)
    return StepBounds(config.max_num_batched_tokens, config.max_num_seqs + min(guesses, spare), max_context)


# Part of the numeric mode: raise it with every change of the kernels, or of the quantization of weights, that changes bits of a
# logit.
KERNEL_REVISION = 6

logger = logging.getLogger(__name__)


class TritonModel:
    """Implement `forward` for the model runner, with the weights of a loaded decoder."""

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
        adapters: TritonAdapters | None = None,
    ) -> None:
        """`sizes` of decode steps, which then run in buckets, recorded where there is a recorder; `token_buckets`
        (piecewise_graphs.py) of other steps, likewise. None, and no buckets: each step is as wide as its batch. `splits` of
        attention are part of the numeric mode. `kv_scales` [num_layers, 2] float32 where the pool is fp8. `max_rows` of logits in
        a step; None: any. `adapters`: places for LoRA adapters in the decoder's maps."""
        self.config, self.decoder, self.sizes, self.token_buckets = decoder.config, decoder, sizes, tuple(token_buckets)
        self.splits, self.recorder, self.kv_scales, self.max_rows = splits, recorder, kv_scales, max_rows
        self.adapter_slots = adapters
        self._graphs: DecodeGraphs | None = None
        self._pieces: PieceGraphs | None = None
        sinks = sinks_of(decoder.layers)
        attention = TritonAttention(decoder.config, str(decoder.device), kv_scales=kv_scales, splits=splits, sinks=sinks)
        self._step = TritonStep(decoder, attention, None if adapters is None else adapters.rows)

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def step(self) -> TritonStep:
        """Return what computes a step; its MLPs count the tokens of their experts."""
        return self._step

    @property
    def embedding(self) -> Tensor:
        return self.decoder.embedding

    @property
    def norm(self) -> Norm:
        """Return the norm before the head."""
        return self.decoder.norm

    def first_layers(self, num_layers: int) -> TritonModel:
        """See DecoderModel.first_layers. Adapters are the whole model's alone: a draft is the base's."""
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
        """Return a sampler that computes where the logits are."""
        return DeviceSampler(num_seqs=0 if self.sizes is None else self.sizes.max_num_seqs)

    @property
    def bytes_per_step(self) -> int:
        """Return the weight bytes that a step of few rows reads: its limit is this over the memory's bandwidth."""
        maps = [self.decoder.head, *(each for layer in self.decoder.layers for each in (layer.qkv, layer.output))]
        latents = sum(_num_bytes_of_latent(layer.latent) for layer in self.decoder.layers if layer.latent is not None)
        return sum(map(_num_bytes, maps)) + sum(map(_num_bytes_of_mlp, self._step.mlps)) + latents

    def step_bytes(self, config: EngineConfig) -> int:
        """Return the device memory of steps, besides weights and pool: see StepMemory."""
        return self._memory().num_bytes(bounds_of(config, effective_max_context(config, self.config)))

    def draft_bytes(self, config: EngineConfig) -> int:
        """Return `step_bytes` of a draft model, which uses the sampler of the model that it drafts for."""
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
            adapter_columns=0 if self.adapter_slots is None else self.adapter_slots.num_columns,
        )

    def prepare(self, kv: Tensor) -> None:
        """Call `prepare_steps` and `prepare_draws`, ahead of the first request: a minute or two on a GPU the first time, seconds
        afterwards. Without it each kernel is compiled, and each graph recorded, when it is first needed."""
        self.prepare_steps(kv)
        self.prepare_draws()

    def prepare_draws(self) -> None:
        """Compile the kernels that sample from such a model's logits."""
        if self.recorder is not None:
            self.sampler().prepare(self.config.vocab_size, self.device)

    @torch.inference_mode()
    def prepare_steps(self, kv: Tensor) -> None:
        """Compile what steps launch, and record the graphs of all buckets on this pool."""
        if self.recorder is None:
            return
        started_s, free = time.monotonic(), free_memory(kv.device.type)
        warm(self._step, kv, *(() if self.max_rows is None else (self.max_rows,)))
        for graphs in (self._graphs_of(kv), self._pieces_of(kv)):
            if graphs is not None:
                graphs.prepare()
        logger.info("graphs took %.1f s and %.0f MiB", time.monotonic() - started_s, (free - free_memory(kv.device.type)) / MIB)

    def is_graph_step(self, batch: StepBatch, kv: Tensor) -> bool:
        """Return whether `forward` takes tokens of this batch from `keep_drawn` (pdmesh/engine/runner/overlap.py)."""
        graphs = self._graphs_of(kv)
        return graphs is not None and graphs.buffers.why_not(batch) is None

    def keep_drawn(self, tokens: Tensor) -> None:
        """Keep tokens [R], on the device: in the next decode step, token -1 - r is the r-th of them. Where none could be drawn
        any token stands in: that row is computed in vain."""
        if self._graphs is not None:
            torch.clamp(tokens, min=0, out=self._graphs.buffers.drawn[: len(tokens)])

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: Tensor, signal: LayerReadiness | None = None, hidden: Tensor | None = None) -> Tensor:
        """See DecoderModel.forward. Logits hold until the next call. On a GPU the work is queued and not waited for, unless
        `signal` needs notifications and has no marks."""
        graphs = self._graphs_of(kv)
        if graphs is not None and graphs.buffers.why_not(batch) is None:
            output = graphs.run(batch)  # with or without a signal, as ranks without one launch the same
            for index in range(self.config.num_layers):
                tell(signal, index, self.device)
        else:
            output = self._other(batch, kv, signal)
        if hidden is not None:
            hidden.copy_(output.states)
        return output.logits

    def _graphs_of(self, kv: Tensor) -> DecodeGraphs | None:
        """Return the graphs of this pool; those of another are dropped. None for a pool with other blocks than planned for."""
        if self.sizes is None or kv.shape[3] != self.sizes.block_size:
            return None
        if self._graphs is None or not self._graphs.is_of(kv):
            self._graphs = DecodeGraphs(self._step, kv, self.sizes, self.recorder)
        return self._graphs

    def _pieces_of(self, kv: Tensor) -> PieceGraphs | None:
        """Return the piece graphs of this pool; blocks may have any size."""
        if not self.token_buckets:
            return None
        if self._pieces is None or not self._pieces.is_of(kv):
            self._pieces = PieceGraphs(self._step, kv, self.token_buckets, self.recorder)
        return self._pieces

    def _other(self, batch: StepBatch, kv: Tensor, signal: LayerReadiness | None) -> StepOutput:
        """Run a step that no decode graph serves."""
        pieces = self._pieces_of(kv)
        bucket = None if pieces is None else pieces.bucket_of(batch.num_tokens)
        capacity = Capacity.of(batch, SplitBounds.of(self.config.num_heads, self.max_rows or 0))
        meta = StepMetadata.of(batch, self.device, padded(capacity, bucket))
        if pieces is None or bucket is None:
            output = self._step.run(meta, kv, signal, adapted=has_adapters(batch))
        else:
            output = pieces.run(meta, signal, adapted=has_adapters(batch))
        num_rows = len(batch.logits_rows)
        return StepOutput(output.logits[:num_rows], output.states[:num_rows])


def _inner(linear: Linear) -> Linear:
    """Return a rank's part of a map that ranks share (pdmesh/engine/parallel/collectives.py), or a map without adapters."""
    return getattr(linear, "inner", linear)


def _num_bytes(linear: Linear) -> int:
    weight = getattr(_inner(linear), "weight", None)
    return int(weight.num_bytes if isinstance(weight, WeightWords) else weight.nbytes) if weight is not None else 0


def _num_bytes_of_latent(maps: LatentMaps) -> int:
    queries = 0 if maps.queries is None else _num_bytes(maps.queries)
    return queries + maps.key_map.nbytes + maps.value_map.nbytes


def _num_bytes_of_mlp(mlp: MLPStep) -> int:
    """Return the bytes that one token reads."""
    own = mlp.num_bytes_of_token if isinstance(mlp, GroupedExperts) else 0
    return own + sum(map(_num_bytes, mlp.maps))


def padded(capacity: Capacity, num_tokens: int | None = None) -> Capacity:
    """Round tokens (or `num_tokens`) and rows of logits up to multiples of 4, which products need, and add sequences for the
    tokens of padding."""
    whole = num_tokens or capacity.num_tokens + -capacity.num_tokens % ROW_MULTIPLE
    num_padding = whole - capacity.num_tokens
    return replace(
        capacity,
        num_tokens=whole,
        num_seqs=capacity.num_seqs + -(-num_padding // max(1, capacity.max_query_len)),
        num_logits=capacity.num_logits + -capacity.num_logits % ROW_MULTIPLE,
    )
