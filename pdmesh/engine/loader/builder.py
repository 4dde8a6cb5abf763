"""From a checkpoint's tensors to a decoder on the torch backend: what one rank and all ranks share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pdmesh.engine.attention.base import make_attention
from pdmesh.engine.loader.safetensors import SafetensorsSource, WeightSource, checked, weight_files
from pdmesh.engine.models.decoder import DecoderLayer, DecoderModel
from pdmesh.engine.models.layers import GatedMLP, Linear, RotaryTable, make_linear

if TYPE_CHECKING:
    from pdmesh.engine.loader.triton import QuantizedMaps


Progress = Callable[[float, str], None]


_ATTENTION = "reference"


def open_checkpoint(path: Path) -> tuple[WeightSource, list[Path]]:
    """Return the opened checkpoint and the files of its hash. Raises ValueError saying what is at `path` instead."""
    if path.is_dir():
        return SafetensorsSource(path), [path / "config.json", *weight_files(path)]
    if not path.is_file():
        raise ValueError(f"model: {path} does not exist; give a model folder or a .gguf file")
    if path.suffix.lower() != ".gguf":
        raise ValueError(f"model: {path} is neither a folder nor a .gguf file")
    from pdmesh.engine.loader.gguf import GgufSource  # the gguf package is imported only for GGUF files

    return GgufSource(path), [path]


def numeric_mode(model: DecoderModel, device: str) -> str:
    """Return a name such as `float32-cpu-onednn-reference-AVX512`: dtype, device, linear kernel, attention backend, processor."""
    dtype = str(model.dtype).removeprefix("torch.")
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        processor = f"sm{major}{minor}"
    else:
        processor = torch.backends.cpu.get_cpu_capability()
    return f"{dtype}-{device}-{model.head.kind}-{model.attention.name}-{processor}"


class TorchBuilder:
    """Take tensors out of a checkpoint, check their shapes, and fuse maps that are computed together."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, device: str, maps: QuantizedMaps | None = None) -> None:
        """`maps` makes the linear maps where weights are quantized."""
        self.source, self.dtype, self.device, self.maps = source, dtype, device, maps
        self.config = source.config

    def build(self, max_context: int, progress: Progress) -> DecoderModel:
        config = self.config
        layers = []
        for index in range(config.num_layers):
            progress(index / (config.num_layers + 1), f"loading layer {index + 1} of {config.num_layers}")
            layers.append(self._layer(f"model.layers.{index}"))
        progress(config.num_layers / (config.num_layers + 1), "loading embeddings")
        embedding = self._tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        return DecoderModel(
            config,
            embedding=embedding,
            layers=layers,
            norm=self._tensor("model.norm.weight", config.hidden_size),
            head=self._head(embedding),
            rotary=RotaryTable(config.rope, max_context, dtype=self.dtype, device=self.device),
            attention=make_attention(_ATTENTION, config, self.device),
        )

    def _head(self, embedding: Tensor) -> Linear:
        weight = embedding if self.config.tie_word_embeddings else self._tensor("lm_head.weight", *embedding.shape)
        return make_linear(weight) if self.maps is None else self.maps.head(weight)

    def _layer(self, prefix: str) -> DecoderLayer:
        config = self.config
        query, kv, hidden = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.hidden_size
        attention = f"{prefix}.self_attn"
        return DecoderLayer(
            input_norm=self._tensor(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._linear(
                [(f"{attention}.{n}_proj", rows) for n, rows in zip("qkv", (query, kv, kv), strict=True)],
                hidden,
                bias=config.qkv_bias,
            ),
            qk_norm=self._qk_norm(attention) if config.qk_norm else None,
            output=self._linear([(f"{attention}.o_proj", hidden)], query, bias=config.output_bias),
            mlp_norm=self._tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
            mlp=self._mlp(f"{prefix}.mlp"),
        )

    def _mlp(self, prefix: str) -> GatedMLP:
        inner, hidden, bias = self.config.intermediate_size, self.config.hidden_size, self.config.mlp_bias
        gate_up = self._linear([(f"{prefix}.gate_proj", inner), (f"{prefix}.up_proj", inner)], hidden, bias=bias)
        return GatedMLP(gate_up, self._linear([(f"{prefix}.down_proj", hidden)], inner, bias=bias))

    def _qk_norm(self, attention: str) -> Tensor:
        dim = self.config.head_dim
        query = self._tensor(f"{attention}.q_norm.weight", dim).expand(self.config.num_heads, dim)
        key = self._tensor(f"{attention}.k_norm.weight", dim).expand(self.config.num_kv_heads, dim)
        return torch.cat((query, key))

    def _linear(self, parts: list[tuple[str, int]], width: int, *, bias: bool) -> Linear:
        """Return one product of several maps with the same input: parts are (name, output rows)."""
        biases = [self._tensor(f"{name}.bias", rows) for name, rows in parts] if bias else []
        joined_bias = _joined(biases) if biases else None
        if self.maps is not None:
            return self.maps.joined(parts, width, joined_bias)
        return make_linear(_joined([self._tensor(f"{name}.weight", rows, width) for name, rows in parts]), joined_bias)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        return checked(self.source, name, shape).to(self.device, self.dtype)


def _joined(tensors: list[Tensor]) -> Tensor:
    """Return the tensors concatenated along rows; a single tensor is passed on without a copy."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
