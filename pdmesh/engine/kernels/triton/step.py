"""A decoder's step over numbers on the device, as it is captured in a graph and as it runs without one.

    each layer:   norm(h += last)  ─►  qkv  ─►  rope, keys and values to the pool  ─►  attention  ─►  output
                  norm(h += output)  ─►  gate and up  ─►  silu · mul  ─►  down  = last

That is a Llama; what other families do besides or instead is a part of `ModelConfig`; MLPs are of several kinds. Nine launches
a layer of a Llama (eleven where keys are split). Nothing here synchronizes with the device or depends on a number there, so the
same launches serve every batch of a capacity. Roundings are those of pdmesh/engine/models/decoder.py; where a kernel's sums have
another order, its file says by how much they differ.

Between two attentions nothing depends on sequences, only on tokens: `piece` and `end` compute that, which
piecewise_graphs.py records. They pass data in tensors that the caller holds (`Rows`), so that recordings use the same addresses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.attention import TritonAttention
from pdmesh.engine.kernels.triton.experts.experts import GroupedExperts
from pdmesh.engine.kernels.triton.kv import rope_and_store
from pdmesh.engine.kernels.triton.latent.maps import expanded_values, store_latents
from pdmesh.engine.kernels.triton.linear.mlps import GatedStep, MLPStep, PlainStep
from pdmesh.engine.kernels.triton.lora import AdapterGroups, AdapterRows
from pdmesh.engine.kernels.triton.metadata import StepMetadata
from pdmesh.engine.kernels.triton.norms import added_and_normalized, kind_of, normalized
from pdmesh.engine.kv_cache.events import LayerReadiness
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.decoder import DecoderLayer, DecoderModel
from pdmesh.engine.models.layers import MLP, GatedMLP, Norm, PlainMLP, QKNorm


class StepOutput(NamedTuple):
    logits: Tensor  # [R, vocab_size] float32
    states: Tensor  # [R, hidden_size] of the model's dtype, before the final norm


@dataclass(frozen=True)
class Rows:
    """Hold a step's tokens, and what is passed from piece to piece and through attention. On a CPU T is a
    multiple of 4 (pdmesh.engine.models.layers.Linear)."""

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    slots: Tensor  # [T] int32
    states: Tensor  # [T, hidden_size]: the residual stream
    query: Tensor  # [T, num_heads, head_dim]; of latent attention the latent's width
    attended: Tensor  # [T, num_heads, head_dim]; of latent attention the latent's rank
    groups: AdapterGroups | None = None  # which rows have which LoRA adapter; None: no row has one

    @classmethod
    def of(
        cls, token_ids: Tensor, positions: Tensor, slots: Tensor, decoder: DecoderModel, groups: AdapterGroups | None = None
    ) -> Rows:
        """Return rows with new buffers for what is computed."""
        config, num_tokens = decoder.config, len(token_ids)
        shapes = [(config.hidden_size,), *((config.num_heads, dim) for dim in query_dims(config))]
        states, query, attended = (
            torch.empty((num_tokens, *shape), dtype=decoder.dtype, device=token_ids.device) for shape in shapes
        )
        return cls(token_ids, positions, slots, states, query, attended, groups)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of what is computed."""
        return sum(x.nbytes for x in (self.states, self.query, self.attended))


class TritonStep:
    """Compute a step. The weights are the decoder's; it holds no state of requests and no buffers."""

    def __init__(self, decoder: DecoderModel, attention: TritonAttention, adapters: AdapterRows | None = None) -> None:
        """`adapters`: what the decoder's maps share, where they may have LoRA adapters."""
        self.decoder, self.attention, self._adapters = decoder, attention, adapters
        self.mlps = [mlp_step(layer.mlp, decoder.config) for layer in decoder.layers]
        config = decoder.config
        # As transformers does it: the factor is rounded to the states' dtype.
        self._multiplier = torch.tensor(config.embedding_multiplier, dtype=decoder.dtype, device=decoder.device)

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Return the values of `adapted` that steps may have."""
        return (False,) if self._adapters is None else (False, True)

    def groups_of(self, adapter_slots: Tensor) -> AdapterGroups | None:
        """Return buffers for the groups of [T] rows; None: the model has no places for adapters."""
        return None if self._adapters is None else self._adapters.groups_of(adapter_slots)

    def run(self, meta: StepMetadata, kv: Tensor, signal: LayerReadiness | None = None, *, adapted: bool = False) -> StepOutput:
        """Write keys and values of the tokens that have a slot; return outputs of `meta.logits_rows`. kv: the pool
        (`KVPool.tensor`). `adapted`: some rows have LoRA adapters.

        On a CPU T and R of the metadata are multiples of 4 (pdmesh.engine.models.layers.Linear). The contents of rows of padding
        are not defined.
        """
        groups = self.groups_of(meta.adapter_slots) if adapted else None
        rows = Rows.of(meta.token_ids, meta.positions, meta.slots, self.decoder, groups)
        plan = self.attention.plan_of(meta)
        for index in range(self.num_layers):
            self.piece(index, rows, kv)
            tell(signal, index, kv.device)
            plan.attend(index, rows.query, kv, rows.attended)
        return self.output(self.end(rows), rows.states, meta.logits_rows)

    @property
    def num_layers(self) -> int:
        return len(self.decoder.layers)

    def piece(self, index: int, rows: Rows, kv: Tensor) -> None:
        """Compute what comes before the attention of a layer, from the attention before it on; its keys and values are then in
        the pool."""
        layer, states = self.decoder.layers[index], rows.states
        if index == 0 and rows.groups is not None:
            rows.groups.sort()
        self._choose(rows.groups)
        if index:
            normed = self._added(self._rest(index - 1, rows), states, layer.input_norm)
        else:
            self._embed(rows)
            normed = states if layer.input_norm is None else normalized(states, layer.input_norm)
        self._query(index, layer, normed, rows, kv)
        self._choose(None)

    def end(self, rows: Rows) -> Tensor:
        """Return the output behind the last attention: [T, hidden_size], not yet added to the states."""
        self._choose(rows.groups)
        last = self._rest(self.num_layers - 1, rows)
        self._choose(None)
        return last

    def _choose(self, groups: AdapterGroups | None) -> None:
        """Have the maps add what these adapters do; behind each piece none, as a draft model of the first layers has the same
        maps."""
        if self._adapters is not None:
            self._adapters.current = groups

    def output(self, last: Tensor, states: Tensor, wanted: Tensor) -> StepOutput:
        """Return the output of the rows `wanted` [R] of both [T, hidden_size]."""
        decoder = self.decoder
        parts = (last.index_select(0, wanted), states.index_select(0, wanted))
        normed, summed = added_and_normalized(*parts, decoder.norm, factor=decoder.config.residual_multiplier)
        return StepOutput(self._capped(decoder.head(normed).float()), summed)

    def _capped(self, logits: Tensor) -> Tensor:
        """Multiply and cap logits, in place."""
        config = self.decoder.config
        if config.logits_multiplier != 1.0:
            logits.mul_(config.logits_multiplier)
        return logits if not config.logits_softcap else logits.div_(config.logits_softcap).tanh_().mul_(config.logits_softcap)

    def _embed(self, rows: Rows) -> None:
        """Write the states before the first layer."""
        decoder = self.decoder
        torch.index_select(decoder.embedding, 0, rows.token_ids, out=rows.states)
        if decoder.config.embedding_multiplier != 1.0:
            rows.states.mul_(self._multiplier)
        if decoder.positions is not None:
            rows.states.add_(decoder.positions.index_select(0, rows.positions))

    def _rest(self, index: int, rows: Rows) -> Tensor:
        """Return a layer's output behind its attention, which is added to the states next."""
        layer, states = self.decoder.layers[index], rows.states
        values = rows.attended.flatten(1) if layer.latent is None else expanded_values(rows.attended, layer.latent)
        mixed = _behind(layer.output(values), layer.post_attention_norm)
        if self.decoder.config.parallel:  # the MLP reads what attention read
            read = self._read_again(layer, states)
            self._added(mixed, states, None)
        else:
            read = self._added(mixed, states, layer.mlp_norm)
        return _behind(self.mlps[index](read, rows.slots), layer.post_mlp_norm)

    def _added(self, added: Tensor, states: Tensor, norm: Norm | None) -> Tensor:
        """Add to the states, and return what is read next: their norm, in the memory of what was added, or without a norm the
        states."""
        factor = self.decoder.config.residual_multiplier
        if norm is not None:
            return added_and_normalized(added, states, norm, added, states, factor)[0]
        return states.add_(added if factor == 1.0 else added.mul_(factor))

    def _read_again(self, layer: DecoderLayer, states: Tensor) -> Tensor:
        """Return what an MLP beside attention reads, with a norm of its own or attention's."""
        norm = layer.mlp_norm or layer.input_norm
        return states.clone() if norm is None else normalized(states, norm)

    def _query(self, index: int, layer: DecoderLayer, normed: Tensor, rows: Rows, kv: Tensor) -> None:
        """Write rotated query heads of normed [T, hidden_size] to `rows`, and keys and values to their slots."""
        scales, qkv, config = self.attention.kv_scales, layer.qkv(normed), self.decoder.config
        if layer.latent is not None and config.latent is not None and layer.rope is not None:
            own = None if scales is None else scales[index]
            table, tokens = self.decoder.ropes[layer.rope], (rows.positions, rows.slots)
            store_latents(qkv, layer.latent, config.latent, kv[index], table, *tokens, rows.query, own)
            return
        norm = self._head_norm(layer.qk_norm, qkv)
        rope_and_store(
            qkv,
            kv[index],
            None if layer.rope is None else self.decoder.ropes[layer.rope],
            rows.positions,
            rows.slots,
            num_heads=self.decoder.config.num_heads,
            norm=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            norm_kind="rms" if norm is None else kind_of(norm),
            kv_scales=None if scales is None else scales[index],
            out=rows.query,
        )

    def _head_norm(self, norm: QKNorm | None, qkv: Tensor) -> Norm | None:
        """Return the norm that each head of qkv has by itself. One over all query heads, and one over all key heads, are computed
        here, in place."""
        if norm is None or not norm.num_heads:
            return None if norm is None else norm.norm
        dim, first = norm.weight.shape[1], norm.num_heads
        for heads in (slice(0, first), slice(first, len(norm.weight))):
            part = qkv[:, heads.start * dim : heads.stop * dim]
            normalized(part, replace(norm.norm, weight=norm.weight[heads].flatten()), part)
        return None


def query_dims(config: ModelConfig) -> tuple[int, int]:
    """Return the numbers of a query head, and of what attention gives for it."""
    return (config.head_dim, config.head_dim) if config.latent is None else (config.latent.width, config.latent.kv_rank)


def _behind(x: Tensor, norm: Norm | None) -> Tensor:
    """Normalize what attention or MLP gives, in place, in a family that does."""
    return x if norm is None else normalized(x, norm, x)


def mlp_step(mlp: MLP, config: ModelConfig) -> MLPStep:
    """Return the MLP of a loaded layer on the kernels. Raises TypeError for one that they do not compute."""
    if isinstance(mlp, GroupedExperts):
        return mlp
    if isinstance(mlp, GatedMLP):
        return GatedStep(mlp.gate_up, mlp.down, config.activation)
    if isinstance(mlp, PlainMLP):
        return PlainStep(mlp.up, mlp.down, config.activation)
    raise TypeError(f"{type(mlp).__name__} is no MLP that the kernels compute; experts for them are loaded by TritonBuilder")


def tell(signal: LayerReadiness | None, index: int, device: torch.device) -> None:
    """Signal a layer. On a GPU its kernels are only queued: a mark says what they are behind. Without marks this waits for them.
    It does either only where a reader is to be woken."""
    if signal is None:
        return
    if device.type == "cuda":
        if (index + 1) % signal.every and index + 1 != signal.num_layers:
            return
        if signal.marks is None:
            torch.cuda.current_stream(device).synchronize()
    signal.layer_done(index)
