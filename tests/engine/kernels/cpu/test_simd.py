"""Sixteen lanes mean the same on every instruction tier: each function of simd.h against numpy, and the tiers against each other.

Exact (bit for bit, NaN apart) is all but f_exp2, which is bounded in ulps, and dot_bf16 where the processor has an instruction
for it, whose rounding is its own. Tiers that this processor lacks run under an emulator, where there is one. Not covered: AVX-512
and AVX-VNNI where the processor lacks them, and rounding modes other than the default.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pdmesh.engine.kernels.cpu import isa
from tests.engine.kernels.cpu.emulated import target_of

Array = npt.NDArray[Any]
Function = Callable[..., Array]

CHECK = Path(__file__).with_name("simd_check.cpp")
BF16_INSTRUCTIONS = ("amx", "avx512_bf16", "neon_bf16")  # tiers with one for the product of bf16 pairs
RANDOM = np.random.default_rng(0)
LARGEST, SMALLEST, DENORMAL = (float(x) for x in np.array([0x7F7FFFFF, 0x00800000, 1], np.uint32).view(np.float32))
EXTREMES = [0.0, -0.0, np.inf, -np.inf, 1.0, LARGEST, -LARGEST, SMALLEST, -SMALLEST, DENORMAL, -DENORMAL, 8388607.5, 2.0**23, 0.5]


class Lanes:
    """The functions of simd.h as one tier compiles them."""

    def __init__(self, tier: isa.Tier, folder: Path) -> None:
        self.tier = tier
        self._target = target_of(tier)
        self._built = folder / f"simd_{tier.name}.so"
        self._target.compile(tier, [CHECK], self._built, *(() if self._target.runner else ("-fPIC", "-shared")))
        if not self._target.runner:
            self._check = ctypes.CDLL(str(self._built)).simd_check
            self._check.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 5, ctypes.c_int64]

    def __call__(self, name: str, *operands: Array, width: int = 16, dtype: npt.DTypeLike = np.float32) -> Array:
        """Applies a function block by block. Operands: [blocks, numbers of a block]. Result: [blocks, width]."""
        num_blocks = len(operands[0]) if operands else 1
        if self._target.runner:
            return self._emulated(name, operands, num_blocks, width, dtype)
        arrays = [_misaligned(array) for array in operands]
        out = _misaligned(np.zeros((num_blocks, width), dtype))
        pointers = [array.ctypes.data for array in arrays] + [None] * (3 - len(arrays))
        strides = [array.nbytes // num_blocks for array in arrays] + [0] * (3 - len(arrays)) + [out.nbytes // num_blocks]
        assert self._check(name.encode(), *pointers, out.ctypes.data, (ctypes.c_int64 * 4)(*strides), num_blocks) == 0, name
        return out

    def _emulated(self, name: str, operands: Sequence[Array], num_blocks: int, width: int, dtype: npt.DTypeLike) -> Array:
        strides = [array.nbytes // num_blocks for array in operands] + [0] * (3 - len(operands))
        strides.append(width * np.dtype(dtype).itemsize)
        given = b"".join(np.ascontiguousarray(array).tobytes() for array in operands)
        printed = self._target.run(self._built, name, str(num_blocks), *map(str, strides), given=given)
        return np.frombuffer(printed, dtype).reshape(num_blocks, width).copy()


def _misaligned(array: Array) -> Array:
    """A copy that starts one number after an aligned address: callers promise no more."""
    copy = np.empty(array.size + 1, array.dtype)[1:].reshape(array.shape)
    copy[:] = array
    return copy


@functools.cache
def lanes_of(tier: isa.Tier, folder: Path) -> Lanes:
    return Lanes(tier, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("simd")


@pytest.fixture(scope="module", params=isa.TIERS, ids=lambda tier: tier.name)
def lanes(request: pytest.FixtureRequest, folder: Path) -> Lanes:
    return lanes_of(request.param, folder)


def assert_same(actual: Array, expected: Array) -> None:
    """The same bits, signs of zeros included; any NaN equals any other."""
    assert actual.dtype == expected.dtype
    unsigned = np.dtype(f"u{actual.itemsize}")
    wrong = (np.ascontiguousarray(actual).view(unsigned) != np.ascontiguousarray(expected).view(unsigned)) & (
        (actual == actual) | (expected == expected)
    )
    assert not wrong.any(), f"{wrong.sum()} differ, such as {actual[wrong][:4]} for {expected[wrong][:4]}"


def floats(num_blocks: int = 256) -> Array:
    """[num_blocks, 16] float32: ordinary numbers, all bit patterns but NaN, and extremes."""
    x = RANDOM.normal(size=(num_blocks, 16)).astype(np.float32)
    patterns = RANDOM.integers(0, 2**32, x.shape, np.uint32).view(np.float32)
    kind = RANDOM.integers(0, 3, x.shape)
    x = np.where((kind == 1) & ~np.isnan(patterns), patterns, x)
    return np.where(kind == 2, RANDOM.choice(np.array(EXTREMES, np.float32), x.shape), x)


def integers(low: int, high: int, dtype: npt.DTypeLike, width: int = 16, num_blocks: int = 256) -> Array:
    """[num_blocks, width] from low to high, both included and frequent."""
    x = RANDOM.integers(low, high, (num_blocks, width), np.int64, endpoint=True)
    return np.where(RANDOM.random(x.shape) < 0.2, RANDOM.choice([low, high], x.shape), x).astype(dtype)


def ulps(actual: Array, exact: Array) -> float:
    """The largest distance in units of the last place of float32."""
    return float(np.max(np.abs(actual - exact) / np.spacing(np.abs(exact).astype(np.float32))))


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "divide"])
def test_arithmetic(lanes: Lanes, name: str) -> None:
    a, b = floats(), floats()
    with np.errstate(all="ignore"):
        assert_same(lanes(name, a, b), getattr(np, name)(a, b))


def test_larger_and_smaller(lanes: Lanes) -> None:
    a, b = floats(), floats()
    a[0, 0] = np.nan
    assert_same(lanes("f_max", a, b), np.where(a > b, a, b))
    assert_same(lanes("f_min", a, b), np.where(a < b, a, b))


def test_loads_sets_and_absolutes(lanes: Lanes) -> None:
    x = floats()
    assert_same(lanes("f_load", x), x)
    assert_same(lanes("f_abs", x), np.abs(x))
    assert_same(lanes("f_set", x[:, :1]), np.repeat(x[:, :1], 16, axis=1))
    assert_same(lanes("f_zero"), np.zeros((1, 16), np.float32))


def test_rounding_is_to_nearest_even(lanes: Lanes) -> None:
    ties = (integers(-(2**22), 2**22, np.float32) + np.float32(0.5)).astype(np.float32)
    for x in (floats(), ties, np.nextafter(ties, np.float32(0)), RANDOM.uniform(-9, 9, (256, 16)).astype(np.float32)):
        assert_same(lanes("f_round", x), np.rint(x))


def test_fused_or_never_fused(lanes: Lanes) -> None:
    a, b = integers(-(2**24), 2**24, np.float32), integers(-(2**24), 2**24, np.float32)
    c = -np.rint(a.astype(np.float64) * b).astype(np.float32)  # all but cancels: what the fusion keeps is the result
    product = a * b if lanes.tier.name == "portable" else a.astype(np.float64) * b  # exact, as is its sum with c
    assert_same(lanes("f_fma", a, b, c), (product + c).astype(np.float32))


def test_powers_of_two_scale_with_one_rounding(lanes: Lanes) -> None:
    x, n = floats(1024), integers(-150, 127, np.float32, num_blocks=1024)
    with np.errstate(all="ignore"):
        assert_same(lanes("f_scale2", x, n), (x.astype(np.float64) * 2.0 ** n.astype(np.float64)).astype(np.float32))


def test_exp2_is_within_two_ulps(lanes: Lanes) -> None:
    dense, near = RANDOM.uniform(-150, 1, (4096, 16)), RANDOM.uniform(-2, 1, (4096, 16))
    steps = np.arange(-150, 1, 151 / 4096)[:4096].reshape(-1, 16)
    halves = np.repeat(np.arange(-150, 1.5, 0.5), 16).reshape(-1, 16)
    for x in (dense, near, steps, halves, np.nextafter(halves.astype(np.float32), np.float32(-200))):
        single = x.astype(np.float32)
        assert ulps(lanes("f_exp2", single), 2.0 ** single.astype(np.float64)) <= 2
    whole = np.arange(-150, 2, dtype=np.float32)[:, None].repeat(16, axis=1)
    assert_same(lanes("f_exp2", whole), np.exp2(whole.astype(np.float64)).astype(np.float32))
    nothing = np.array([[-np.inf, -LARGEST, -151, -1e4] * 4], np.float32)
    assert_same(lanes("f_exp2", nothing), np.zeros((1, 16), np.float32))


def test_sums_fold_halves(lanes: Lanes) -> None:
    x = RANDOM.normal(size=(512, 16)).astype(np.float32) * 10 ** RANDOM.uniform(-4, 4, (512, 16)).astype(np.float32)
    folded = x
    while folded.shape[1] > 1:
        folded = folded[:, : folded.shape[1] // 2] + folded[:, folded.shape[1] // 2 :]
    assert_same(lanes("f_sum", x, width=1), folded)


def test_the_largest_lane(lanes: Lanes) -> None:
    x = floats()
    x[0] = -np.inf
    assert np.array_equal(lanes("f_hmax", x, width=1), x.max(axis=1, keepdims=True))
    one = np.where(np.eye(16, dtype=bool), np.float32(3), np.float32(-np.inf))
    assert (lanes("f_hmax", one, width=1) == 3).all()


def test_the_first_and_the_last_lanes(lanes: Lanes) -> None:
    counts = np.array([*range(18), 100], np.int32)[:, None]
    x, other = floats(len(counts)), floats(len(counts))[:, :1]
    assert_same(lanes("f_first", x, counts, other), np.where(np.arange(16) < counts, x, other))
    assert_same(lanes("f_from_lane", x, counts, other), np.where(np.arange(16) >= counts, x, other))


def test_integers_as_floats(lanes: Lanes) -> None:
    x = integers(-(2**31), 2**31 - 1, np.int32)
    assert_same(lanes("f_from", x), x.astype(np.float32))
    bits = floats()
    assert_same(lanes("f_bits", bits.view(np.int32)), bits)


def test_all_numbers_of_16_bits_load(lanes: Lanes) -> None:
    every = np.arange(2**16, dtype=np.uint16).reshape(-1, 16)
    assert_same(lanes("f_load_bf16", every), (every.astype(np.uint32) << 16).view(np.float32))
    assert_same(lanes("f_load_f16", every), every.view(np.float16).astype(np.float32))


def bf16(x: Array) -> Array:
    """bf16 numbers as uint16, rounded by torch."""
    rounded: Array = torch.from_numpy(np.ascontiguousarray(x, np.float32)).bfloat16().view(torch.int16).numpy()
    return rounded.view(np.uint16)


def test_bf16_is_rounded_to_nearest_even(lanes: Lanes) -> None:
    ties = ((integers(0, 2**15 - 129, np.uint32) << 16) + 0x8000).view(np.float32)  # up to the largest that is no infinity
    for x in (floats(), ties, -ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))):
        taken = x
        if "avx512_bf16" in lanes.tier.needs:  # its instruction takes denormals for zeros
            taken = np.where(np.abs(x) < SMALLEST, np.copysign(np.float32(0), x), x)
        assert_same(lanes("f_store_bf16", x, dtype=np.uint16), bf16(taken))


def test_int8_is_rounded_to_nearest_even(lanes: Lanes) -> None:
    ties = (np.arange(-127, 127, 0.5)[:496]).astype(np.float32).reshape(-1, 16)
    for x in (RANDOM.uniform(-127, 127, (256, 16)).astype(np.float32), ties, np.full((1, 16), 127, np.float32)):
        assert_same(lanes("f_store_i8", x, dtype=np.int8), np.rint(x).astype(np.int8))
        wide = x * np.float32(258)
        assert_same(lanes("f_store_i16", wide, dtype=np.int16), np.rint(wide).astype(np.int16))


def test_bytes(lanes: Lanes) -> None:
    x = integers(0, 255, np.uint8, 64)
    assert_same(lanes("i_load", x, width=64, dtype=np.uint8), x)
    assert_same(lanes("i_low_nibbles", x, width=64, dtype=np.uint8), x & 15)
    assert_same(lanes("i_high_nibbles", x, width=64, dtype=np.uint8), x >> 4)
    assert_same(lanes("i_broadcast", x[:, :4], width=64, dtype=np.uint8), np.tile(x[:, :4], 16))
    assert_same(lanes("i_zero", width=64, dtype=np.uint8), np.zeros((1, 64), np.uint8))


def test_products_of_bytes_are_exact(lanes: Lanes) -> None:
    acc, u, s = integers(-(2**30), 2**30, np.int32), integers(0, 255, np.uint8, 64), integers(-127, 127, np.int8, 64)
    u[:2], s[0], s[1] = 255, 127, -127  # where 16 bits would saturate
    products = (u.astype(np.int32) * s.astype(np.int32)).reshape(-1, 16, 4)
    assert_same(lanes("dot_u8s8", acc, u, s, dtype=np.int32), acc + products.sum(axis=2, dtype=np.int32))
    signed = ((u.astype(np.int32) - 128) * s).reshape(-1, 16, 4)
    assert_same(lanes("dot_weights", acc, u, s, dtype=np.int32), acc + signed.sum(axis=2, dtype=np.int32))
    x, total = integers(-(2**24), 2**24, np.int32), integers(-(2**22), 2**22, np.int32)
    assert_same(lanes("i_minus_128_times", x, total, dtype=np.int32), x - 128 * total)


def test_products_of_nibbles_are_exact(lanes: Lanes) -> None:
    acc, u, s = integers(-(2**30), 2**30, np.int32), integers(0, 15, np.uint8, 64), integers(-127, 127, np.int8, 64)
    u[:2], s[0], s[1] = 15, 127, -127  # the largest sums
    products = (u.astype(np.int32) * s.astype(np.int32)).reshape(-1, 16, 4)
    assert_same(lanes("dot_nibbles", acc, u, s, dtype=np.int32), acc + 8 * products.sum(axis=2, dtype=np.int32))


def test_products_of_words_are_exact(lanes: Lanes) -> None:
    acc, a, pair = integers(-(2**29), 2**29, np.int32), integers(-127, 127, np.int8, 32), integers(-32767, 32767, np.int16, 2)
    a[:2], pair[0], pair[1] = 127, 32767, -32767  # the largest sums
    products = a.astype(np.int32) * np.tile(pair, 16)
    assert_same(lanes("dot_words", acc, a, pair, dtype=np.int32), acc + products.reshape(-1, 16, 2).sum(axis=2, dtype=np.int32))


def test_what_finds_the_largest_units(lanes: Lanes) -> None:
    a, b = integers(-3, 3, np.float32), integers(-3, 3, np.float32)
    bits = ((a == b).astype(np.uint32) << np.arange(16, dtype=np.uint32)).sum(axis=1, keepdims=True, dtype=np.uint32)
    assert_same(lanes("f_equal_mask", a, b, width=1, dtype=np.uint32), bits)
    x = RANDOM.normal(size=(256, 64)).astype(np.float32)
    assert_same(lanes("f_maxima_of_4", x), np.abs(x).reshape(-1, 16, 4).max(axis=2))


def test_the_first_lanes_are_stored(lanes: Lanes) -> None:
    counts = np.array([*range(18), 100], np.int32)[:, None]
    x = floats(len(counts))
    assert_same(lanes("f_store_first", x, counts), np.where(np.arange(16) < counts, x, np.float32(0)))


def test_products_of_bf16_add_up_even_then_odd(lanes: Lanes) -> None:
    acc, a, b = (RANDOM.normal(size=(512, width)).astype(np.float32) for width in (16, 32, 32))
    a, b = (lanes("f_load_bf16", bf16(x).reshape(-1, 16)).reshape(-1, 32) for x in (a, b))
    actual = lanes("dot_bf16", acc, bf16(a), bf16(b))
    products = a * b  # exact
    expected = (acc + products[:, ::2]) + products[:, 1::2]
    if lanes.tier.name not in BF16_INSTRUCTIONS:
        assert_same(actual, expected)
    size = np.abs(acc) + np.abs(products[:, ::2]) + np.abs(products[:, 1::2])
    assert (np.abs(actual - expected) <= 2.0**-22 * size).all()


def test_int8_as_bf16(lanes: Lanes) -> None:
    x = np.arange(-127, 128).repeat(32).astype(np.int8).reshape(32, -1).T.copy().reshape(-1, 32)
    assert_same(lanes("bf16_from_i8", x, width=32, dtype=np.uint16), bf16(x.astype(np.float32)))


def test_tiers_agree(folder: Path) -> None:
    """Integers in every bit; floats but for the fusing of a multiply-add and the processor's own product of bf16."""
    tiers = [lanes_of(tier, folder) for tier in isa.supported()]
    acc, u, s = integers(-(2**20), 2**20, np.int32), integers(0, 255, np.uint8, 64), integers(-127, 127, np.int8, 64)
    assert_same_everywhere([tier("dot_u8s8", acc, u, s, dtype=np.int32) for tier in tiers])
    x, n = RANDOM.normal(size=(256, 16)).astype(np.float32) * 40, integers(-150, 127, np.float32)
    assert_same_everywhere([tier("f_store_i8", x / 2, dtype=np.int8) for tier in tiers])
    assert_same_everywhere([tier("f_store_i16", x * 100, dtype=np.int16) for tier in tiers])
    assert_same_everywhere([tier("f_store_bf16", x, dtype=np.uint16) for tier in tiers])
    assert_same_everywhere([tier("f_scale2", x, n) for tier in tiers])
    assert_same_everywhere([tier("f_sum", x, width=1) for tier in tiers])
    best, *others = (tier("f_exp2", -np.abs(x)) for tier in tiers)
    assert all(ulps(other, best) <= 2 for other in others)
    best, *others = (tier("f_fma", x, x, x) for tier in tiers)
    assert all((np.abs(other - best) <= 2.0**-23 * (x * x + np.abs(x))).all() for other in others)


def assert_same_everywhere(results: list[Array]) -> None:
    for result in results[1:]:
        assert_same(result, results[0])
