"""A decoder on the CPU kernels: one native call for each step."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import torch
from torch import Tensor

from pdmesh.engine.kernels.cpu import library as abi
from pdmesh.engine.kernels.cpu.core_table import CoreTable
from pdmesh.engine.kernels.cpu.library import gather
from pdmesh.engine.kernels.cpu.sampling import NativeSampler
from pdmesh.engine.kv_cache.events import LayerReadiness
from pdmesh.engine.models.config import ExpertsConfig, LatentConfig, ModelConfig, missing_part
from pdmesh.engine.models.decoder import shortened
from pdmesh.engine.outputs import CoreSeconds
from pdmesh.engine.runner.batch import StepBatch, Tail
from pdmesh.engine.runner.decode_batch import DecodeBatch

# Part of the numeric mode: raise it with every change of the kernels that changes bits of a logit or the layout of KV blocks,
# and with every change of the quantization of weights.
KERNEL_REVISION = 4
MAX_HEAD_DIM = 512
GROUP_TOKENS = 16  # tokens of a group in a KV block: see attention.h
INT8_SCALE_BYTES = 4  # a token's scale for each head, at the end of its int8 block
# How long the threads spin for their next piece of work before they sleep. Within a step the pieces follow each other in
# microseconds; between steps the engine's Python takes a few hundred.
SPIN_US = 100


@dataclass(frozen=True)
class PackedLinear:
    """y = W x + b. `packed` as pdmesh/engine/loader/pack.py lays it out; scales and bias float32, padded to 16."""

    format: str
    num_outputs: int
    num_inputs: int
    group: int
    packed: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Return the bytes that a product reads."""
        return self.packed.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def descriptor(self) -> abi.Linear:
        return abi.Linear(
            abi.FORMATS[self.format],
            self.num_outputs,
            self.num_inputs,
            self.group,
            self.packed.data_ptr(),
            _address(self.scales),
            _address(self.bias),
        )


def gathered(linears: Sequence[PackedLinear]) -> list[PackedLinear]:
    """Return copies in large pages, one after the other."""
    copies = gather([linear.packed for linear in linears])
    return [replace(linear, packed=copy) for linear, copy in zip(linears, copies, strict=True)]


@dataclass(frozen=True)
class PackedNorm:
    """Weight and bias are float32, padded with zeros to 16. `kind`: rms or layer."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    kind: str

    def descriptor(self) -> abi.Norm:
        return abi.Norm(self.weight.data_ptr(), _address(self.bias), self.eps, abi.NORM_KINDS[self.kind])


@dataclass(frozen=True)
class PackedMLP:
    """`gate_up` is the first map of a plain MLP."""

    gate_up: PackedLinear
    down: PackedLinear

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        return (self.gate_up, self.down)


@dataclass(frozen=True)
class PackedExperts:
    """`router` is float32; behind the experts' rows it has the shared expert's gate, if there is one. `correction` is float32."""

    config: ExpertsConfig
    router: PackedLinear
    correction: Tensor | None
    experts: tuple[PackedMLP, ...]
    shared: PackedMLP | None

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        mlps = self.experts if self.shared is None else (*self.experts, self.shared)
        return tuple(linear for mlp in mlps for linear in mlp.linears)

    @property
    def bytes_per_step(self) -> int:
        """Return the weight bytes that a step of one token reads."""
        taken = [*self.experts[: self.config.top_k], *([] if self.shared is None else [self.shared])]
        return sum(linear.num_bytes for mlp in taken for linear in mlp.linears) + self.router.num_bytes

    def with_linears(self, linears: Sequence[PackedLinear]) -> PackedExperts:
        """Return the same with other maps, in the order of `linears`."""
        mlps = tuple(PackedMLP(*linears[first : first + 2]) for first in range(0, len(linears), 2))
        count = len(self.experts)
        return replace(self, experts=mlps[:count], shared=None if self.shared is None else mlps[count])

    def descriptor(self, activation: str, counts: Tensor) -> abi.Experts:
        """Return what the kernels read; `counts` [num_experts] int64 adds up the tokens of each expert."""
        config = self.config
        experts = (abi.Expert * len(self.experts))(*(_expert(mlp) for mlp in self.experts))
        return abi.Experts(
            num_experts=config.num_experts,
            top_k=config.top_k,
            scoring=abi.SCORINGS[config.scoring],
            normalizes=config.normalize,
            num_groups=config.num_groups,
            top_groups=config.top_groups,
            ranks_by_two=config.group_rank == "top2",
            activation=abi.ACTIVATIONS[config.activation or activation],
            scale=config.scale,
            jitter=config.router_jitter,
            limit=config.activation_limit,
            has_shared_gate=config.shared_gate,
            scales_input=config.scales_input,
            router=self.router.descriptor(),
            correction=_address(self.correction),
            experts=experts,
            shared=None if self.shared is None else ctypes.pointer(_expert(self.shared)),
            counts=counts.data_ptr(),
        )


def _expert(mlp: PackedMLP) -> abi.Expert:
    return abi.Expert(mlp.gate_up.descriptor(), mlp.down.descriptor())


@dataclass(frozen=True)
class PackedLatent:
    """Hold the maps of latent attention behind a layer's first product: LatentMaps (pdmesh/engine/models/decoder.py).

    Each head has a key map and a value map."""

    config: LatentConfig
    query_norm: PackedNorm | None
    queries: PackedLinear | None
    latent_norm: PackedNorm
    key_maps: tuple[PackedLinear, ...]
    value_maps: tuple[PackedLinear, ...]

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        return (*self.key_maps, *self.value_maps, *([] if self.queries is None else [self.queries]))

    def with_linears(self, linears: Sequence[PackedLinear]) -> PackedLatent:
        """Return the same with other maps, in the order of `linears`."""
        heads = len(self.key_maps)
        queries = None if self.queries is None else linears[2 * heads]
        return replace(self, key_maps=tuple(linears[:heads]), value_maps=tuple(linears[heads : 2 * heads]), queries=queries)

    def descriptor(self) -> abi.Latent:
        """Return what the kernels read."""
        maps = [(abi.Linear * len(maps))(*(m.descriptor() for m in maps)) for maps in (self.key_maps, self.value_maps)]
        return abi.Latent(
            kv_rank=self.config.kv_rank,
            nope_dim=self.config.nope_dim,
            rope_dim=self.config.rope_dim,
            value_dim=self.config.value_dim,
            query_norm=abi.Norm() if self.query_norm is None else self.query_norm.descriptor(),
            latent_norm=self.latent_norm.descriptor(),
            queries=abi.Linear() if self.queries is None else self.queries.descriptor(),
            key_maps=maps[0],
            value_maps=maps[1],
        )


@dataclass(frozen=True)
class PackedLayer:
    """Norms that a family lacks are None. The weights of `query_norm` and `key_norm`: one vector [head_dim] for all heads, or one
    for each head. `rope` is the number of the layer's rotary embedding."""

    input_norm: PackedNorm | None
    mlp_norm: PackedNorm | None
    query_norm: PackedNorm | None
    key_norm: PackedNorm | None
    qkv: PackedLinear
    output: PackedLinear
    mlp: PackedMLP | PackedExperts
    post_attention_norm: PackedNorm | None = None
    post_mlp_norm: PackedNorm | None = None
    sinks: Tensor | None = None
    latent: PackedLatent | None = None
    rope: int | None = 0

    @property
    def bytes_per_step(self) -> int:
        """Return the weight bytes that a step of one token reads."""
        mlp, latent = self.mlp, () if self.latent is None else self.latent.linears
        maps = (self.qkv, self.output, *latent, *(mlp.linears if isinstance(mlp, PackedMLP) else ()))
        return sum(linear.num_bytes for linear in maps) + (mlp.bytes_per_step if isinstance(mlp, PackedExperts) else 0)

    def gathered(self) -> PackedLayer:
        """Return the layer with its maps in one piece of memory, in the order in which a step streams them."""
        latent = () if self.latent is None else self.latent.linears
        qkv, output, *rest = gathered([self.qkv, self.output, *latent, *self.mlp.linears])
        own, rest = rest[: len(latent)], rest[len(latent) :]
        return replace(
            self,
            qkv=qkv,
            output=output,
            latent=None if self.latent is None else self.latent.with_linears(own),
            mlp=self.mlp.with_linears(rest) if isinstance(self.mlp, PackedExperts) else PackedMLP(*rest),
        )

    def descriptor(
        self, window: int, temperatures: Tensor | None, experts: abi.Experts | None, latent: abi.Latent | None
    ) -> abi.Layer:
        """Return what the kernels read; `window` and `temperatures`: see abi.h."""
        norms = (self.input_norm, self.mlp_norm, self.post_attention_norm, self.post_mlp_norm, self.query_norm, self.key_norm)
        maps = self.mlp.linears if isinstance(self.mlp, PackedMLP) else ()
        return abi.Layer(
            *(abi.Norm() if norm is None else norm.descriptor() for norm in norms),
            *(linear.descriptor() for linear in (self.qkv, self.output, *maps)),
            sinks=_address(self.sinks),
            temperatures=_address(temperatures),
            experts=None if experts is None else ctypes.pointer(experts),
            latent=None if latent is None else ctypes.pointer(latent),
            window=window,
            rope=-1 if self.rope is None else self.rope,
        )


@dataclass(frozen=True)
class PackedRope:
    """`cos`, `sin` [max_context, rotary_dim / 2] float32."""

    cos: Tensor
    sin: Tensor

    def descriptor(self) -> abi.Rope:
        return abi.Rope(self.cos.data_ptr(), self.sin.data_ptr(), 2 * self.cos.shape[1])


@dataclass(frozen=True)
class PackedWeights:
    """`embedding` [vocab, hidden] float32 or bfloat16; `positions` [max_context, hidden] float32, learned ones; `temperatures`
    [max_context] float32, factors of queries. `mapped_bytes` of the weights are pages of a file, which the system counts as
    free. `file`: the path and the key of the file that holds them; None: there is none."""

    layers: list[PackedLayer]
    norm: PackedNorm
    head: PackedLinear
    embedding: Tensor
    embedding_multiplier: float
    positions: Tensor | None
    ropes: tuple[PackedRope, ...]
    max_context: int
    embedding_norm: PackedNorm | None = None
    temperatures: Tensor | None = None
    mapped_bytes: int = 0
    file: tuple[str, str] | None = None

    @property
    def bytes_per_step(self) -> int:
        """Return the weight bytes that one step reads, however few tokens it has."""
        return sum(layer.bytes_per_step for layer in self.layers) + self.head.num_bytes


class PackedStep:
    """Hold a step as the kernels read it: `struct`, which lacks the profile, and all that it points to but the batch, which may
    hold this step."""

    def __init__(
        self,
        batch: StepBatch,
        kv: Tensor,
        logits: Tensor,
        adapters: abi.AdapterTable | None,
        signal: LayerReadiness | None,
        hidden: Tensor | None,
    ) -> None:
        """`logits`, and `hidden` if it is given, are filled. `adapters`: what the batch's slots name; None: nothing."""
        self._batch = weakref.ref(batch)
        self.kv, self.logits, self.adapters = kv, logits, adapters
        self._signal, self._hidden, self._tails = signal, hidden, _tails(batch.tails)
        self._tables, self._slots = _tables(batch), _int32(batch.adapter_slots)
        self.struct = abi.Step(
            batch.num_tokens,
            batch.num_seqs,
            len(batch.logits_rows),
            batch.token_ids.data_ptr(),
            batch.positions.data_ptr(),
            batch.slot_mapping.data_ptr(),
            *(numbers.buffer_info()[0] for numbers in self._tables),
            batch.logits_rows.data_ptr(),
            kv.data_ptr(),
            kv.shape[2],
            logits.data_ptr(),
            _address(hidden),
            None,
            *((None, -1, 1) if signal is None else (signal.address, signal.fd, signal.every)),
            *(numbers.buffer_info()[0] if numbers else None for numbers in self._tails),
            len(batch.tails),
            *((None, None) if adapters is None else (self._slots.buffer_info()[0], adapters.maps)),
        )

    def is_of(self, batch: StepBatch, kv: Tensor, signal: LayerReadiness | None, hidden: Tensor | None) -> bool:
        """Return whether it is the step of this batch, whose tensors stay where they are, without a signal and hidden states."""
        has_more = any(each is not None for each in (signal, hidden, self._signal, self._hidden))
        return self._batch() is batch and self.kv is kv and not has_more


class NativeModel:
    """Run a model on the CPU kernels. Bits of a token's logits depend on its sequence alone (see gemm.h, attention.h).

    The kernels count the tokens of each expert, see `expert_counts`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        config: ModelConfig,
        weights: PackedWeights,
        *,
        block_size: int,
        kv_dtype: torch.dtype,
        num_threads: int,
        cores: CoreTable | None = None,
        beside: NativeModel | None = None,
    ) -> None:
        """`cores`: its slots among a host's cores, one for each thread; on others it may compute, too. With `beside` the model
        computes with that model's threads, in turn with it, and `num_threads` are as many as those.

        Raises MemoryError when the engine's threads or buffers cannot be had.
        """
        self.config, self.weights = config, weights
        self.profile: abi.Profile | None = None  # each step fills it, if it is set
        self.adapters: abi.AdapterTable | None = None  # what the slots of a batch's adapters name
        self._library = library
        self._kv_dtype, self._block_size, self._num_threads = kv_dtype, block_size, num_threads
        self._cores: CoreTable | None = cores if beside is None else beside._cores
        self._kept_step: Callable[[], PackedStep | None] = _nothing  # of the last DecodeBatch, which holds it
        self._expert_counts = [_counts(layer) for layer in weights.layers]
        # The engine reads them in every step.
        self._experts = [
            layer.mlp.descriptor(config.activation, counts)
            if isinstance(layer.mlp, PackedExperts) and counts is not None
            else None
            for layer, counts in zip(weights.layers, self._expert_counts, strict=True)
        ]
        self._latents = [None if layer.latent is None else layer.latent.descriptor() for layer in weights.layers]
        descriptor = ctypes.byref(self._descriptor(block_size))
        if beside is None:
            lending = (None, 0, 0) if cores is None else (cores.address, cores.first, cores.max_guests)
            self._handle = library.pdmesh_engine_create(descriptor, num_threads, SPIN_US, *lending)
        else:
            self._handle = library.pdmesh_engine_create_beside(descriptor, beside._handle)
        if not self._handle:
            raise MemoryError(f"num_threads: the system refuses {num_threads} threads, or memory for them; give fewer")

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.pdmesh_engine_destroy(self._handle)

    @property
    def library(self) -> ctypes.CDLL:
        return self._library

    @property
    def num_threads(self) -> int:
        return self._num_threads

    @property
    def max_threads(self) -> int:
        """Return the most threads that a step may have: its own, and those on cores that others lend."""
        return self._num_threads + (0 if self._cores is None else self._cores.max_guests)

    def core_seconds(self) -> CoreSeconds | None:
        """Return for how long others held its cores and it others'; None: it shares no cores."""
        return None if self._cores is None else self._cores.seconds()

    def rest(self) -> None:
        """Let others use its cores until its next step."""
        if self._cores is not None:
            self._library.pdmesh_engine_rest(self._handle)

    @property
    def team(self) -> int:
        """Return the address of its threads. A sampler that computes with them between its steps keeps the model alive."""
        address: int = self._library.pdmesh_engine_team(self._handle)
        return address

    def sampler(self) -> NativeSampler:
        """Return a sampler that uses this model's threads between its steps; it keeps the model alive."""
        return NativeSampler(self._library, team=self.team, owner=self)

    def expert_counts(self) -> Tensor | None:
        """Return the tokens that each expert got since start, [layers with experts, num_experts] int64; None without experts. Any
        thread may ask."""
        counts = [each for each in self._expert_counts if each is not None]
        return torch.stack(counts) if counts else None

    def first_layers(self, num_layers: int) -> NativeModel:
        """See DecoderModel.first_layers. The two models compute with the same threads, in turn."""
        config, weights = shortened(self.config, num_layers), replace(self.weights, layers=self.weights.layers[:num_layers])
        first = NativeModel(
            self._library, config, weights, block_size=self._block_size, kv_dtype=self._kv_dtype, num_threads=self._num_threads,
            beside=self,
        )  # fmt: skip
        first.adapters = self.adapters
        return first

    def forward(self, batch: StepBatch, kv: Tensor, signal: LayerReadiness | None = None, hidden: Tensor | None = None) -> Tensor:
        """See DecoderModel.forward. `batch.logits_rows` ascend. Raises ValueError for a pool of another kind."""
        packed = self._kept_step()
        if packed is None or not packed.is_of(batch, kv, signal, hidden) or packed.adapters is not self._adapters_of(batch):
            packed = self._packed(batch, kv, signal, hidden)
            self._kept_step = _nothing
            if isinstance(batch, DecodeBatch):
                batch.made[:] = [packed]
                self._kept_step = weakref.ref(packed)
        packed.struct.profile = None if self.profile is None else ctypes.pointer(self.profile)
        if self._library.pdmesh_engine_step(self._handle, ctypes.byref(packed.struct)):
            raise MemoryError(f"no memory for the buffers of a step of {batch.num_tokens} tokens; lower max_num_batched_tokens")
        return packed.logits

    def _packed(self, batch: StepBatch, kv: Tensor, signal: LayerReadiness | None, hidden: Tensor | None) -> PackedStep:
        if kv.dtype != self._kv_dtype or kv.shape[3] != self._block_size:
            raise ValueError(f"KV pool: {kv.dtype}, blocks of {kv.shape[3]}; this model has {self._kv_dtype}, {self._block_size}")
        if hidden is not None:
            _check_hidden(hidden, (len(batch.logits_rows), self.config.hidden_size))
        logits = torch.empty((len(batch.logits_rows), self.config.vocab_size), dtype=torch.float32)
        return PackedStep(batch, kv, logits, self._adapters_of(batch), signal, hidden)

    def _adapters_of(self, batch: StepBatch) -> abi.AdapterTable | None:
        """Return what the slots of the batch's sequences name; None where no sequence has an adapter."""
        if max(batch.adapter_slots, default=-1) < 0:
            return None
        table = self.adapters or abi.AdapterTable(0)
        table.check(batch.adapter_slots)
        return table

    def _descriptor(self, block_size: int) -> abi.Model:
        config, weights = self.config, self.weights
        layers = (abi.Layer * config.num_layers)(
            *(
                layer.descriptor(
                    (config.windows[index] or 0) * (-1 if config.chunked else 1),
                    weights.temperatures if config.has_temperature(index) else None,
                    self._experts[index],
                    self._latents[index],
                )
                for index, layer in enumerate(weights.layers)
            )
        )
        ropes = [rope.descriptor() for rope in weights.ropes]
        return abi.Model(
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.pool_heads,
            head_dim=config.pool_dim,
            vocab=config.vocab_size,
            max_context=weights.max_context,
            block_size=block_size,
            kv_format=abi.FORMATS[str(self._kv_dtype).removeprefix("torch.")],
            embedding_format=abi.FORMATS[str(weights.embedding.dtype).removeprefix("torch.")],
            head_norms=abi.HEAD_NORMS[config.qk_norm],
            norms_rotated=config.qk_norm_rotated,
            activation=abi.ACTIVATIONS[config.activation],
            is_gated=config.gated_mlp,
            is_parallel=config.parallel,
            attention_scale=config.scale,
            attention_softcap=config.attention_softcap,
            embedding_multiplier=weights.embedding_multiplier,
            residual_multiplier=config.residual_multiplier,
            logits_multiplier=config.logits_multiplier,
            logits_softcap=config.logits_softcap,
            layers=layers,
            embedding_norm=abi.Norm() if weights.embedding_norm is None else weights.embedding_norm.descriptor(),
            norm=weights.norm.descriptor(),
            head=weights.head.descriptor(),
            embedding=weights.embedding.data_ptr(),
            positions=_address(weights.positions),
            ropes=(abi.Rope * 2)(*ropes),
        )


PARTS = frozenset(
    {
        "experts",
        "LayerNorm",
        "norms behind attention and MLP",
        "no norms before attention and MLP",
        "parallel attention and MLP",
        "QK norm with a weight for each head",
        "QK norm over all heads",
        "bias of QK norm",
        "QK norm behind the rotary embedding",
        "norm of embeddings",
        "plain MLP",
        "gelu activation",
        "gelu_tanh activation",
        "relu activation",
        "relu2 activation",
        "two rotary embeddings",
        "partial rotary embedding",
        "layers without rotary embedding",
        "learned positions",
        "scaled attention",
        "softcap of attention",
        "chunked attention",
        "temperature of queries",
        "attention sinks",
        "latent attention",
        "multiplier of embeddings",
        "multiplier of residuals",
        "multiplier of logits",
        "softcap of logits",
        "bias of logits",
    }
)
"""What the kernels compute besides a Llama's parts (pdmesh/engine/models/config.py)."""


def why_not(config: ModelConfig, block_size: int) -> str | None:
    """Return which property of this model the kernels do not support; None when they support it all."""
    if (part := missing_part(config, PARTS)) is not None:
        return f"its kernels have no {part}"
    if config.parallel and config.post_norm:
        return "its kernels have no norms behind parallel attention and MLP"
    if config.latent is not None:
        if reason := _why_not_latent(config.latent):
            return reason
    elif config.head_dim % 16 or config.head_dim > MAX_HEAD_DIM:
        return f"head_dim {config.head_dim} is not a multiple of 16 up to {MAX_HEAD_DIM}"
    if block_size % GROUP_TOKENS:
        return f"block_size {block_size} is not a multiple of {GROUP_TOKENS}"
    if any(window is not None and window < 1 for window in config.windows):
        return "a sliding window of no tokens"
    return None


def _why_not_latent(latent: LatentConfig) -> str | None:
    widths = {"q_lora_rank": latent.query_rank, "kv_lora_rank": latent.kv_rank, "qk_nope_head_dim": latent.nope_dim}
    for name, width in widths.items():
        if width % 16:
            return f"{name} {width} is not a multiple of 16"
    return f"kv_lora_rank + qk_rope_head_dim is {latent.width}, not a multiple of 32" if latent.width % 32 else None


def kv_head_size(head_dim: int, kv_dtype: torch.dtype) -> int:
    """Return the elements that one token's key (or value) of one head takes in the pool."""
    return head_dim + INT8_SCALE_BYTES if kv_dtype == torch.int8 else head_dim


def kv_head_dim(head_size: int, kv_dtype: torch.dtype) -> int:
    """Return the head_dim of a head of `head_size` elements, the inverse of kv_head_size."""
    return head_size - INT8_SCALE_BYTES if kv_dtype == torch.int8 else head_size


def _counts(layer: PackedLayer) -> Tensor | None:
    return torch.zeros(layer.mlp.config.num_experts, dtype=torch.int64) if isinstance(layer.mlp, PackedExperts) else None


def _nothing() -> None:
    return None


def _check_hidden(hidden: Tensor, shape: tuple[int, int]) -> None:
    if hidden.dtype != torch.float32 or hidden.device.type != "cpu" or hidden.shape != shape or not hidden.is_contiguous():
        given = f"{hidden.dtype} {tuple(hidden.shape)} on {hidden.device} with strides {hidden.stride()}"
        raise ValueError(f"hidden: {given}; it must be contiguous float32 {shape} on the cpu")


def _tables(batch: StepBatch) -> tuple[array[int], ...]:
    """Return the query starts, the context lengths, all block tables, and where each begins there; as int32."""
    starts = _int32(batch.query_starts)
    if isinstance(batch, DecodeBatch):
        return starts, batch.lens, batch.tables, _int32(range(0, len(batch.tables), batch.row_blocks))
    tables = batch.block_tables
    blocks, firsts = _int32(list(chain.from_iterable(tables))), _int32([0, *accumulate(map(len, tables))][:-1])
    return starts, _int32(batch.context_lens), blocks, firsts


def _tails(tails: dict[int, Tail]) -> tuple[array[int], array[int]]:
    """Return (index, first position, start of its slots) of each tail, and all their slots."""
    headers, slots = array("i"), array("q")
    for index in sorted(tails):
        headers.extend((index, tails[index].first, len(slots)))
        slots.extend(tails[index].slots)
    return headers, slots


def _int32(numbers: Sequence[int]) -> array[int]:
    return array("i", numbers)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
