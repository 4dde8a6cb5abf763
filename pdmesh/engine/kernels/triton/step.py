"""A decoder's step over numbers on the device, as it is captured in a graph and as it runs without one.

    each layer:   norm(h += last)  ─►  qkv  ─►  rope, keys and values to the pool  ─►  attention  ─►  output
                  norm(h += output)  ─►  gate and up  ─►  silu · mul  ─►  down  = last

Nine launches a layer (eleven where keys are split). Nothing here synchronizes with the device or depends on a number there,
so the same launches serve every batch of a capacity. Roundings are those of pdmesh/engine/models/decoder.py; where a kernel's
sums have another order, its file says by how much they differ.

Between two attentions nothing depends on sequences, only on tokens: `piece` and `end` compute that, which
piecewise_graphs.py records. They pass data in tensors that the caller holds (`Rows`), so that recordings use the same addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.attention import TritonAttention
from pdmesh.engine.kernels.triton.kv import rope_and_store
from pdmesh.engine.kernels.triton.metadata import StepMetadata
from pdmesh.engine.kernels.triton.norms import add_rms_norm, rms_norm, silu_mul
from pdmesh.engine.kv_cache.events import LayerReadiness
from pdmesh.engine.models.decoder import DecoderLayer, DecoderModel


class StepOutput(NamedTuple):
    logits: Tensor  # [R, vocab_size] float32
    states: Tensor  # [R, hidden_size] of the model's dtype, before the final norm


@dataclass(frozen=True)
class Rows:
    """Hold a step's tokens, and what is passed from piece to piece and through attention. T is a multiple of 4
    (pdmesh.engine.models.layers.Linear)."""

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    slots: Tensor  # [T] int32
    states: Tensor  # [T, hidden_size]: the residual stream
    query: Tensor  # [T, num_heads, head_dim]
    attended: Tensor  # [T, num_heads, head_dim]

    @classmethod
    def of(cls, token_ids: Tensor, positions: Tensor, slots: Tensor, decoder: DecoderModel) -> Rows:
        """Return rows with new buffers for what is computed."""
        config, num_tokens = decoder.config, len(token_ids)
        heads = (num_tokens, config.num_heads, config.head_dim)
        states, query, attended = (
            torch.empty(shape, dtype=decoder.dtype, device=token_ids.device)
            for shape in ((num_tokens, config.hidden_size), heads, heads)
        )
        return cls(token_ids, positions, slots, states, query, attended)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of what is computed."""
        return sum(x.nbytes for x in (self.states, self.query, self.attended))


class TritonStep:
    """Compute a step. The weights are the decoder's; it holds no state of requests and no buffers."""

    def __init__(self, decoder: DecoderModel, attention: TritonAttention) -> None:
        self.decoder, self.attention = decoder, attention

    def run(self, meta: StepMetadata, kv: Tensor, signal: LayerReadiness | None = None) -> StepOutput:
        """Write keys and values of the tokens that have a slot; return outputs of `meta.logits_rows`. kv: the pool
        (`KVPool.tensor`).

        T and R of the metadata are multiples of 4 (pdmesh.engine.models.layers.Linear). The contents of rows of padding are not
        defined.
        """
        rows, plan = Rows.of(meta.token_ids, meta.positions, meta.slots, self.decoder), self.attention.plan_of(meta)
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
        if index:
            last = self._rest(index - 1, rows)
            normed, _ = add_rms_norm(last, states, layer.norm_weights[0], self._eps, last, states)
        else:
            torch.index_select(self.decoder.embedding, 0, rows.token_ids, out=states)
            normed = rms_norm(states, layer.norm_weights[0], self._eps)
        self._query(index, layer, normed, rows, kv)

    def end(self, rows: Rows) -> Tensor:
        """Return the output behind the last attention: [T, hidden_size], not yet added to the states."""
        return self._rest(self.num_layers - 1, rows)

    def output(self, last: Tensor, states: Tensor, wanted: Tensor) -> StepOutput:
        """Return the output of the rows `wanted` [R] of both [T, hidden_size]."""
        decoder = self.decoder
        parts = (last.index_select(0, wanted), states.index_select(0, wanted))
        normed, summed = add_rms_norm(*parts, decoder.norm.weight, self._eps)
        return StepOutput(decoder.head(normed).float(), summed)

    def _rest(self, index: int, rows: Rows) -> Tensor:
        """Return a layer's output behind its attention, which is added to the states next."""
        layer = self.decoder.layers[index]
        mixed = layer.output(rows.attended.flatten(1))
        normed, _ = add_rms_norm(mixed, rows.states, layer.norm_weights[1], self._eps, mixed, rows.states)
        return layer.gated_mlp.down(silu_mul(layer.gated_mlp.gate_up(normed)))

    def _query(self, index: int, layer: DecoderLayer, normed: Tensor, rows: Rows, kv: Tensor) -> None:
        """Write rotated query heads of normed [T, hidden_size] to `rows`, and keys and values to their slots."""
        scales = self.attention.kv_scales
        rope_and_store(
            layer.qkv(normed),
            kv[index],
            self.decoder.rotary,
            rows.positions,
            rows.slots,
            num_heads=self.decoder.config.num_heads,
            norm=None if layer.qk_norm is None else layer.qk_norm.weight,
            eps=self._eps,
            kv_scales=None if scales is None else scales[index],
            out=rows.query,
        )

    @property
    def _eps(self) -> float:
        return self.decoder.config.norm_eps


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
