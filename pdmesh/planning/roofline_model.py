"""What a checkpoint's config.json says of a decoder's costs: weights, KV, products. Pure but for reading the file.

For planning alone: shapes, not whether the engine can compute them (`engine/model_config.py` decides that). Models of the Llama
family, which is attention with grouped heads and a gated MLP; biases and norms are less than a thousandth and are left out.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

WEIGHT_BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "int8": 8.0, "fp8": 8.0, "int4": 5.0}
"""Of a weight as it is read; int4 with a scale and a minimum in float16 for each 32."""
KV_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "fp8": 8}
_SCALE_BYTES = 4
"""For each head of a token, of KV in int8."""
_NOT_DENSE = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank")


class ShapeError(ValueError):
    """A model cannot be planned for: file, key, what is wrong."""


@dataclass(frozen=True)
class Decoder:
    """Shapes. `max_context` in tokens."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    tied_embeddings: bool = False

    @property
    def num_weights(self) -> int:
        """That each token is multiplied with, the head's not counted."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_head_weights(self) -> int:
        """That each row of logits is multiplied with."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All that have to be in memory."""
        return self.num_weights + self.num_head_weights * (1 if self.tied_embeddings else 2)

    @property
    def attention_operations(self) -> int:
        """Of one token for each token that it attends to."""
        return 4 * self.num_layers * self.num_heads * self.head_dim

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Keys and values of all layers."""
        scales = _SCALE_BYTES if kv_dtype == "int8" else 0
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim * KV_BITS[kv_dtype] // 8 + scales)


def read_decoder(path: Path) -> Decoder:
    """From a config.json. Raises ShapeError."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(table, dict):
            raise ValueError("holds no table")
        return decoder_of(table)
    except (OSError, ValueError) as error:
        raise ShapeError(f"{path}: {error}") from error


def decoder_of(table: Mapping[str, object]) -> Decoder:
    """From the content of a config.json. Raises ValueError naming the key."""
    special = next((key for key in _NOT_DENSE if table.get(key)), None)
    if special is not None:
        raise ValueError(f"{special}: mixtures of experts and latent attention are not planned for")
    num_heads, hidden_size = _count(table, "num_attention_heads"), _count(table, "hidden_size")
    num_kv_heads = _count(table, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads: {num_heads} is not a multiple of num_key_value_heads, {num_kv_heads}")
    default_dim = 128 if table.get("model_type") == "qwen3" else hidden_size // num_heads
    return Decoder(
        num_layers=_count(table, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_count(table, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_count(table, "head_dim", default_dim),
        vocab_size=_count(table, "vocab_size"),
        max_context=_count(table, "max_position_embeddings"),
        tied_embeddings=bool(table.get("tie_word_embeddings", False)),
    )


def _count(table: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = table.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}: {value!r} is not a whole number from 1 up" if value is not None else f"{key}: is missing")
    return value
