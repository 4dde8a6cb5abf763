"""A checkpoint of ours as a GGUF file for llama.cpp, weights in Q8_0: for the six families whose speed is compared.

The tensors are those that the engine asks for, under its canonical names (pdmesh/engine/models/names.py): so a file is whole, and
its greedy tokens are the engine's, but for what 8 bits change."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from pdmesh.engine.loader.builder import TorchBuilder
from pdmesh.engine.loader.quantize import Int4Weight, Int8Weight
from pdmesh.engine.loader.safetensors import SafetensorsSource
from pdmesh.engine.models.config import ExpertsConfig, LatentConfig, ModelConfig
from pdmesh.engine.models.names import pair_order

_STEMS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_self_attn_norm": "post_attention_norm",
    "post_mlp_norm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_norm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj": "attn_kv_a_mqa",
    "self_attn.kv_a_norm": "attn_kv_a_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}


@dataclass(frozen=True)
class Architecture:
    """Say how llama.cpp names a family, and where its tensors have other names there than in `_STEMS`."""

    name: str
    stems: Mapping[str, str] = field(default_factory=dict)


class _Recorder:
    """Keep every tensor that a builder asks for. A WeightSource."""

    def __init__(self, source: SafetensorsSource) -> None:
        self.config, self._source = source.config, source
        self.tensors: dict[str, Tensor] = {}

    def names(self) -> frozenset[str]:
        return self._source.names()

    def get(self, name: str) -> Tensor:
        self.tensors[name] = self._source.get(name)
        return self.tensors[name]

    def get_int4(self, name: str, group: int) -> Int4Weight | None:
        return None

    def get_int8(self, name: str) -> Int8Weight | None:
        return None

    def num_elements(self) -> int:
        return self._source.num_elements()


def export(folder: Path, target: Path, architecture: Architecture) -> Path:
    """Write the file, and return it."""
    source = _Recorder(SafetensorsSource(folder))
    TorchBuilder(source, torch.float32, "cpu").build(64, lambda _share, _text: None)
    writer = gguf.GGUFWriter(str(target), architecture.name)
    _write_shapes(writer, source.config)
    for name, tensor in _in_files_shape(source.tensors, source.config, architecture).items():
        _write(writer, name, tensor.float().contiguous().numpy())
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return target


def _write(writer: Any, name: str, values: np.ndarray[Any, Any]) -> None:
    """Matrices in Q8_0 where their rows are whole blocks; what routes tokens, norms and biases in float32."""
    is_matrix = values.ndim > 1 and "ffn_gate_inp" not in name and not name.endswith(".bias")
    if not is_matrix or values.shape[-1] % 32:
        writer.add_tensor(name, values)
        return
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def _in_files_shape(tensors: Mapping[str, Tensor], config: ModelConfig, architecture: Architecture) -> dict[str, Tensor]:
    """Return tensors by llama.cpp's names; experts of a layer as one."""
    found: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        layer, stem, kind = _split(name)
        if stem == "self_attn.kv_b_proj" and config.latent:
            found |= _latent_maps(layer, tensor, config.num_heads, config.latent)
            continue
        if stem in _ROTATED_LATENT and config.latent:
            tensor = _neighbours(tensor, _ROTATED_LATENT[stem](config.latent), config.latent.rope_dim)
        if kind == "correction":
            found[f"blk.{layer}.exp_probs_b.bias"] = tensor
            continue
        own = architecture.stems.get(stem, _STEMS[stem])
        target = f"{own}.{kind or 'weight'}" if layer < 0 else f"blk.{layer}.{own}.{kind or 'weight'}"
        if ".experts." in name:
            stacks.setdefault(target, []).append(tensor)
        else:
            found[target] = tensor
    return found | {name: torch.stack(parts) for name, parts in stacks.items()}


def _split(name: str) -> tuple[int, str, str]:
    """Return layer (-1: none), stem without the expert's number, and kind."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias", "correction"):
        stem, kind = name, ""
    layer = re.match(r"model\.layers\.(\d+)\.", stem)
    stem = stem[layer.end() :] if layer else stem
    return int(layer[1]) if layer else -1, re.sub(r"\.experts\.\d+\.", ".experts.", stem), kind


_ROTATED_LATENT: dict[str, Callable[[LatentConfig], int]] = {
    "self_attn.q_b_proj": lambda latent: latent.nope_dim + latent.rope_dim,
    "self_attn.kv_a_proj": lambda latent: latent.width,
}
"""Maps of latent attention whose last rows, of so many for a head, are rotated."""


def _neighbours(tensor: Tensor, head_rows: int, rope_dim: int) -> Tensor:
    """Return rows in llama.cpp's order for this family: it rotates neighbours of a head, the engine its halves."""
    order = torch.arange(head_rows)
    order[-rope_dim:] = head_rows - rope_dim + pair_order(rope_dim, rope_dim).argsort()
    return tensor.view(-1, head_rows, tensor.shape[1])[:, order].reshape(tensor.shape)


def _latent_maps(layer: int, expanded: Tensor, num_heads: int, latent: LatentConfig) -> dict[str, Tensor]:
    heads = expanded.view(num_heads, latent.nope_dim + latent.value_dim, latent.kv_rank)
    return {
        f"blk.{layer}.attn_k_b.weight": heads[:, : latent.nope_dim].transpose(1, 2),
        f"blk.{layer}.attn_v_b.weight": heads[:, latent.nope_dim :],
    }


def _write_shapes(writer: Any, config: ModelConfig) -> None:
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.rope.rotary_dim)
    (writer.add_layer_norm_eps if config.norm == "layer" else writer.add_layer_norm_rms_eps)(config.norm_eps)
    writer.add_parallel_residual(config.parallel)
    if config.attention_softcap:
        writer.add_attn_logit_softcapping(config.attention_softcap)
    if config.logits_softcap:
        writer.add_final_logit_softcapping(config.logits_softcap)
    if windows := [window for window in config.windows if window]:
        writer.add_sliding_window(windows[0])
    if config.latent is not None:
        _write_latent(writer, config.latent)
    else:
        writer.add_head_count_kv(config.num_kv_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.experts is not None:
        _write_experts(writer, config.experts)


def _write_latent(writer: Any, latent: LatentConfig) -> None:
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(latent.query_rank)
    writer.add_kv_lora_rank(latent.kv_rank)
    writer.add_key_length(latent.width)
    writer.add_value_length(latent.kv_rank)
    writer.add_key_length_mla(latent.nope_dim + latent.rope_dim)
    writer.add_value_length_mla(latent.value_dim)


def _write_experts(writer: Any, experts: ExpertsConfig) -> None:
    writer.add_expert_count(experts.num_experts)
    writer.add_expert_used_count(experts.top_k)
    writer.add_expert_feed_forward_length(experts.intermediate_size)
    writer.add_leading_dense_block_count(experts.layers.index(True))
    writer.add_expert_weights_scale(experts.scale)
    writer.add_expert_weights_norm(experts.normalize)
    if experts.shared_intermediate_size:
        writer.add_expert_shared_count(experts.shared_intermediate_size // experts.intermediate_size)
    if experts.scoring == "sigmoid":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if experts.num_groups > 1:
        writer.add_expert_group_count(experts.num_groups)
        writer.add_expert_group_used_count(experts.top_groups)
