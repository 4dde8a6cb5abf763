"""A model's shapes from its config.json, or a GGUF file's header, as the engine reads it: the same refusals, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.registry import model_config
from pdmesh.overrides import overridden
from pdmesh.planning.roofline import Decoder, ExpertShape


class ShapeError(ValueError):
    """Raised when a model cannot be planned for: file, key, the problem."""


def read_decoder(path: Path, overrides: Sequence[str] = ()) -> Decoder:
    """Read a config.json, or the header of a .gguf file, with `overrides` (pdmesh/overrides.py). Raises ShapeError."""
    try:
        table = _header_of(path) if path.suffix.lower() == ".gguf" else _config_of(path)
        return decoder_of(overridden(table, overrides))
    except (OSError, ValueError) as error:
        text = str(error)
        raise ShapeError(text if text.startswith(str(path)) else f"{path}: {text}") from error


def _config_of(path: Path) -> Mapping[str, object]:
    table = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(table, dict):
        raise ValueError("holds no table")
    return table


def _header_of(path: Path) -> Mapping[str, object]:
    try:
        from pdmesh.engine.loader.gguf.architectures import read_config  # they need the gguf package
        from pdmesh.engine.loader.gguf.header import Header, open_file
    except ImportError as error:
        raise ValueError(f"the package {error.name} is needed to read it; install pdmesh[local]") from error
    return read_config(path, Header(path, open_file(path)))


def decoder_of(table: Mapping[str, object]) -> Decoder:
    """Return the decoder from the content of a config.json; without `model_type`, a Llama. Raises ValueError naming the key."""
    return shapes_of(model_config({"model_type": "llama", **table}))


def shapes_of(config: ModelConfig) -> Decoder:
    """Return what planning needs of a config. A latent is whole on each device that shares it: one KV head."""
    count = config.weights
    return Decoder(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.pool_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_context=config.max_context,
        tied_embeddings=config.tie_word_embeddings,
        shared_weights=count.shared,
        experts=ExpertShape(count.num_experts, count.top_k, count.expert) if count.num_experts else None,
        pool_heads=config.pool_heads,
        pool_dim=config.pool_dim,
        pair_operations=config.attention_operations,
        reaches=config.reaches,
        suits_int8_kv=config.suits_int8_kv,
    )
