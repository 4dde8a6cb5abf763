"""The small kernels, the draw and a whole model against their references. A check gives its error over what it may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.gpu.batches import decode_batch
from benchmarks.gpu.context import Context
from benchmarks.gpu.drawn import engine_config, generator_of
from benchmarks.gpu.shapes import Heads
from benchmarks.gpu.weights import launched_model, make_decoder
from pdmesh.engine.kernels.triton.kv import rope_and_store, store_kv
from pdmesh.engine.kernels.triton.norms import add_rms_norm, rms_norm, silu_mul
from pdmesh.engine.kernels.triton.sampling.sampler import DeviceSampler
from pdmesh.engine.models import layers
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.layers import RotaryTable, rotate
from pdmesh.engine.request import SamplingParams
from pdmesh.engine.sampling.sampler import Sampler, SampleRow
from tests.gpu.compare import UNIT, is_same, over_bound, over_roundings, relative_error

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
    return ModelConfig.from_dict(values)
