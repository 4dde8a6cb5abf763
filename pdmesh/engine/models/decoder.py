"""A Llama-family decoder over a paged KV pool: one `forward` for prefill chunks, decode rows and any mix of them.

    h = embed(tokens)
    each layer:   h += output(attention(rope(qk_norm(qkv(norm(h))))))      h += mlp(norm(h))
    logits = head(norm(h[rows]))

Order of operations and roundings are transformers', so that greedy float32 tokens are the same. Query, key and value maps are one
product, gate and up another: rows of a product are independent, so bits do not change. How far bits are independent of the
batch: see pdmesh/engine/models/layers.py and pdmesh/engine/attention/base.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pdmesh.engine.attention.base import AttentionBackend, AttentionPlan, make_attention
from pdmesh.engine.kv_cache.events import LayerReadiness
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.layers import GatedMLP, Linear, RotaryTable, pad_rows, rms_norm, rotate
from pdmesh.engine.runner.batch import StepBatch


@dataclass(frozen=True)
class DecoderLayer:
    """Hold one layer's weights. `qk_norm` [num_heads + num_kv_heads, head_dim] normalizes query and key heads together."""

    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    mlp: GatedMLP


def shortened(config: ModelConfig, num_layers: int) -> ModelConfig:
    """Return a config of only the first `num_layers` layers. Raises ValueError for fewer than one, or for all."""
    if not 1 <= num_layers < config.num_layers:
        raise ValueError(f"num_layers: {num_layers} of {config.num_layers} layers; it must be 1 to {config.num_layers - 1}")
    return replace(config, num_layers=num_layers, windows=config.windows[:num_layers])


class DecoderModel:
    """Hold weights and compute steps. It has no per-request state: keys and values are in the pool that is passed to
    `forward`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Tensor,
        layers: list[DecoderLayer],
        norm: Tensor,
        head: Linear,
        rotary: RotaryTable,
        attention: AttentionBackend,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self.rotary = rotary
        self.attention = attention

    @property
    def device(self) -> torch.device:
        return self.embedding.device

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
        plan = self.attention.plan(batch, kv.shape[3])
        num_tokens = batch.num_tokens
        states = F.embedding(pad_rows(batch.token_ids).to(self.device), self.embedding)
        angles = self.rotary.at(pad_rows(batch.positions).to(self.device))
        for index, layer in enumerate(self.layers):
            states = states + self._attend(index, layer, states, angles, plan, num_tokens, kv)
            if signal is not None:
                signal.layer_done(index)
            states = states + layer.mlp(rms_norm(states, layer.mlp_norm, self.config.rms_norm_eps))
        wanted = states[batch.logits_rows.to(self.device)]
        if hidden is not None:
            hidden.copy_(wanted)
        return self._logits(wanted)

    def first_layers(self, num_layers: int) -> DecoderModel:
        """Return a model of the first so many layers with this one's norm and head, as its draft model. It has no weights of its
        own, and its keys and values of a token are this model's: both may use the same pool.

        Raises ValueError for fewer than one layer, or for all.
        """
        config = shortened(self.config, num_layers)
        return DecoderModel(
            config,
            embedding=self.embedding,
            layers=self.layers[:num_layers],
            norm=self.norm,
            head=self.head,
            rotary=self.rotary,
            attention=make_attention(self.attention.name, config, str(self.device)),
        )

    def _attend(
        self,
        index: int,
        layer: DecoderLayer,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        plan: AttentionPlan,
        num_tokens: int,
        kv: Tensor,
    ) -> Tensor:
        """Return the attention half of a layer: hidden [T padded, hidden_size] -> what is added to it. Attention skips
        padding."""
        config = self.config
        qkv = layer.qkv(rms_norm(hidden, layer.input_norm, config.rms_norm_eps))
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        query_key = heads[:, :num_rotated]
        if layer.qk_norm is not None:
            query_key = rms_norm(query_key, layer.qk_norm, config.rms_norm_eps)
        query_key = rotate(query_key, *angles)[:num_tokens]
        query, key = query_key[:, : config.num_heads], query_key[:, config.num_heads :]
        attended = plan.run(index, query, key, heads[:num_tokens, num_rotated:], kv)
        return layer.output(pad_rows(attended.flatten(1)))

    def _logits(self, states: Tensor) -> Tensor:
        """Map states [R, hidden_size] -> [R, vocab_size] float32."""
        logits = self.head(rms_norm(pad_rows(states), self.norm, self.config.rms_norm_eps))
        return logits[: states.shape[0]].float()
