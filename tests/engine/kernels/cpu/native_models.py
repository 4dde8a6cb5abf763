"""Tiny models on the native backend: their shapes, the numbers they are loaded in, and loops that drive them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from tests.engine.model_kinds import KINDS
from tests.engine.paged_loop import PagedLoop, load

Shape = tuple[str, dict[str, Any]]
# Settings of an engine by the weights that it then has.
WEIGHTS: dict[str, dict[str, object]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {},  # the default
    "int4": {"quantization": "int4"},
}
KV_DTYPES = ("float32", "bfloat16", "int8")


def _heads(heads: int, kv_heads: int, head_dim: int = 16, **more: object) -> Shape:
    return "llama", {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, **more}


# What decides paths of the kernels, beside the switches of KINDS: widths that fill no panel, no unit and no vector; the rows of a
# tile. transformers wants the hidden size to be a multiple of the heads.
SHAPES: dict[str, Shape] = {
    **KINDS,
    **{f"head-dim-{dim}": _heads(4, 2, dim) for dim in (16, 48, 64, 80, 128, 256, 512)},
    **{f"groups-{groups}": _heads(2 * groups, 2, hidden_size=24 * groups) for groups in (1, 3, 4, 7, 8)},
    "groups-50": _heads(50, 1, hidden_size=50),  # more rows of one token than a tile of several tokens has
    "hidden-72": _heads(4, 2, hidden_size=72, intermediate_size=100),
    "hidden-odd": _heads(5, 1, hidden_size=65, intermediate_size=37),
    "hidden-small": _heads(2, 1, hidden_size=6, intermediate_size=5, initializer_range=0.5),
    "vocab-321": ("qwen2", {"vocab_size": 321, "tie_word_embeddings": True}),
    "vocab-335": ("llama", {"vocab_size": 335}),
    "partial-rotary": _heads(4, 2, 80, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4}),
    "output-bias-odd": _heads(5, 5, hidden_size=70, intermediate_size=50, attention_bias=True, mlp_bias=True),
}


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=num_tokens)


def native(folder: Path, weights: str = "int8", *, num_blocks: int = 512, block_size: int = 16, **settings: object) -> PagedLoop:
    """A loop over the model in `folder`. `settings` are EngineConfig's, such as kv_dtype and num_threads."""
    asked = {"backend": "native", "num_threads": 1, "block_size": block_size, **WEIGHTS[weights], **settings}
    try:
        return PagedLoop(load(folder, **asked), num_blocks=num_blocks, block_size=block_size)
    finally:
        torch.set_num_threads(1)  # the loader sets it, for torch too


def reference(folder: Path, **settings: object) -> PagedLoop:
    """The torch backend in float32."""
    return PagedLoop(load(folder, backend="torch", dtype="float32", **settings))
