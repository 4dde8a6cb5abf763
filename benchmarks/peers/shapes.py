"""Random weights in the shapes of known models, for sizes and families that no package registry has: what a step costs hangs on
shapes, not on values.

    $PDMESH_CACHE/peers/weights/NAME/      config.json, a shard of bfloat16 safetensors for each layer and one for the rest

Values are normal with a standard deviation of one over the square root of a product's inputs, so that states stay near 1 through
the layers and logits are finite. Each tensor has a seed of its own, made from its name.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pdmesh.models.catalogue import DEFAULT_MODEL, Progress
from pdmesh.models.registry import ensure_model

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True)
class Shape:
    """A model of random weights: its name in the cache, and its config.json."""

    name: str
    config: Mapping[str, Any]

    @property
    def tensors(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Return the shapes of all tensors by name, in the files that hold them."""
        config, hidden = self.config, int(self.config["hidden_size"])
        files = {f"layer-{layer:03}": self._layer(f"model.layers.{layer}") for layer in range(config["num_hidden_layers"])}
        rest: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
        if not config["tie_word_embeddings"]:
            rest["lm_head.weight"] = (config["vocab_size"], hidden)
        return {**files, "rest": {**rest, "model.norm.weight": (hidden,)}}

    def _layer(self, prefix: str) -> dict[str, tuple[int, ...]]:
        config = self.config
        hidden, width = config["hidden_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
        attention = {
            "q_proj": (heads, hidden),
            "k_proj": (kv_heads, hidden),
            "v_proj": (kv_heads, hidden),
            "o_proj": (hidden, heads),
        }
        named: dict[str, tuple[int, ...]] = {f"{prefix}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        if config["model_type"] == "qwen3_moe":
            named |= {f"{prefix}.self_attn.{name}.weight": (width,) for name in ("q_norm", "k_norm")}
        norms: dict[str, tuple[int, ...]] = {
            f"{prefix}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")
        }
        return {**named, **norms, **dict(self._mlp(f"{prefix}.mlp"))}

    def _mlp(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        config, hidden = self.config, self.config["hidden_size"]
        if config["model_type"] != "qwen3_moe":
            yield from _gated(prefix, hidden, config["intermediate_size"])
            return
        yield f"{prefix}.gate.weight", (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            yield from _gated(f"{prefix}.experts.{expert}", hidden, config["moe_intermediate_size"])

    def write(self, folder: Path, say: Progress) -> None:
        """Write the model into `folder`, which exists, a file at a time."""
        places: dict[str, str] = {}
        total = 0
        for number, (part, shapes) in enumerate(self.tensors.items()):
            tensors = {name: _values(name, shape) for name, shape in shapes.items()}
            file = f"model-{part}.safetensors"
            save_file(tensors, folder / file, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, file)
            total += sum(tensor.nbytes for tensor in tensors.values())
            if number % 8 == 0:
                say(f"{self.name}: {total / 1e9:.1f} GB of random weights")
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        (folder / "config.json").write_text(json.dumps(dict(self.config), indent=1))
        # Any tokenizer does: prompts are token ids. Some engines refuse to load a model without one.
        source = ensure_model(DEFAULT_MODEL, say)
        for name in _TOKENIZER_FILES:
            shutil.copy(source / name, folder / name)


def _gated(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)


def _values(name: str, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1:  # a norm
        return torch.ones(shape, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values: Tensor = torch.randn(shape, generator=generator) * float(shape[1]) ** -0.5
    return values.to(torch.bfloat16)


_COMMON: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192, "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
    "bos_token_id": 1, "eos_token_id": 2, "use_cache": True,
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    **_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False, "pretraining_tp": 1,
    "vocab_size": 128_256, "num_key_value_heads": 8,
}  # fmt: skip
# Llama 3.2's shapes. Its scaling of rotary frequencies is left out: it changes no shape, and converters treat it in many ways.
LLAMA_1B = Shape(
    "random-llama-1b",
    {
        **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "head_dim": 64,
    },
)  # fmt: skip
LLAMA_3B = Shape(
    "random-llama-3b",
    {
        **_LLAMA, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "head_dim": 128,
    },
)  # fmt: skip
EXPERTS_1B = Shape(
    "random-experts-1b",
    {
        **_COMMON, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 32_768, "hidden_size": 1024,
        "intermediate_size": 3072, "moe_intermediate_size": 384, "num_hidden_layers": 12, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 64, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "norm_topk_prob": True, "output_router_logits": False, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "use_sliding_window": False, "max_window_layers": 12,
    },
)  # fmt: skip
