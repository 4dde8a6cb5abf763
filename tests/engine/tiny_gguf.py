"""Writes a Hugging Face folder's model as a GGUF file, the way llama.cpp's convert_hf_to_gguf.py lays it out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file

_KINDS = {str: GGUFValueType.STRING, float: GGUFValueType.FLOAT32, int: GGUFValueType.UINT32, bool: GGUFValueType.BOOL}
_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_type(name: str) -> Any:
    """A mixture, so that each kind of block is read: Q8_0, Q4_1, F16 and F32."""
    if name.endswith(("norm.weight", ".bias")):
        return Type.F32
    if "embed_tokens" in name or "lm_head" in name:
        return Type.Q8_0
    return Type.F16 if "v_proj" in name or "down_proj" in name else Type.Q4_1


def write_gguf(
    folder: Path,
    path: Path,
    *,
    extra: dict[str, float | str | int | bool] | None = None,
    rope_freqs: np.ndarray | None = None,
    types: Callable[[str], Any] = gguf_type,
) -> dict[str, np.ndarray]:
    """`types` gives each tensor's type. Returns the values that the file stands for, in Hugging Face's names and layout: what a
    reader must give back."""
    config = json.loads((folder / "config.json").read_text())
    arch = config["model_type"]
    writer = GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    for key, value in (extra or {}).items():
        writer.add_key_value(f"{arch}.{key}", value, _KINDS[type(value)])
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    tensors = load_file(folder / "model.safetensors")
    expected = {name: _add(writer, name, values, config, types(name)) for name, values in tensors.items()}
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _add(writer: GGUFWriter, name: str, values: np.ndarray, config: dict[str, Any], kind: Any) -> np.ndarray:
    """Adds one tensor; returns its values after quantization, back in Hugging Face's layout."""
    is_permuted = config["model_type"] == "llama" and ("q_proj" in name or "k_proj" in name)
    heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"] if is_permuted else 0
    stored = _permute(values, heads) if is_permuted else values
    data = quantize(stored, kind)
    writer.add_tensor(_gguf_name(name), data, raw_dtype=kind)
    result: np.ndarray = dequantize(data, kind).astype(np.float32).reshape(values.shape)
    if not is_permuted:
        return result
    rows = _permute(np.arange(values.shape[0]), heads)
    restored = np.empty_like(result)
    restored[rows] = result
    return restored


def _permute(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's `permute`: the two halves of a head's rows become neighbours."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL:
        return f"{_GLOBAL[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.{kind}"
