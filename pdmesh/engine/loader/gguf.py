"""A GGUF file as a checkpoint: metadata to config, tensor names to Hugging Face's, blocks dequantized to float32 (exact).

Format: ggml's docs/gguf.md; the `gguf` package maps the file.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize
from safetensors.torch import save_file
from torch import Tensor

from pdmesh.engine.loader.quantize import Int4Weight, Int8Weight, dequantize_int4
from pdmesh.engine.loader.safetensors import SINGLE, MissingTensor
from pdmesh.engine.models.layers import inverse_frequencies
from pdmesh.engine.models.registry import model_config
from pdmesh.engine.models.rope import RopeConfig
from pdmesh.overrides import overridden

# Blocks of a GGUF file's tensors (layouts: ggml-common.h): 4 bits unchanged, everything as float32
#
# The `gguf` package dequantizes them all; the common ones are done here in a quarter of its time, to equal values. Rows are
# [N, bytes of a row] uint8 for quantized types, [N, ...] of their own dtype for others.


INT4_GROUP = 32
_INT4_TYPES = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1)


def dequantize_rows(rows: np.ndarray, kind: GGMLQuantizationType) -> Tensor:
    """Return float32, a copy. Exact: the values that ggml's own dequantization gives."""
    weight = int4_rows(rows, kind)
    if weight is not None:
        return dequantize_int4(weight)
    if kind == GGMLQuantizationType.Q8_0:
        return _dequantize_q8_0(rows)
    return torch.from_numpy(np.array(dequantize(rows, kind), dtype=np.float32))


def int4_rows(rows: np.ndarray, kind: GGMLQuantizationType) -> Int4Weight | None:
    """Return the codes, scales and minimums of Q4_0 or Q4_1. None for another type, and for numbers that float16 does not hold.

    A block is a float16 scale; in Q4_1 a float16 minimum (Q4_0 counts from -8, exact in float16 unless it overflows); then 16
    bytes with the weights 0..15 of the block in their low halves and 16..31 in their high halves.
    """
    if kind not in _INT4_TYPES:
        return None
    blocks = _blocks(rows, kind)
    codes, head = blocks[:, :, -INT4_GROUP // 2 :], blocks[:, :, : -INT4_GROUP // 2]
    values = np.concatenate((codes & 15, codes >> 4), axis=2).reshape(len(rows), -1)
    numbers = np.ascontiguousarray(head).view(np.float16)
    scales = np.ascontiguousarray(numbers[:, :, 0])
    with np.errstate(over="ignore"):
        minimums = np.ascontiguousarray(numbers[:, :, 1]) if numbers.shape[2] == 2 else scales * np.float16(-8)
    if not (np.isfinite(scales).all() and np.isfinite(minimums).all()):
        return None
    return Int4Weight(torch.from_numpy(values), torch.from_numpy(scales), torch.from_numpy(minimums), INT4_GROUP)


def _dequantize_q8_0(rows: np.ndarray) -> Tensor:
    """Dequantize blocks of a float16 scale and 32 int8."""
    blocks = _blocks(rows, GGMLQuantizationType.Q8_0)
    scales = torch.from_numpy(np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)).float()
    values = torch.from_numpy(np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8)).float()
    return values.mul_(scales).view(len(rows), -1)


def _blocks(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Return [N, blocks of a row, bytes of a block]."""
    _, num_bytes = GGML_QUANT_SIZES[kind]
    return rows.reshape(len(rows), -1, num_bytes)


# GGUF metadata as the config.json that transformers would read (keys: ggml's docs/gguf.md, "LLM")


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def config_dict(path: Path, reader: GGUFReader) -> dict[str, object]:
    """Return the config. Raises ValueError, naming file and key, for an architecture or a rotary scaling that is not
    supported."""
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
    if model_type == "llama":
        config["mlp_bias"] = any(f"blk.0.ffn_{name}.bias" in tensors for name in ("gate", "up", "down"))
    if model_type == "mistral":
        config["sliding_window"] = metadata.integer("attention.sliding_window", 0) or None
    factors = tensors.get("rope_freqs.weight")
    scaling = metadata.rope_scaling() if factors is None else _llama3_scaling(path, np.array(factors.data), config)
    for key, value in (("rope.dimension_count", head_dim), ("attention.value_length", head_dim)):
        metadata.require(key, value)
    metadata.finish(int(str(config["max_position_embeddings"])))
    return {**config, "rope_scaling": scaling} if scaling else config


_NEUTRAL = frozenset({
    "vocab_size", "attention.layer_norm_epsilon", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.yarn_log_multiplier",
})  # fmt: skip
"""Keys that no number depends on in the architectures read here, or not without another key that is read."""


class _Metadata:
    """Read a file's keys with their types; the architecture's prefix is put before them."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self._path, self._fields = path, reader.fields
        self._read: set[str] = set()
        self.architecture = str(self._value("general.architecture", "unknown"))

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{self._path}: GGUF key {self.architecture}.{key} is {value!r}, not a number")
        return value

    def token_ids(self) -> dict[str, object]:
        """Return ids for beginning, padding, and end of sequence; a file may name an end of turn besides the end of text."""
        keys = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
        ids = {name: self._value(f"tokenizer.ggml.{key}", None) for name, key in keys.items()}
        ends = [self._value(f"tokenizer.ggml.{key}", None) for key in ("eos_token_id", "eot_token_id")]
        known = list(dict.fromkeys(end for end in ends if end is not None))
        return {**ids, "eos_token_id": known[0] if len(known) == 1 else known or None}

    def rope_scaling(self) -> dict[str, object] | None:
        kind = self._value(f"{self.architecture}.rope.scaling.type", "none")
        linear = self.number("rope.scale_linear", 1.0)  # an older key
        if kind == "none" and linear != 1.0:
            return {"rope_type": "linear", "factor": linear}
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise ValueError(f"{self._path}: rope scaling {kind!r} is not supported; supported: none, linear, yarn")
        factor = self.number("rope.scaling.factor")
        return {"rope_type": kind, "factor": factor, **(self._yarn(factor) if kind == "yarn" else {})}

    def _yarn(self, factor: float) -> dict[str, object]:
        """Return YaRN's own parameters. llama.cpp multiplies its factor of attention with the one that follows from the scaling
        (ggml's rope_yarn), transformers takes it as the whole."""
        given = self.number("rope.scaling.yarn_attn_factor", self.number("rope.scaling.attn_factor", 1.0))
        whole = {} if given == 1.0 else {"attention_factor": given * (1.0 + 0.1 * math.log(factor))}
        betas = {f"beta_{n}": self.number(f"rope.scaling.yarn_beta_{n}", d) for n, d in (("fast", 32.0), ("slow", 1.0))}
        return {"original_max_position_embeddings": self.integer("rope.scaling.original_context_length"), **betas, **whole}

    def require(self, key: str, expected: object) -> None:
        """Raise ValueError unless the key is absent or has the one value that this engine computes."""
        value = self._value(f"{self.architecture}.{key}", expected)
        if value != expected:
            raise ValueError(
                f"{self._path}: GGUF key {self.architecture}.{key} is {value!r} and this engine computes {expected!r} alone; use "
                "the model's Hugging Face folder"
            )

    def finish(self, context: int) -> None:
        """Raise ValueError for a key of this architecture that was not read, unless its value changes nothing."""
        for key in ("expert_count", "expert_used_count", "expert_shared_count", "leading_dense_block_count"):
            self.require(key, 0)
        self.require("attention.causal", True)
        self.require("use_parallel_residual", False)
        window = self._value(f"{self.architecture}.attention.sliding_window", 0)
        if self.architecture != "mistral" and isinstance(window, int) and 0 < window < context:
            self.require("attention.sliding_window", 0)
        prefix = f"{self.architecture}."
        unread = [key for key in self._fields if key.startswith(prefix) and key not in self._read]
        unknown = [key for key in unread if key.removeprefix(prefix) not in _NEUTRAL and not self._is_one(key)]
        if unknown:
            raise ValueError(
                f"{self._path}: GGUF keys {', '.join(unknown)} are not read for architecture {self.architecture}, so this model "
                "might be computed wrongly; use the model's Hugging Face folder"
            )

    def _is_one(self, key: str) -> bool:
        """Return whether it is a factor that changes nothing."""
        return key.endswith(("_scale", "_factor")) and self._fields[key].contents() == 1.0

    def _value(self, key: str, default: object) -> object:
        self._read.add(key)
        field = self._fields.get(key)
        return default if field is None else field.contents()


def _llama3_scaling(path: Path, factors: np.ndarray, config: dict[str, object]) -> dict[str, object]:
    """Return the scaling of Llama 3.1 and later: the file holds the divisor of each frequency instead of the parameters.

    The published models differ in `factor` only, the largest divisor; other parameters are rejected.
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


_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Frequencies of a scaled rotary embedding: they become rope parameters (config_dict), not weights.
_NOT_WEIGHTS = ("rope_freqs.weight",)


class GgufSource:
    """See WeightSource. `config_dict` is the config.json that transformers would read for this file."""

    def __init__(self, path: Path, overrides: Sequence[str] = ()) -> None:
        self.path = path
        reader = _open(path)
        self.config_dict = overridden(config_dict(path, reader), overrides)
        self.config = model_config(self.config_dict)
        self._is_permuted = self.config_dict["model_type"] == "llama"
        tensors = [tensor for tensor in reader.tensors if tensor.name not in _NOT_WEIGHTS]
        self._tensors: dict[str, ReaderTensor] = {huggingface_name(tensor.name): tensor for tensor in tensors}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor, by its Hugging Face name."""
        return {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in self._tensors.items()}

    def stored_name(self, name: str) -> str:
        """Return the name in the file."""
        return str(self._stored(name).name)

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def get(self, name: str) -> Tensor:
        """Return float32, in Hugging Face's layout."""
        return dequantize_rows(self._rows(name), self._stored(name).tensor_type)

    def get_int4(self, name: str, group: int = 32) -> Int4Weight | None:
        """Return the codes, scales and minimums of a Q4_0 or Q4_1 tensor, in Hugging Face's layout: dequantized they are what
        `get` gives. None for other types, other groups, and a Q4_0 minimum beyond float16. Raises MissingTensor."""
        tensor = self._stored(name)
        return int4_rows(self._rows(name), tensor.tensor_type) if group == INT4_GROUP else None

    def get_int8(self, name: str) -> Int8Weight | None:
        """Return None: no type of block has one scale for a row."""
        return None

    def num_elements(self) -> int:
        return sum(math.prod(int(size) for size in tensor.shape) for tensor in self._tensors.values())

    def _stored(self, name: str) -> ReaderTensor:
        if name not in self._tensors:
            raise MissingTensor(f"{self.path}: no tensor for {name!r}; the file is incomplete or of another architecture")
        return self._tensors[name]

    def _rows(self, name: str) -> np.ndarray:
        """Return the tensor as it is stored, its rows in Hugging Face's order.

        Files of architecture llama hold query and key rows in the order of interleaved rotation (llama.cpp's
        convert_hf_to_gguf.py, `permute`); this restores the order of the two rotated halves."""
        rows, is_query = np.asarray(self._stored(name).data), ".q_proj." in name
        if not self._is_permuted or not (is_query or ".k_proj." in name):
            return rows
        heads = self.config.num_heads if is_query else self.config.num_kv_heads
        pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _open(path: Path) -> GGUFReader:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is no GGUF file; give one, or a Hugging Face folder")
    try:
        return GGUFReader(path)
    except (ValueError, LookupError, OverflowError) as error:  # numpy raises them for too few bytes
        raise ValueError(f"{path} cannot be read ({error}); it is cut off or damaged, get it again") from error


def huggingface_name(name: str) -> str:
    """Map `blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`. Raises ValueError for a tensor that is not known."""
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL:
        return f"{_GLOBAL[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match is None or match[2] not in _LAYER:
        raise ValueError(f"GGUF tensor {name!r} is not part of a Llama-family decoder; this model is not supported")
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{kind}"


# GGUF to a Hugging Face folder: weights in float32 (exact) and a config.json that transformers loads; no tokenizer


def convert_gguf_weights(
    gguf_path: str | Path, out_folder: str | Path, progress: Callable[[float, str], None] = lambda _share, _text: None
) -> Path:
    """Write config.json and model.safetensors to `out_folder` (created; files there are replaced) and return it.

    Both appear whole or not at all, config.json last: a folder with a config.json is complete. Needs memory for the weights
    in float32. `progress` gets (share done, description). Raises ValueError for a file that is not supported.
    """
    source, folder = GgufSource(Path(gguf_path)), Path(out_folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(source.names())
    tensors = {}
    for index, name in enumerate(names):
        progress(0.8 * index / len(names), f"dequantizing {name}")
        tensors[name] = source.get(name)
    progress(0.8, f"writing {SINGLE}")
    partial = folder / f".{SINGLE}.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, folder / SINGLE)
    partial_config = folder / ".config.json.partial"
    partial_config.write_text(json.dumps(source.config_dict, indent=2) + "\n")
    os.replace(partial_config, folder / "config.json")
    progress(1.0, "converted")
    return folder
