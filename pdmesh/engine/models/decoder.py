"""A decoder over a paged KV pool: one `forward` for prefill chunks, decode rows and any mix of them.

    h = embed(tokens)
    each layer:   h += output(attention(rope(qk_norm(qkv(norm(h))))))      h += mlp(norm(h))
    logits = head(norm(h[rows]))

That is a Llama; what other families do besides or instead is a part of `ModelConfig`. Order of operations and roundings are
transformers', so that greedy float32 tokens are the same. Query, key and value maps are one product, gate and up another: rows
of a product are independent, so bits do not change. How far bits are independent of the batch: see
pdmesh/engine/models/layers.py and pdmesh/engine/attention/base.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdmesh.engine.attention.base import AttentionBackend, AttentionPlan, make_attention
from pdmesh.engine.kv_cache.events import LayerReadiness
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.experts import Experts
from pdmesh.engine.models.layers import MLP, GatedMLP, Linear, Norm, QKNorm, RotaryTable, pad_rows, rotate
from pdmesh.engine.runner.batch import StepBatch


@dataclass(frozen=True)
class LatentMaps:
    """Hold the maps of latent attention after the layer's first product, which gives the query's bottleneck (or the queries),
    the latent and its rotated key. Keys and values are never expanded: queries are multiplied with the keys' map, and what
    attention gives with the values' (DeepSeek-V2, 2024, section 2.1)."""

    query_norm: Norm | None
    queries: Linear | None
    latent_norm: Norm
    key_map: Tensor  # [num_heads, nope_dim, kv_rank]
    value_map: Tensor  # [num_heads, kv_rank, value_dim]


class AdapterRows(Protocol):
    """What a step's rows are besides the base model's: pdmesh/engine/lora/torch_maps.py."""

    def begin(self, batch: StepBatch, device: torch.device) -> None: ...


@dataclass(frozen=True)
class DecoderLayer:
    """Hold one layer's weights. Norms that a family lacks are None; `rope` is the number of the layer's rotary embedding."""

    input_norm: Norm | None
    qkv: Linear
    qk_norm: QKNorm | None
    output: Linear
    mlp_norm: Norm | None
    mlp: MLP
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None
    sinks: Tensor | None = None  # [num_heads]
    latent: LatentMaps | None = None
    rope: int | None = 0

    @property
    def norm_weights(self) -> tuple[Tensor, Tensor]:
        """Return the weights of the norms before attention and MLP, of a family that has both."""
        assert self.input_norm is not None and self.mlp_norm is not None
        return self.input_norm.weight, self.mlp_norm.weight

    @property
    def gated_mlp(self) -> GatedMLP:
        """Return the MLP of a family that has a gated one in every layer."""
        assert isinstance(self.mlp, GatedMLP)
        return self.mlp


def sinks_of(layers: Sequence[DecoderLayer]) -> list[Tensor]:
    """Return the attention sinks of all layers; empty without."""
    return [layer.sinks for layer in layers if layer.sinks is not None]


def shortened(config: ModelConfig, num_layers: int) -> ModelConfig:
    """Return a config of only the first `num_layers` layers. Raises ValueError for fewer than one, or for all."""
    if not 1 <= num_layers < config.num_layers:
        raise ValueError(f"num_layers: {num_layers} of {config.num_layers} layers; it must be 1 to {config.num_layers - 1}")
    return config.shortened(num_layers)


class DecoderModel:
    """Hold weights and compute steps. It has no per-request state: keys and values are in the pool that is passed to
    `forward`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Tensor,
        layers: list[DecoderLayer],
        norm: Norm,
        head: Linear,
        ropes: Sequence[RotaryTable],
        attention: AttentionBackend,
        positions: Tensor | None = None,
        embedding_norm: Norm | None = None,
        temperatures: Tensor | None = None,
    ) -> None:
        """`ropes`: the tables that layers name by number. `positions` [max_context, hidden_size]: learned ones. `temperatures`
        [max_context]: factors of queries in layers that have them."""
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self.ropes = ropes
        self.attention = attention
        self.positions = positions
        self.embedding_norm = embedding_norm
        self.temperatures = temperatures
        self.adapter_rows: AdapterRows | None = None  # of a model whose maps may have adapters

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def rotary(self) -> RotaryTable:
        """Return the rotary embedding of a model that has one."""
        return self.ropes[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: Tensor, signal: LayerReadiness | None = None, hidden: Tensor | None = None) -> Tensor:
        """Run one step: write its keys and values to `kv` (`KVPool.tensor`), return logits [R, vocab_size] float32. `signal` is
        notified of each layer whose keys and values are written. `hidden` [R, hidden_size] float32 is filled with the last states
        of the rows of logits, before the final norm.

        The tokens' blocks must be in their block tables, and keys of all earlier positions in the pool.
        """
        if self.adapter_rows is not None:
            self.adapter_rows.begin(batch, self.device)
        plan = self.attention.plan(batch, kv.shape[3])
        num_tokens = batch.num_tokens
        positions = pad_rows(batch.positions).to(self.device)
        states = self._embedded(pad_rows(batch.token_ids).to(self.device), positions)
        angles = [rope.at(positions) for rope in self.ropes]
        temperatures = None if self.temperatures is None else self.temperatures[positions, None, None]
        factor = self.config.residual_multiplier
        for index, layer in enumerate(self.layers):
            normed = states if layer.input_norm is None else layer.input_norm(states)
            added = self._attend(index, layer, normed, angles, temperatures, plan, num_tokens, kv)
            if signal is not None:
                signal.layer_done(index)
            if layer.post_attention_norm is not None:
                added = layer.post_attention_norm(added)
            before, states = states, states + (added if factor == 1.0 else added * factor)
            # In parallel, the MLP reads what attention read.
            read = before if self.config.parallel else states
            read = normed if layer.mlp_norm is None and self.config.parallel else read
            read = read if layer.mlp_norm is None else layer.mlp_norm(read)
            added = layer.mlp(read, num_tokens) if isinstance(layer.mlp, Experts) else layer.mlp(read)
            if layer.post_mlp_norm is not None:
                added = layer.post_mlp_norm(added)
            states = states + (added if factor == 1.0 else added * factor)
        wanted = states[batch.logits_rows.to(self.device)]
        if hidden is not None:
            hidden.copy_(wanted)
        return self._logits(wanted)

    def expert_counts(self) -> Tensor | None:
        """Return the tokens that each expert got since start, [layers with experts, num_experts] int64; None without experts."""
        counts = [layer.mlp.counts for layer in self.layers if isinstance(layer.mlp, Experts)]
        return torch.stack(counts) if counts else None

    def first_layers(self, num_layers: int) -> DecoderModel:
        """Return a model of the first so many layers with this one's norm and head, as its draft model. It has no weights of its
        own, and its keys and values of a token are this model's: both may use the same pool.

        Raises ValueError for fewer than one layer, or for all.
        """
        config = shortened(self.config, num_layers)
        shorter = DecoderModel(
            config,
            embedding=self.embedding,
            layers=self.layers[:num_layers],
            norm=self.norm,
            head=self.head,
            ropes=self.ropes,
            attention=make_attention(self.attention.name, config, str(self.device), sinks_of(self.layers[:num_layers])),
            positions=self.positions,
            embedding_norm=self.embedding_norm,
            temperatures=self.temperatures,
        )
        shorter.adapter_rows = self.adapter_rows
        return shorter

    def _embedded(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the states before the first layer, [T padded, hidden_size]."""
        states = F.embedding(token_ids, self.embedding)
        if self.config.embedding_multiplier != 1.0:
            # As transformers does it: the factor is rounded to the states' dtype.
            states = states * torch.tensor(self.config.embedding_multiplier, dtype=states.dtype, device=states.device)
        states = states if self.positions is None else states + F.embedding(positions, self.positions)
        return states if self.embedding_norm is None else self.embedding_norm(states)

    def _attend(
        self,
        index: int,
        layer: DecoderLayer,
        normed: Tensor,
        angles: Sequence[tuple[Tensor, Tensor]],
        temperatures: Tensor | None,
        plan: AttentionPlan,
        num_tokens: int,
        kv: Tensor,
    ) -> Tensor:
        """Return what attention gives: normed [T padded, hidden_size] -> the same shape. Attention skips padding."""
        config, fused = self.config, layer.qkv(normed)
        own = None if layer.rope is None else angles[layer.rope]
        if layer.latent is not None:
            return layer.output(pad_rows(self._attend_latent(index, layer.latent, fused, own, plan, num_tokens, kv)))
        heads = fused.view(fused.shape[0], -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        query_key = _turned(heads[:, :num_rotated], layer.qk_norm, own, norm_is_last=config.qk_norm_rotated)[:num_tokens]
        query, key = query_key[:, : config.num_heads], query_key[:, config.num_heads :]
        if temperatures is not None and config.has_temperature(index):
            query = (query * temperatures[:num_tokens]).to(query.dtype)
        attended = plan.run(index, query, key, heads[:num_tokens, num_rotated:], kv)
        return layer.output(pad_rows(attended.flatten(1)))

    def _attend_latent(
        self,
        index: int,
        maps: LatentMaps,
        fused: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        plan: AttentionPlan,
        num_tokens: int,
        kv: Tensor,
    ) -> Tensor:
        """Return the heads' values [T, num_heads * value_dim] of the layer's first product, fused [T padded, ...]."""
        config, latent = self.config, self.config.latent
        assert latent is not None and angles is not None
        queries, stored = fused[:, : -latent.width], fused[:, -latent.width :]
        latents, key = stored[:, : latent.kv_rank], stored[:, latent.kv_rank :]
        if maps.queries is not None and maps.query_norm is not None:
            queries = maps.queries(maps.query_norm(queries))
        heads = queries.view(queries.shape[0], config.num_heads, -1)
        plain, rotated = heads[:, :, : latent.nope_dim], heads[:, :, latent.nope_dim :]
        rotated, key = rotate(rotated, *angles), rotate(key.unsqueeze(1), *angles)
        absorbed = torch.bmm(plain.transpose(0, 1), maps.key_map).transpose(0, 1)
        query = torch.cat((absorbed, rotated), dim=2)[:num_tokens]
        stored = torch.cat((maps.latent_norm(latents).unsqueeze(1), key), dim=2)[:num_tokens]
        first, second = stored.chunk(2, dim=2)
        attended = plan.run(index, query, first, second, kv)
        values = torch.bmm(pad_rows(attended).transpose(0, 1), maps.value_map).transpose(0, 1)
        return values[:num_tokens].flatten(1)

    def _logits(self, states: Tensor) -> Tensor:
        """Map states [R, hidden_size] -> [R, vocab_size] float32."""
        config = self.config
        logits = self.head(self.norm(pad_rows(states)))[: states.shape[0]].float()
        if config.logits_multiplier != 1.0:
            logits = logits * config.logits_multiplier
        return logits if not config.logits_softcap else (logits / config.logits_softcap).tanh() * config.logits_softcap


def _turned(heads: Tensor, norm: QKNorm | None, angles: tuple[Tensor, Tensor] | None, *, norm_is_last: bool) -> Tensor:
    """Normalize and rotate [T, heads, head_dim], in either order."""
    if norm is not None and not norm_is_last:
        heads = norm(heads)
    turned = heads if angles is None else rotate(heads, *angles)
    return norm(turned) if norm is not None and norm_is_last else turned
