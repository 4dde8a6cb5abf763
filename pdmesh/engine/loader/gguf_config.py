"""GGUF metadata as the config.json that transformers would read (keys: ggml's docs/gguf.md, "LLM")."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader

from pdmesh.engine.models.rope import inverse_frequencies
from pdmesh.engine.models.rope_config import RopeConfig

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def config_dict(path: Path, reader: GGUFReader) -> dict[str, object]:
    """Raises ValueError, naming file and key, for an architecture or a rotary scaling that is not supported."""
    metadata = _Metadata(path, reader)
    model_type = metadata.architecture
    if model_type not in _ARCHITECTURES:
        raise ValueError(f"{path}: GGUF architecture {model_type!r} is not supported; supported: {', '.join(_ARCHITECTURES)}")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{path}: no tensor 'token_embd.weight'; the file is incomplete")
    num_heads = metadata.integer("attention.head_count")
    hidden_size = metadata.integer("embedding_length")
    head_dim = metadata.integer("attention.key_length", hidden_size // num_heads)
    config: dict[str, object] = {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        **metadata.token_ids(),
    }
    if model_type in ("llama", "qwen3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if model_type == "mistral":
        config["sliding_window"] = metadata.integer("attention.sliding_window", 0) or None
    factors = tensors.get("rope_freqs.weight")
    scaling = metadata.rope_scaling() if factors is None else _llama3_scaling(path, np.array(factors.data), config)
    return {**config, "rope_scaling": scaling} if scaling else config


class _Metadata:
    """Typed access to a file's keys; the architecture's prefix is put before them."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self._path, self._fields = path, reader.fields
        self.architecture = str(self._value("general.architecture", "unknown"))

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{self._path}: GGUF key {self.architecture}.{key} is {value!r}, not a number")
        return value

    def token_ids(self) -> dict[str, object]:
        """Beginning, padding, and end of sequence; a file may name an end of turn besides the end of text."""
        keys = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
        ids = {name: self._value(f"tokenizer.ggml.{key}", None) for name, key in keys.items()}
        ends = [self._value(f"tokenizer.ggml.{key}", None) for key in ("eos_token_id", "eot_token_id")]
        known = list(dict.fromkeys(end for end in ends if end is not None))
        return {**ids, "eos_token_id": known[0] if len(known) == 1 else known or None}

    def rope_scaling(self) -> dict[str, object] | None:
        kind = self._value(f"{self.architecture}.rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise ValueError(f"{self._path}: rope scaling {kind!r} is not supported; supported: none, linear, yarn")
        scaling: dict[str, object] = {"rope_type": kind, "factor": self.number("rope.scaling.factor")}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = self.integer("rope.scaling.original_context_length")
        return scaling

    def _value(self, key: str, default: object) -> object:
        field = self._fields.get(key)
        return default if field is None else field.contents()


def _llama3_scaling(path: Path, factors: np.ndarray, config: dict[str, object]) -> dict[str, object]:
    """Llama 3.1 and later: the file holds the divisor of each frequency instead of the parameters they came from.

    The published models differ in `factor` only, the largest divisor; other parameters are refused.
    """
    scaling: dict[str, object] = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    head_dim, context = int(str(config["head_dim"])), int(str(config["max_position_embeddings"]))
    plain = {"rope_theta": config["rope_theta"]}
    scaled = RopeConfig.from_dict({**plain, "rope_scaling": scaling}, head_dim=head_dim, max_context=context)
    unscaled = RopeConfig.from_dict(plain, head_dim=head_dim, max_context=context)
    expected = inverse_frequencies(unscaled)[0] / inverse_frequencies(scaled)[0]
    given = torch.from_numpy(factors.astype(np.float32))
    if given.shape != expected.shape or not torch.allclose(given, expected, rtol=1e-4):
        raise ValueError(f"{path}: rope_freqs.weight does not hold Llama 3 frequencies; this rotary scaling is not supported")
    return scaling
