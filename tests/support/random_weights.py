"""Random weights that are made where they are used and never stored, and the settings of engines that compute with them.

A tensor depends on its name and shape alone, so two models of one shape have the same weights. Quantized ones are drawn as codes
and scales: quantizing 8 G weights on the CPU takes minutes, and a kernel's time does not depend on where its codes came from.
Nothing here imports triton.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.loader.quantize import Fp8Weight, Int4Weight, Int8Weight
from pdmesh.engine.models.config import ModelConfig

INT8_SPREAD = 73.3  # standard deviation of whole numbers from -127 to 127
INT4_SPREAD, INT4_MIDDLE = 4.61, 7.5  # of 0 to 15
FP8_SPREAD = 100.1  # of all codes of e4m3 but NaN


def generator_of(name: str, device: str) -> torch.Generator | None:
    """None where tensors have no numbers (compile.py)."""
    return None if device == "meta" else torch.Generator(device).manual_seed(zlib.crc32(name.encode()))


class RandomSource:
    """A checkpoint that nobody saved (pdmesh.engine.loader.safetensors.WeightSource). Outputs of a map are about as large as its
    inputs."""

    def __init__(self, config: ModelConfig, device: str, dtype: torch.dtype) -> None:
        self.config, self._device, self._dtype = config, device, dtype
        self._shapes = _shapes(config)

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def get(self, name: str) -> Tensor:
        shape, generator = self._shapes[name], generator_of(name, self._device)
        tensor = torch.randn(shape, generator=generator, device=self._device, dtype=self._dtype)
        return tensor.mul_(0.1).add_(1.0) if len(shape) == 1 else tensor.mul_(shape[1] ** -0.5)

    def get_int4(self, name: str, group: int) -> Int4Weight | None:
        return None

    def get_int8(self, name: str) -> Int8Weight | None:
        return None

    def num_elements(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self._shapes.values())


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama without biases, or with latent attention."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, kv = config.num_heads * dim, config.num_kv_heads * dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    if config.qk_norm:
        layer |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
    if latent := config.latent:
        heads = config.num_heads
        layer |= {
            "self_attn.q_a_proj": (latent.query_rank, hidden),
            "self_attn.q_a_norm": (latent.query_rank,),
            "self_attn.q_b_proj": (query, latent.query_rank),
            "self_attn.kv_a_proj": (latent.width, hidden),
            "self_attn.kv_a_norm": (latent.kv_rank,),
            "self_attn.kv_b_proj": (heads * (latent.nope_dim + latent.value_dim), latent.kv_rank),
            "self_attn.o_proj": (hidden, heads * latent.value_dim),
        }
    table = (config.vocab_size, hidden)
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(config.num_layers) for name, shape in layer.items()}
    return {**shapes, "model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": (hidden,)}


def random_int8(name: str, rows: int, width: int, group: int, device: str) -> Int8Weight:
    codes = torch.randint(-127, 128, (rows, width), generator=generator_of(name, device), device=device, dtype=torch.int8)
    return Int8Weight(codes, torch.full((rows,), width**-0.5 / INT8_SPREAD, device=device))


def random_int4(name: str, rows: int, width: int, group: int, device: str) -> Int4Weight:
    codes = torch.randint(0, 16, (rows, width), generator=generator_of(name, device), device=device, dtype=torch.uint8)
    scales = torch.full((rows, width // group), width**-0.5 / INT4_SPREAD, device=device, dtype=torch.float16)
    return Int4Weight(codes, scales, scales * -INT4_MIDDLE, group)


def random_fp8(name: str, rows: int, width: int, group: int, device: str) -> Fp8Weight:
    codes = torch.randint(0, 0x7F, (rows, width), generator=generator_of(name, device), device=device, dtype=torch.uint8)
    signs = torch.randint(0, 2, (rows, width), generator=generator_of(f"{name} signs", device), device=device, dtype=torch.uint8)
    scales = torch.full((rows,), width**-0.5 / FP8_SPREAD, device=device)
    return Fp8Weight((codes | signs << 7).view(torch.float8_e4m3fn), scales)


def engine_config(device: str, *, max_num_seqs: int, max_context: int, **settings: object) -> EngineConfig:
    """Of an engine that only computes: no cache of prompts, no guesses, a pool for all its sequences."""
    fields: dict[str, object] = {
        "num_blocks": max_num_seqs * (-(-max_context // 16) + 1),
        "max_num_batched_tokens": 2048,
        **settings,
    }
    return EngineConfig(
        model="random weights", device=device, backend="triton", max_num_seqs=max_num_seqs, max_context=max_context,
        prefix_caching=False, keep_pace=False, speculation="none", **fields,  # type: ignore[arg-type]
    )  # fmt: skip
