"""The small kernels, the draw and a whole model against their references. A check gives its error over what it may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from benchmarks.gpu.context import Context
from benchmarks.gpu.shapes import Heads, decode_batch
from pdmesh.engine.attention.base import ReferenceAttention
from pdmesh.engine.kernels.triton.attention import TritonAttention
from pdmesh.engine.kernels.triton.kv import rope_and_store, store_kv
from pdmesh.engine.kernels.triton.linear.linear import make_triton_linear
from pdmesh.engine.kernels.triton.norms import add_rms_norm, rms_norm, silu_mul
from pdmesh.engine.kernels.triton.sampling.sampler import DeviceSampler
from pdmesh.engine.loader.quantize import Fp8Weight, Int4Weight, Int8Weight, dequantize_fp8, dequantize_int4, dequantize_int8
from pdmesh.engine.models import layers
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.layers import RotaryTable, rotate
from pdmesh.engine.models.registry import model_config
from pdmesh.engine.runner.batch import StepBatch
from pdmesh.engine.sampling.sampler import Sampler, SampleRow
from pdmesh.sampling_params import SamplingParams
from tests.gpu.errors import UNIT, is_same, over_bound, over_roundings, relative_error
from tests.support.random_models import launched_model, make_decoder
from tests.support.random_weights import engine_config, generator_of, random_fp8, random_int4, random_int8

Check = Callable[[Context], float]
EPS = 1e-5
ROWS = 7
LOGITS_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 5e-2}
"""Of the norm, for a few layers of both: roundings of bfloat16 add up from layer to layer."""


def checks(context: Context) -> Iterator[tuple[str, Check]]:
    yield "norms", _norms
    yield "silu and product", _gated
    for model, heads in context.scale.heads.items():
        for with_norm in (False, True):
            name = f"rotation and storing, heads of {model}{', with norms' if with_norm else ''}"
            yield name, lambda c, h=heads, w=with_norm: _rotation(c, h, w)  # type: ignore[misc]
    yield "storing", _storing
    yield "draws", _draws
    yield "a model's logits", _logits


def random(context: Context, name: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator_of(name, context.device), device=context.device, dtype=context.dtype)


def _summed_roundings(context: Context, width: int) -> float:
    """A narrow dtype hides the order of a sum; float32 does not."""
    return 2.0 if context.dtype.itemsize < 4 else float(width)


def _norms(context: Context) -> float:
    width = context.scale.config("8B").hidden_size
    x, residual, weight = random(context, "x", ROWS, width), random(context, "residual", ROWS, width), random(context, "w", width)
    normed, added = add_rms_norm(x, residual, weight, EPS)
    roundings = _summed_roundings(context, width)
    return max(
        over_roundings(rms_norm(x, weight, EPS), layers.rms_norm(x, weight, EPS), roundings),
        over_roundings(normed, layers.rms_norm(added, weight, EPS), roundings),
        0.0 if is_same(added, x + residual) else float("inf"),
    )


def _gated(context: Context) -> float:
    gate_up = random(context, "gate_up", ROWS, 2 * context.scale.config("8B").intermediate_size) * 4
    gate, up = gate_up.chunk(2, dim=-1)
    return over_roundings(silu_mul(gate_up), layers.silu(gate) * up, 2.0 if context.dtype.itemsize < 4 else 8.0)


def _pool(context: Context, heads: Heads) -> Tensor:
    return torch.full((2, 4, 16, heads.num_kv_heads, heads.head_dim), 9.0, device=context.device, dtype=context.dtype)


def _places(context: Context) -> tuple[Tensor, Tensor]:
    """Positions and slots of ROWS tokens; one is not stored."""
    as_int32 = [torch.tensor(values, dtype=torch.int32, device=context.device) for values in ([4, 0, 99, 7, 7, 1, 63], SLOTS)]
    return as_int32[0], as_int32[1]


SLOTS = [17, -1, 3, 0, 30, 63, 40]


def _rotation(context: Context, heads: Heads, with_norm: bool) -> float:
    """Against norm, rotation and a plain write of pdmesh/engine/models/decoder.py, whole pool included."""
    num_rotated, dim = heads.num_heads + heads.num_kv_heads, heads.head_dim
    rope = replace(context.scale.config("8B").rope, rotary_dim=dim)
    rotary = RotaryTable(rope, 100, dtype=context.dtype, device=context.device)
    qkv = random(context, "qkv", ROWS, (num_rotated + heads.num_kv_heads) * dim)
    norm = random(context, "norm", num_rotated, dim) if with_norm else None
    kv, (positions, slots) = _pool(context, heads), _places(context)
    query = rope_and_store(qkv, kv, rotary, positions, slots, num_heads=heads.num_heads, norm=norm, eps=EPS)
    split = qkv.view(ROWS, -1, dim)
    normed = split[:, :num_rotated] if norm is None else layers.rms_norm(split[:, :num_rotated], norm, EPS)
    rotated = rotate(normed, *rotary.at(positions.long()))
    expected = _stored(_pool(context, heads), rotated[:, heads.num_heads :], split[:, num_rotated:])
    # Roundings of the largest number: of the result, and where a norm's sum is rounded otherwise, of what the result is made of.
    bound = (1 if norm is None else 4) * UNIT[context.dtype] * rotated.abs().amax()
    return max(over_bound(query, rotated[:, : heads.num_heads], bound), over_bound(kv, expected, bound))


def _stored(kv: Tensor, key: Tensor, value: Tensor) -> Tensor:
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            kv[0].flatten(0, 1)[slot], kv[1].flatten(0, 1)[slot] = key[token], value[token]
    return kv


def _storing(context: Context) -> float:
    """As they are, to the bit; and in float8, against torch's own rounding."""
    heads = context.scale.heads["8B"]
    key, value = (random(context, name, ROWS, heads.num_kv_heads, heads.head_dim) for name in ("key", "value"))
    kv, (_, slots) = _pool(context, heads), _places(context)
    store_kv(key, value, kv, slots)
    is_equal = is_same(kv, _stored(_pool(context, heads), key, value))
    narrow, scales = _pool(context, heads).to(torch.float8_e4m3fn), torch.tensor([0.5, 0.25], device=context.device)
    store_kv(key, value, narrow, slots, kv_scales=scales)
    rounded = [(x.float() / s).to(torch.float8_e4m3fn).to(context.dtype) for x, s in zip((key, value), scales, strict=True)]
    is_equal_narrow = is_same(narrow.to(context.dtype), _stored(_pool(context, heads), *rounded))
    return 0.0 if is_equal and is_equal_narrow else float("inf")


def _draws(context: Context) -> float:
    """Greedy and at random, with every filter and penalty: the tokens that the host draws."""
    vocab = context.scale.config("8B").vocab_size
    rows = [_row(i) for i in range(24 if context.device == "cuda" else 6)]
    logits = random(context, "logits", len(rows), vocab).float() * 3
    if logits.is_meta:
        DeviceSampler().start(logits, rows)
        return 0.0
    expected = [token.token_id for token in Sampler().sample(logits.cpu(), rows)]
    found = [token.token_id for token in DeviceSampler().sample(logits, rows)]
    return 0.0 if found == expected else float("inf")


def _row(i: int) -> SampleRow:
    params = SamplingParams(
        temperature=(i % 4) * 0.5, top_k=(0, 50)[i % 2], top_p=(1.0, 0.9, 0.5)[i % 3], min_p=(0.0, 0.02)[i % 2], seed=i,
        repetition_penalty=(1.0, 1.3)[i // 2 % 2], max_tokens=100,
    )  # fmt: skip
    return SampleRow(params, 0, 3, (1, 2, 3), (4, 5, 6), frozenset({7}))


def _logits(context: Context) -> float:
    """Of decode rows with ragged contexts over a pool of random keys and values; heads with norms."""
    shape = _short(context)
    config = engine_config(context.device, max_num_seqs=4, max_context=600)
    decoder = make_decoder(shape, "none", config, context.dtype)
    batch = decode_batch([1, 17, 300, 599], config.block_size)
    kv_shape = (shape.num_layers, 2, config.num_blocks, config.block_size, shape.num_kv_heads, shape.head_dim)
    kv = random(context, "kv", *kv_shape)
    found = launched_model(decoder, config).forward(batch, kv.clone())
    expected = decoder.forward(batch, kv.clone())
    return relative_error(found, expected) / LOGITS_TOLERANCE[context.dtype]


def _short(context: Context) -> ModelConfig:
    values = {**context.scale.models["8B"], "model_type": "qwen3", "num_hidden_layers": 2}
    return model_config(values)


# How far one tensor is from another, in units of what it may be; how many tokens differ.
#
# Tensors on the device `meta` have no numbers: they are taken for equal (compile.py launches what is compared, and no more).


# Attention over ragged batches against the engine's reference, which computes in float32 with torch.


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
BLOCK_SIZE = 16
# (context, queries): one token, the ends of blocks and of splits, a chunk behind others, a whole prompt.
LENGTHS = [(1, 1), (256, 1), (257, 1), (40, 18), (900, 16), (130, 130)]
LONG = [(20_000, 1), (16_400, 9), (3000, 700)]


def attention_checks(context: Context) -> Iterator[tuple[str, Check]]:
    lengths = LENGTHS + (LONG if context.device != "cpu" else [])
    for model, heads in context.scale.heads.items():
        for window in (None, 70):
            name = f"attention, heads of {model}{'' if window is None else f', window {window}'}"
            yield name, lambda c, h=heads, w=window: _attention(c, h, w, lengths)  # type: ignore[misc]


def _attention(context: Context, heads: Heads, window: int | None, lengths: list[tuple[int, int]]) -> float:
    config, batch = _config(context, heads, window), ragged_batch(lengths)
    num_blocks = 1 + max(block for table in batch.block_tables for block in table)
    kv = random(context, "kv", 1, 2, num_blocks, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
    query = random(context, "query", batch.num_tokens, heads.num_heads, heads.head_dim)
    key, value = (random(context, name, batch.num_tokens, heads.num_kv_heads, heads.head_dim) for name in ("key", "value"))
    plans = [attention(config, context.device).plan(batch, BLOCK_SIZE) for attention in (TritonAttention, ReferenceAttention)]
    found, expected = (plan.run(0, query, key, value, kv.clone()) for plan in plans)
    starts = batch.query_starts
    worst = max(relative_error(found[a:b], expected[a:b]) for a, b in pairwise(starts))
    return worst / TOLERANCE[context.dtype]


def _config(context: Context, heads: Heads, window: int | None) -> ModelConfig:
    return replace(
        context.scale.config("8B"),
        num_layers=1,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        windows=(window,),
    )


def ragged_batch(lengths: list[tuple[int, int]]) -> StepBatch:
    """Blocks lie scattered, as after a while of serving."""
    needed = [-(-context // BLOCK_SIZE) for context, _ in lengths]
    blocks = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(3)).tolist()
    tables = [[blocks.pop() for _ in range(count)] for count in needed]
    positions = [list(range(context - queries, context)) for context, queries in lengths]
    slots = [t[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for t, ps in zip(tables, positions, strict=True) for p in ps]
    flat = torch.tensor([p for ps in positions for p in ps])
    return StepBatch(
        token_ids=torch.zeros_like(flat),
        positions=flat,
        slot_mapping=torch.tensor(slots),
        query_starts=[0, *accumulate(queries for _, queries in lengths)],
        context_lens=[context for context, _ in lengths],
        block_tables=tables,
        logits_rows=torch.arange(len(flat)),
    )


# Products with weights in 8 and 4 bits against those with the dequantized ones, within the bound that WordLinear states.


ENCODINGS = ("int8", "int4", "fp8")
LINEAR_ROWS = (
    1,
    4,
    32,
    300,
)  # of each kind of tiles, and more than they take; as decode has them, whose kernels are compiled then
ROUNDINGS = 3.0  # of the weight, of the result, and one for good measure


def linear_checks(context: Context) -> Iterator[tuple[str, Check]]:
    shape = context.scale.config("8B")
    sizes = ((2 * shape.intermediate_size, shape.hidden_size), (shape.hidden_size, shape.intermediate_size))
    for encoding in ENCODINGS:
        for outputs, inputs in sizes:
            name = f"product with {encoding}, {outputs} x {inputs}"
            yield name, lambda c, e=encoding, o=outputs, i=inputs: _product(c, e, o, i)  # type: ignore[misc]


def _product(context: Context, encoding: str, outputs: int, inputs: int) -> float:
    weight, dense = _weight(context, encoding, outputs, inputs)
    linear = make_triton_linear(weight)
    return max(_over_bound(context, linear(x), x, dense) for x in _activations(context, inputs))


def _activations(context: Context, inputs: int) -> Iterator[Tensor]:
    for rows in LINEAR_ROWS if context.device != "cpu" else (1, 4, 9):
        yield random(context, f"x{rows}", rows, inputs)


def _weight(context: Context, encoding: str, outputs: int, inputs: int) -> tuple[Int8Weight | Int4Weight | Fp8Weight, Tensor]:
    if encoding == "int8":
        int8 = random_int8("check", outputs, inputs, 0, context.device)
        return int8, dequantize_int8(int8)
    if encoding == "int4":
        int4 = random_int4("check", outputs, inputs, 32, context.device)
        return int4, dequantize_int4(int4)
    fp8 = random_fp8("check", outputs, inputs, 0, context.device)
    return fp8, dequantize_fp8(fp8)


def _over_bound(context: Context, actual: Tensor, x: Tensor, dense: Tensor) -> float:
    """|error| <= (K u + 2 d) sum |x| |w| + d |result|."""
    exact, size = x.double() @ dense.double().T, x.double().abs() @ dense.double().abs().T
    unit = UNIT[context.dtype]
    bound = (x.shape[1] * UNIT[torch.float32] + (ROUNDINGS - 1) * unit) * size + unit * exact.abs() + 1e-7
    return over_bound(actual, exact, bound)
