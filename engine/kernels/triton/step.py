"""A decoder's step over numbers that lie on the device: what a graph is captured of, and what runs without one.

    each layer:   norm(h += last)  ─►  qkv  ─►  rope, keys and values to the pool  ─►  attention  ─►  output
                  norm(h += output)  ─►  gate and up  ─►  silu · mul  ─►  down  = last

Nine launches a layer (eleven where keys are split). Nothing here asks the device anything or depends on a number that lies there,
so the same launches serve every batch of a capacity. Roundings are those of engine/model.py; where a kernel's sums have another
order, its file says by how much they differ.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.exports import LayerSignal
from engine.kernels.triton.attention import TritonAttention
from engine.kernels.triton.gated import silu_mul
from engine.kernels.triton.kv_store import rope_and_store
from engine.kernels.triton.metadata import StepMetadata
from engine.kernels.triton.norms import add_rms_norm, rms_norm
from engine.model import DecoderLayer, DecoderModel


class StepOutput(NamedTuple):
    logits: Tensor  # [R, vocab_size] float32
    states: Tensor  # [R, hidden_size] of the model's dtype, before the final norm


class TritonStep:
    """The computation alone. Weights are the decoder's own; no state of a request, no buffers that stay."""

    def __init__(self, decoder: DecoderModel, attention: TritonAttention) -> None:
        self.decoder, self.attention = decoder, attention

    def run(self, meta: StepMetadata, kv: Tensor, signal: LayerSignal | None = None) -> StepOutput:
        """Writes keys and values of the tokens that have a slot; outputs of `meta.logits_rows`. kv: the pool (`KVPool.tensor`).

        T and R of the metadata are multiples of 4 (engine.layers.Linear). What stands in rows of padding is not defined.
        """
        decoder, eps = self.decoder, self.decoder.config.rms_norm_eps
        plan = self.attention.plan_of(meta)
        states = F.embedding(meta.token_ids, decoder.embedding)
        last: Tensor | None = None
        for index, layer in enumerate(decoder.layers):
            normed, states = _add_norm(last, states, layer.input_norm, eps)
            query = self._query(index, layer, normed, meta, kv)
            _tell(signal, index, kv.device)
            attended = plan.attend(index, query, kv)
            normed, states = add_rms_norm(layer.output(attended.flatten(1)), states, layer.mlp_norm, eps)
            last = layer.mlp.down(silu_mul(layer.mlp.gate_up(normed)))
        return self._output(last, states, meta.logits_rows)

    def _query(self, index: int, layer: DecoderLayer, normed: Tensor, meta: StepMetadata, kv: Tensor) -> Tensor:
        """normed [T, hidden_size] -> rotated query heads [T, num_heads, head_dim]; keys and values are in the pool then."""
        config, scales = self.decoder.config, self.attention.kv_scales
        return rope_and_store(
            layer.qkv(normed),
            kv[index],
            self.decoder.rotary,
            meta.positions,
            meta.slots,
            num_heads=config.num_heads,
            norm=layer.qk_norm,
            eps=config.rms_norm_eps,
            kv_scales=None if scales is None else scales[index],
        )

    def _output(self, last: Tensor | None, states: Tensor, rows: Tensor) -> StepOutput:
        decoder = self.decoder
        wanted = None if last is None else last.index_select(0, rows)
        normed, states = _add_norm(wanted, states.index_select(0, rows), decoder.norm, decoder.config.rms_norm_eps)
        return StepOutput(decoder.head(normed).float(), states)


def _add_norm(last: Tensor | None, states: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum); None stands for nothing to add."""
    if last is None:
        return rms_norm(states, weight, eps), states
    return add_rms_norm(last, states, weight, eps)


def _tell(signal: LayerSignal | None, index: int, device: torch.device) -> None:
    """On a GPU a layer's kernels are only queued: a mark says behind what they are. Without marks it is waited for them. Either
    only where somebody is to be woken."""
    if signal is None:
        return
    if device.type == "cuda":
        if (index + 1) % signal.every and index + 1 != signal.num_layers:
            return
        if signal.marks is None:
            torch.cuda.current_stream(device).synchronize()
    signal.layer_done(index)
