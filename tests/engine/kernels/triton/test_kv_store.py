"""Norm, rotation and storing in one kernel equal pdmesh/engine/models/layers.py, pdmesh/engine/models/layers.py and a plain
write."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.kv import rope_and_store, store_kv
from pdmesh.engine.models.layers import RotaryTable, rms_norm, rotate
from pdmesh.engine.models.rope import RopeConfig
from tests.engine.kernels.triton.paged import DEVICE

EPS = 1e-6
SLOTS = [17, -1, 3, 0, 30]
POSITIONS = [4, 0, 99, 7, 7]


def table(dim: int, dtype: torch.dtype, rotary_dim: int) -> RotaryTable:
    config = replace(RopeConfig.from_dict({"rope_theta": 1e4}, head_dim=dim, max_context=100), rotary_dim=rotary_dim)
    return RotaryTable(config, 100, dtype=dtype, device=DEVICE)


def pool(kv_heads: int, dim: int, dtype: torch.dtype, block_size: int = 8) -> Tensor:
    return torch.full((2, 4, block_size, kv_heads, dim), 9.0, device=DEVICE).to(dtype)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def indices(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def expected_heads(qkv: Tensor, heads: int, kv_heads: int, rotary: RotaryTable, norm: Tensor | None) -> Tensor:
    """[T, all heads, D]: the code of pdmesh/engine/models/decoder.py, `_attend`."""
    split = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
    rotated = split[:, : heads + kv_heads]
    rotated = rotated if norm is None else rms_norm(rotated, norm, EPS)
    rotated = rotate(rotated, *rotary.at(torch.tensor(POSITIONS, device=DEVICE)))
    return torch.cat((rotated, split[:, heads + kv_heads :]), 1)


def check_pool(kv: Tensor, key: Tensor, value: Tensor, atol: float) -> None:
    """What was given is where it belongs, and nowhere else."""
    expected = pool(kv.shape[3], kv.shape[4], key.dtype, kv.shape[2])
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            expected[0].flatten(0, 1)[slot], expected[1].flatten(0, 1)[slot] = key[token], value[token]
    torch.testing.assert_close(kv.to(key.dtype), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim"),
    [(4, 2, 64, 64), (3, 1, 96, 96), (7, 1, 128, 128), (2, 2, 256, 256), (6, 2, 80, 32), (5, 5, 16, 16)],
)
def test_norm_rotation_and_storing(
    heads: int, kv_heads: int, dim: int, rotary_dim: int, has_norm: bool, dtype: torch.dtype
) -> None:
    qkv, kv = random(5, (heads + 2 * kv_heads) * dim, dtype=dtype), pool(kv_heads, dim, dtype)
    norm = random(heads + kv_heads, dim, dtype=dtype, seed=1) if has_norm else None
    rotary = table(dim, dtype, rotary_dim)
    query = rope_and_store(qkv, kv, rotary, indices(POSITIONS), indices(SLOTS), num_heads=heads, norm=norm, eps=EPS)
    expected = expected_heads(qkv, heads, kv_heads, rotary, norm)
    # A norm's sum may round otherwise, and then roundings of the dtype do: of numbers up to 8, whose units are 5e-7 and 4e-3.
    atol = 0.0 if norm is None else 4e-6 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(query, expected[:, :heads], atol=atol, rtol=0)
    check_pool(kv, expected[:, heads : heads + kv_heads], expected[:, heads + kv_heads :], atol)


def test_a_tokens_numbers_are_its_own() -> None:
    """Alone, in a batch, with padding behind it; into a given place."""
    dtype, rotary, norm = torch.float16, table(64, torch.float16, 64), random(6, 64, dtype=torch.float16, seed=1)
    qkv, out = random(5, 8 * 64, dtype=dtype), torch.zeros((5, 9, 64), dtype=dtype, device=DEVICE)
    whole, parts = pool(2, 64, dtype), pool(2, 64, dtype)
    together = rope_and_store(
        qkv, whole, rotary, indices(POSITIONS), indices(SLOTS), num_heads=4, norm=norm, eps=EPS, out=out[:, 2:6]
    )
    assert together.data_ptr() == out[:, 2:6].data_ptr()
    for token in range(5):
        position, slot = indices(POSITIONS[token : token + 1]), indices(SLOTS[token : token + 1])
        alone = rope_and_store(qkv[token : token + 1], parts, rotary, position, slot, num_heads=4, norm=norm, eps=EPS)
        assert torch.equal(alone[0], together[token])
    assert torch.equal(whole, parts)
    assert (out[:, [0, 1, 6, 7, 8]] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_keys_and_values_as_they_are(dtype: torch.dtype) -> None:
    heads, kv = random(5, 7, 96, dtype=dtype), pool(2, 96, dtype, block_size=5)
    kv = torch.full((2, 7, 5, 2, 96), 9.0, device=DEVICE).to(dtype)
    store_kv(heads[:, 1:3], heads[:, 4:6], kv, indices(SLOTS))
    expected = torch.full_like(kv, 9.0)
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            expected[0].flatten(0, 1)[slot], expected[1].flatten(0, 1)[slot] = heads[token, 1:3], heads[token, 4:6]
    assert torch.equal(kv, expected)


def test_float8_is_rounded_to_even_and_saturated_as_torch_does() -> None:
    """All sizes: halves between two numbers, numbers below the normal ones, more than there is."""
    halves = torch.arange(0, 0x7E, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = torch.cat(
        (halves, (halves[1:] + halves[:-1]) / 2, torch.tensor([448.0, 460.0, 1e4, 2.0**-10, 2.0**-11, 3 * 2.0**-10]))
    )
    values = torch.cat((halves, -halves, torch.randn(512 - 2 * len(halves) % 512) * 100))[:512].view(1, 1, 512)
    key = values[..., :256].repeat(5, 1, 1).to(DEVICE)
    value = values[..., 256:].repeat(5, 1, 1).to(DEVICE)
    scales = torch.tensor([0.5, 2.0], device=DEVICE)
    kv = pool(1, 256, torch.float8_e4m3fn)
    store_kv(key, value, kv, indices(SLOTS), kv_scales=scales)
    scaled = [(x / scale).clamp(-448, 448) for x, scale in zip((key, value), scales, strict=True)]
    expected_key, expected_value = (x.to(torch.float8_e4m3fn).float() for x in scaled)
    check_pool(kv, expected_key, expected_value, atol=0)


def test_float8_with_scales_that_are_no_powers_of_two() -> None:
    key, value = random(5, 2, 64, dtype=torch.float16), random(5, 2, 64, dtype=torch.float16, seed=1)
    scales = torch.tensor([0.0137, 1 / 3], device=DEVICE)
    kv = pool(2, 64, torch.float8_e4m3fn)
    store_kv(key, value, kv, indices(SLOTS), kv_scales=scales)
    scaled = [(x.float() / scale).clamp(-448, 448) for x, scale in zip((key, value), scales, strict=True)]
    expected_key, expected_value = (x.to(torch.float8_e4m3fn).float() for x in scaled)
    check_pool(kv, expected_key, expected_value, 0)


def test_what_is_no_number_stays_none_in_float8() -> None:
    """Whatever its bits: a GPU's own NaN has all of them set."""
    nans = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1], dtype=torch.int32).view(torch.float32)
    key = torch.cat((nans, torch.tensor([torch.inf, -torch.inf]), torch.ones(59))).expand(5, 2, 64).contiguous().to(DEVICE)
    kv = pool(2, 64, torch.float8_e4m3fn)
    store_kv(key, key, kv, indices(SLOTS), kv_scales=torch.ones(2, device=DEVICE))
    stored = kv.flatten(1, 2)[:, [slot for slot in SLOTS if slot >= 0]].float()
    assert stored[..., :3].isnan().all() and not stored[..., 3:].isnan().any()
    assert (stored[..., 3] == 448).all() and (stored[..., 4] == -448).all()


def test_rotated_keys_in_float8() -> None:
    rotary, scales = table(64, torch.float16, 64), torch.tensor([0.125, 0.25], device=DEVICE)
    qkv, narrow, wide = random(5, 8 * 64, dtype=torch.float16), pool(2, 64, torch.float8_e4m3fn), pool(2, 64, torch.float16)
    rope_and_store(qkv, narrow, rotary, indices(POSITIONS), indices(SLOTS), num_heads=4, kv_scales=scales)
    rope_and_store(qkv, wide, rotary, indices(POSITIONS), indices(SLOTS), num_heads=4)
    stored = [slot for slot in SLOTS if slot >= 0]
    scaled = (wide.float() / scales.view(2, 1, 1, 1, 1)).to(torch.float8_e4m3fn)
    assert torch.equal(narrow.flatten(1, 2)[:, stored].float(), scaled.flatten(1, 2)[:, stored].float())


def test_what_does_not_fit_is_refused_by_name() -> None:
    qkv, kv, rotary = random(5, 8 * 64, dtype=torch.float32), pool(2, 64, torch.float32), table(64, torch.float32, 64)
    good: dict[str, Any] = {
        "qkv": qkv,
        "kv": kv,
        "rotary": rotary,
        "positions": indices(POSITIONS),
        "slots": indices(SLOTS),
        "num_heads": 4,
    }
    cases: dict[str, dict[str, Any]] = {
        "qkv": {"num_heads": 5},
        "slots": {"slots": indices(SLOTS).long()},
        "positions": {"positions": indices(POSITIONS[:3])},
        "rotary": {"rotary": table(128, torch.float32, 128)},
        "norm": {"norm": random(6, 32, dtype=torch.float32)},
        "kv: ": {"kv": kv.half()},
        "kv_scales": {"kv": kv.to(torch.float8_e4m3fn)},
        "strides": {"kv": pool(2, 64, torch.float32, 16)[:, :, :8]},
        "out": {"out": qkv},
    }
    for name, changed in cases.items():
        with pytest.raises(ValueError, match=name):
            rope_and_store(**{**good, **changed})
    with pytest.raises(ValueError, match="value"):
        store_kv(qkv.view(5, 8, 64)[:, :2], qkv.view(5, 8, 64)[:, :1], kv, indices(SLOTS))


@pytest.mark.gpu
@pytest.mark.parametrize("has_norm", [False, True])
def test_bfloat16(has_norm: bool) -> None:
    test_norm_rotation_and_storing(32, 8, 128, 128, has_norm, torch.bfloat16)
