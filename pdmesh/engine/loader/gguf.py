"""A GGUF file as a checkpoint: metadata to config, tensor names to Hugging Face's, blocks dequantized to float32 (exact).

Format: ggml's docs/gguf.md; the mapping of the file is the `gguf` package's.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
from gguf import GGUFReader, ReaderTensor
from torch import Tensor

from pdmesh.engine.loader.gguf_blocks import INT4_GROUP, dequantize_rows, int4_rows
from pdmesh.engine.loader.gguf_config import config_dict
from pdmesh.engine.loader.quantize import Int4Weight
from pdmesh.engine.loader.source import MissingTensor
from pdmesh.engine.models.config import ModelConfig

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
# Frequencies of a scaled rotary embedding: they become rope parameters (gguf_config), not weights.
_NOT_WEIGHTS = ("rope_freqs.weight",)


class GgufSource:
    """See WeightSource. `config_dict` is the config.json that transformers would read for this file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        reader = _open(path)
        self.config_dict = config_dict(path, reader)
        self.config = ModelConfig.from_dict(self.config_dict)
        self._is_permuted = self.config_dict["model_type"] == "llama"
        tensors = [tensor for tensor in reader.tensors if tensor.name not in _NOT_WEIGHTS]
        self._tensors: dict[str, ReaderTensor] = {huggingface_name(tensor.name): tensor for tensor in tensors}

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def get(self, name: str) -> Tensor:
        """float32, in Hugging Face's layout."""
        return dequantize_rows(self._rows(name), self._stored(name).tensor_type)

    def get_int4(self, name: str, group: int = 32) -> Int4Weight | None:
        """The codes, scales and minimums of a Q4_0 or Q4_1 tensor, in Hugging Face's layout: dequantized they are what `get`
        gives. None for other types, other groups, and a Q4_0 minimum beyond float16. Raises MissingTensor."""
        tensor = self._stored(name)
        return int4_rows(self._rows(name), tensor.tensor_type) if group == INT4_GROUP else None

    def num_elements(self) -> int:
        return sum(math.prod(int(size) for size in tensor.shape) for tensor in self._tensors.values())

    def _stored(self, name: str) -> ReaderTensor:
        if name not in self._tensors:
            raise MissingTensor(f"{self.path}: no tensor for {name!r}; the file is incomplete or of another architecture")
        return self._tensors[name]

    def _rows(self, name: str) -> np.ndarray:
        """The tensor as it is stored, its rows in Hugging Face's order.

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
    except (ValueError, LookupError, OverflowError) as error:  # what numpy makes of too few bytes
        raise ValueError(f"{path} cannot be read ({error}); it is cut off or damaged, get it again") from error


def huggingface_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. Raises ValueError for a tensor that is not known."""
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL:
        return f"{_GLOBAL[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match is None or match[2] not in _LAYER:
        raise ValueError(f"GGUF tensor {name!r} is not part of a Llama-family decoder; this model is not supported")
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{kind}"
