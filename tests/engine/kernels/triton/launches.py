"""Launches of every kernel through its own launcher, with the numbers that are hard on a compiler: one row, odd sizes, tails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from pdmesh.engine.kernels.triton.attention import Workspace, paged_attention
from pdmesh.engine.kernels.triton.blocks import TritonBlocks
from pdmesh.engine.kernels.triton.cuda_graphs import DecodeBuffers
from pdmesh.engine.kernels.triton.experts.experts import GroupedExperts
from pdmesh.engine.kernels.triton.kv import rope_and_store, store_kv
from pdmesh.engine.kernels.triton.latent.attention import LatentCall
from pdmesh.engine.kernels.triton.latent.maps import store_latents
from pdmesh.engine.kernels.triton.linear.dense import TritonDense, VectorDense
from pdmesh.engine.kernels.triton.linear.linear import WordLinear, make_triton_linear, rounded_rows
from pdmesh.engine.kernels.triton.lora import AdapterRows, AdapterWeights
from pdmesh.engine.kernels.triton.norms import (
    activate,
    add_rms_norm,
    added_and_normalized,
    gate_mul,
    normalized,
    rms_norm,
    silu_mul,
)
from pdmesh.engine.kernels.triton.sampling.sampler import DeviceSampler
from pdmesh.engine.kernels.triton.split_kv import SPLITS
from pdmesh.engine.kv_cache.block_moves import Move
from pdmesh.engine.loader.quantize import Fp8Weight, Int4Weight, Int8Weight, quantize_fp8, quantize_int4, quantize_int8
from pdmesh.engine.models.config import ExpertsConfig, LatentConfig
from pdmesh.engine.models.decoder import LatentMaps
from pdmesh.engine.models.layers import ACTIVATIONS, DenseLinear, GatedMLP, Linear, Norm, RotaryTable
from pdmesh.engine.models.rope import RopeConfig
from pdmesh.engine.sampling.sampler import SampleRow
from pdmesh.sampling_params import SamplingParams
from tests.engine.kernels.triton.paged import DEVICE, Sequences, Shape

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
# Three of each pair are split, the last is walked; contexts, tables and rows are odd.
LENGTHS = [(601, 1), (39, 3), (1, 1), (97, 19)]


def products() -> None:
    """All row counts that are a kernel of their own, and one row, over one input tile and over several shares."""
    wide, narrow = torch.randn(640, 1024), torch.randn(70, 128)
    for weight in (
        quantize_int8(wide),
        quantize_int4(wide, 32),
        quantize_int4(wide, 128),
        quantize_fp8(wide),
        quantize_int8(narrow),
    ):
        width = weight.values.shape[1]
        linear = make_triton_linear(weight, torch.zeros(len(weight.values)))
        assert isinstance(linear, WordLinear)
        for num_rows in (1, 3, 8, 17, 100, 131):
            x = torch.zeros(num_rows, width, dtype=BF16)
            linear(x)
            linear.gated(x, "silu")
    make_triton_linear(quantize_int8(wide), None, True)(torch.zeros(1, 1024, dtype=BF16))
    dense = TritonDense(wide.to(BF16), torch.zeros(640, dtype=BF16))
    for num_rows in (1, 17, 131):
        dense(torch.zeros(num_rows, 1024, dtype=BF16))
    row = VectorDense(wide.to(BF16), torch.zeros(640, dtype=BF16))
    row(torch.zeros(1, 1024, dtype=BF16))
    row.gated(torch.zeros(1, 1024, dtype=BF16), "silu")


def rows() -> None:
    for width in (2048, 4097, 8192):
        x, weight = torch.zeros(1, width, dtype=BF16), torch.zeros(width, dtype=BF16)
        rms_norm(x, weight, 1e-5)
        add_rms_norm(x, x.clone(), weight, 1e-5)
        silu_mul(torch.zeros(3, 2 * width, dtype=BF16))
    for width in (4096, 14336, 4097):
        rounded_rows(torch.zeros(131, width, dtype=BF16))


def keys_and_values() -> None:
    for heads, kv_heads, dim in ((32, 8, 128), (7, 1, 96), (8, 1, 256)):
        rotary = RotaryTable(
            RopeConfig.from_dict({"rope_theta": 1e4}, head_dim=dim, max_context=100), 100, dtype=BF16, device=DEVICE
        )
        index = torch.zeros(1, dtype=torch.int32)
        qkv, norm = torch.zeros(1, (heads + 2 * kv_heads) * dim, dtype=BF16), torch.zeros(heads + kv_heads, dim, dtype=BF16)
        for dtype, scales in ((BF16, None), (FP8, torch.ones(2))):
            kv = torch.zeros(2, 4, 16, kv_heads, dim, dtype=dtype)
            rope_and_store(qkv, kv, rotary, index, index, num_heads=heads, kv_scales=scales)
            rope_and_store(qkv, kv, rotary, index, index, num_heads=heads, norm=norm, eps=1e-5, kv_scales=scales)
            key = torch.zeros(1, kv_heads, dim, dtype=BF16)
            store_kv(key, key, kv, index, kv_scales=scales)


def other_rows() -> None:
    """Norms, MLPs and heads of other families than Llama."""
    x, weight = torch.zeros(3, 2048, dtype=BF16), torch.zeros(2048, dtype=BF16)
    for norm in (Norm(weight, 1e-5, wide=True), Norm(weight, 1e-5, "layer", weight)):
        normalized(x, norm)
        added_and_normalized(x, x.clone(), norm, factor=0.5)
    for activation in ACTIVATIONS:
        gate_mul(x, activation)
        activate(x, activation)
    index, qkv, norm_weight = (
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(1, 10 * 96, dtype=BF16),
        torch.zeros(9, 96, dtype=BF16),
    )
    kv = torch.zeros(2, 4, 16, 1, 96, dtype=BF16)
    for kind in ("wide", "layer"):
        rope_and_store(qkv, kv, None, index, index, num_heads=8, norm=norm_weight, eps=1e-5, norm_kind=kind)


def experts() -> None:
    """Few tokens and many, plain weights and words, of widths that are no multiples of a tile."""
    for form in (None, quantize_int8, quantize_fp8, lambda weight: quantize_int4(weight, 32)):
        mixed = mixture(form, "silu", 512, 384, shared=64)
        for num_tokens in (4, 132):
            mixed(torch.zeros(num_tokens, 512, dtype=BF16))
    mixture(None, "swiglu_oai", 360, 200, bias=True)(torch.zeros(8, 360, dtype=BF16))


def adapters() -> None:
    """Products of three parts and of one, of widths that are no multiples of a tile; few rows and many."""
    for dtype in (BF16, torch.float32):
        for places, inputs, parts in ((1, 70, [96]), (5, 4096, [2048, 513, 512])):
            weights = AdapterWeights(places, 64, inputs, parts, torch.zeros(1, dtype=dtype))
            for num_rows in (1, 131):
                groups = AdapterRows(places, torch.device(DEVICE)).groups_of(torch.zeros(num_rows, dtype=torch.int32))
                groups.sort()
                weights.add(torch.zeros(num_rows, inputs, dtype=dtype), torch.zeros(num_rows, sum(parts), dtype=dtype), groups)


def latents() -> None:
    """Of DeepSeek-V3 and MiniCPM3, whose halves are 288 and 144 numbers, and in float32; split and walked, with a tail."""
    for heads, latent, dtype, is_fp8 in (
        (16, LatentConfig(0, 512, 128, 64, 128), BF16, False),
        (40, LatentConfig(0, 256, 64, 32, 64), BF16, True),
        (16, LatentConfig(0, 512, 128, 64, 128), torch.float32, False),
    ):
        half = latent.width // 2
        sequences = Sequences(Shape(1, 1, half), LENGTHS, dtype, tail=3 * is_fp8)
        kv, scales = (sequences.kv.to(FP8), torch.ones(2)) if is_fp8 else (sequences.kv, None)
        meta = sequences.meta()
        query, out = (torch.zeros(meta.num_tokens, heads, dim, dtype=dtype) for dim in (latent.width, latent.kv_rank))
        workspace = Workspace.of(meta, heads, latent.kv_rank)
        LatentCall(latent, 0.1, SPLITS, meta, workspace.acc, workspace.stats).run(query, kv, scales, out)
        norm = Norm(torch.ones(latent.kv_rank, dtype=dtype), 1e-6)
        key_map, value_map = (torch.zeros(heads, *shape, dtype=dtype) for shape in ((latent.nope_dim, latent.kv_rank), (1, 1)))
        rope = RopeConfig.from_dict({"rope_theta": 1e4}, head_dim=latent.rope_dim, max_context=700)
        rotary = RotaryTable(rope, 700, dtype=dtype, device=DEVICE)
        fused = torch.zeros(meta.num_tokens, heads * (latent.nope_dim + latent.rope_dim) + latent.width, dtype=dtype)
        maps = LatentMaps(None, None, norm, key_map, value_map)
        store_latents(fused, maps, latent, kv, rotary, meta.positions, meta.slots, query, scales)


def mixture(
    quantize: Callable[[torch.Tensor], Int8Weight | Int4Weight | Fp8Weight] | None,
    activation: str,
    hidden: int,
    inner: int,
    *,
    shared: int = 0,
    bias: bool = False,
) -> GroupedExperts:
    """Twelve experts in three groups, whose weights are quantized."""
    config = ExpertsConfig(12, 3, inner, (True,), "sigmoid", True, num_groups=3, top_groups=2, group_rank="top2")
    config = replace(config, activation=activation, activation_limit=7.0)

    def linear(rows: int, width: int) -> Linear:
        weight, own = torch.randn(rows, width), torch.zeros(rows, dtype=BF16) if bias else None
        return DenseLinear(weight.to(BF16), own) if quantize is None else make_triton_linear(quantize(weight), own)

    def mlp(width: int) -> GatedMLP:
        return GatedMLP(linear(2 * width, hidden), linear(hidden, width))

    return GroupedExperts(
        config,
        "silu",
        router=torch.zeros(12, hidden),
        router_bias=torch.zeros(12) if bias else None,
        correction=torch.zeros(12),
        experts=(mlp(inner) for _ in range(12)),
        shared=mlp(shared) if shared else None,
        shared_gate=torch.zeros(1, hidden) if shared else None,
    )


def moves() -> None:
    buffers = DecodeBuffers(8, 100, 16, torch.device(DEVICE))
    for num_rows in (4, 8):
        buffers.unpack(num_rows)
    for dim, heads in ((128, range(8)), (128, range(3, 4)), (5, range(8))):
        pool, ids = torch.zeros(2, 2, 9, 16, 8, dim, dtype=BF16), torch.zeros(5, dtype=torch.int32)
        move = Move(pool, range(1, 2), ids, torch.zeros(1, 2, 33, len(heads), dim, dtype=BF16), 3, heads)
        TritonBlocks().gather(move)
        TritonBlocks().scatter(move)


def attention(
    dim: int,
    dtype: torch.dtype = BF16,
    *,
    window: int | None = None,
    tail: int = 0,
    is_fp8: bool = False,
    softcap: float = 0.0,
    has_sinks: bool = False,
) -> None:
    sequences = Sequences(Shape(32, 8, dim), LENGTHS, dtype, tail=tail)
    kv = sequences.kv.to(FP8) if is_fp8 else sequences.kv
    scales, sinks = torch.ones(2) if is_fp8 else None, torch.zeros(32, dtype=dtype) if has_sinks else None
    paged_attention(sequences.query, kv, sequences.meta(), window=window, kv_scales=scales, softcap=softcap, sinks=sinks)


def other_attention() -> None:
    attention(256, window=71, softcap=50.0)
    attention(128, softcap=50.0, is_fp8=True)
    attention(64, window=71, has_sinks=True)


def narrow_attention() -> None:
    attention(64)
    attention(64, is_fp8=True, tail=1)
    attention(96, window=71)


def attention_of_128() -> None:
    attention(128)
    attention(128, is_fp8=True)
    attention(128, window=71, tail=3)


def attention_of_256() -> None:
    attention(256)
    attention(256, is_fp8=True, window=71)


def attention_in_float32() -> None:
    for dim in (64, 128, 256):
        attention(dim, torch.float32)


def on_older_gpus() -> None:
    """The largest tiles."""
    linear = make_triton_linear(quantize_int4(torch.randn(640, 1024), 64))
    for num_rows in (64, 128):
        linear(torch.zeros(num_rows, 1024, dtype=BF16))
    attention(128)
    attention(256)


def draws() -> None:
    for num_rows in (1, 3, 16):
        params = SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.1, repetition_penalty=1.1, seed=1, max_tokens=10)
        row = SampleRow(params, 0, 3, (1, 2), (3,), frozenset({5}))
        plain = SampleRow(SamplingParams(temperature=0.0, max_tokens=1), 0, 0, (), (), frozenset())
        for each in (row, plain):
            DeviceSampler().sample(torch.zeros(num_rows, 128_256), [each] * num_rows)


GROUPS: dict[str, Callable[[], None]] = {
    group.__name__: group
    for group in (
        products, rows, other_rows, keys_and_values, experts, adapters, latents, moves, narrow_attention, attention_of_128,
        attention_of_256, attention_in_float32, other_attention, draws, on_older_gpus,
    )
}  # fmt: skip
