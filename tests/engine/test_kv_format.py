"""Forms of KV blocks: as the backends write them, and into each other."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtransfer.conversion import FP8, KVFormat, Numbers
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams
from tests.engine.backends import needs_native
from tests.support.mock_engine import hash_block
from tests.support.tiny_models import make_tiny_model

HEADS, DIM = 2, 16
PROMPT = tuple(5 + (7 * i) % 200 for i in range(77))
FORMATS = [
    KVFormat(arrangement, dtype, size, 3, 32)
    for arrangement, dtype, size in product(("plain", "panels"), ("float32", "bfloat16", "int8"), (16, 48))
] + [KVFormat("plain", dtype, size, 3, 32) for dtype, size in product(("float16", FP8), (5, 48))]


def numbers(dtype: str, num_tokens: int, num_heads: int = 3, dim: int = 32) -> Numbers:
    draw = np.random.default_rng(3).standard_normal((num_tokens, num_heads, dim)).astype(np.float32)
    return Numbers("float32", draw).converted(dtype)


def same(a: Numbers, b: Numbers) -> bool:
    scales = a.scales is b.scales is None or (
        a.scales is not None and b.scales is not None and np.array_equal(a.scales, b.scales)
    )
    return a.dtype == b.dtype and np.array_equal(a.values, b.values) and scales


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("is_value", [False, True])
def test_packing_loses_nothing(form: KVFormat, is_value: bool) -> None:
    before = numbers(form.dtype, 3 * form.block_size)
    blocks = form.pack(before, is_value=is_value)
    assert blocks.shape == (3, form.num_bytes)
    assert same(form.unpack(blocks, is_value=is_value), before)


def kv_of(folder: Path, block_size: int, **settings: str) -> tuple[KVFormat, list[list[Numbers]]]:
    """Keys and values [layer][kv] of the prompt as an engine computes them."""
    model = folder if (folder / "config.json").exists() else make_tiny_model(folder, head_dim=DIM)
    given = {"num_blocks": 12, "block_size": block_size, "num_threads": 1, "speculation": "none", **settings}
    config = EngineConfig(str(model), **given)  # type: ignore[arg-type]
    engine = Engine(config, hash_block=hash_block)
    engine.add(EngineRequest("p", PROMPT, SamplingParams(temperature=0.0, max_tokens=2), prefill_only=True))
    engine.step()
    dtype = str(engine.kv.shape.dtype).removeprefix("torch.")
    form = KVFormat(engine.kv_arrangement, dtype, block_size, HEADS, DIM)
    assert form.num_bytes == engine.kv.bytes_per_layer_block
    raw = engine.kv.tensor.view(torch.uint8).numpy().reshape(engine.kv.num_layers, 2, 12, -1)
    ids = list(engine.held_blocks("p"))
    found = [[form.unpack(raw[layer, kv, ids], is_value=bool(kv)).tokens(0, 77) for kv in (0, 1)] for layer in range(2)]
    engine.kv.close()
    return form, found


def tensor(numbers: Numbers) -> torch.Tensor:
    return torch.from_numpy(numbers.values)


@needs_native
def test_panels_are_what_the_kernels_write(tmp_path: Path) -> None:
    (_, plain), (form, panels) = (kv_of(tmp_path, 16, dtype="float32", backend=backend) for backend in ("torch", "native"))
    assert form.arrangement == "panels"
    for layer, kv in product(range(2), range(2)):
        torch.testing.assert_close(tensor(panels[layer][kv]), tensor(plain[layer][kv]), rtol=1e-3, atol=1e-4)


@needs_native
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_block_sizes_hold_the_same_numbers(tmp_path: Path, kv_dtype: str) -> None:
    (_, small), (_, large) = (kv_of(tmp_path, size, kv_dtype=kv_dtype) for size in (16, 48))
    for layer, kv in product(range(2), range(2)):
        assert same(small[layer][kv], large[layer][kv])


@needs_native
def test_int8_is_rounded_as_the_kernels_round(tmp_path: Path) -> None:
    (_, wide), (_, narrow) = (kv_of(tmp_path, 16, dtype="float32", kv_dtype=dtype) for dtype in ("float32", "int8"))
    for kv in (0, 1):  # of the first layer: later ones have attended to rounded keys
        assert same(wide[0][kv].converted("int8"), narrow[0][kv])
        (_, half), rounded = kv_of(tmp_path, 16, dtype="float32", kv_dtype="bfloat16"), wide[0][kv].converted("bfloat16")
        assert same(half[0][kv], rounded)


def test_what_cannot_be_converted_is_named() -> None:
    form = FORMATS[0]
    assert form.why_not_to(KVFormat("panels", "int8", 16, 1, 32)) == "arrangement"
    assert form.why_not_to(KVFormat("plain", "float8_e5m2", 16, 3, 32)) == "dtype"
    assert form.why_not_to(KVFormat("plain", "float8_e4m3fn", 16, 3, 32)) is None
    assert form.why_not_to(KVFormat("plain", "float32", 16, 3, 64)) == "head_dim"
    assert form.why_not_to(KVFormat("plain", "int8", 64, 1, 32)) is None
    with pytest.raises(ValueError, match="groups of 16 tokens"):
        KVFormat("panels", "int8", 24, 3, 32)


def test_zeros_stay_zero_in_int8() -> None:
    zeros = Numbers("float32", np.zeros((2, 3, 32), np.float32)).converted("int8")
    assert not zeros.values.any()
    assert zeros.scales is not None
    assert not zeros.scales.any()


def test_codes_of_fp8_are_torchs() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 4, 32)
    floats = Numbers(FP8, codes).converted("float32", 0.5)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float() * 0.5
    assert np.array_equal(floats.values, expected.numpy(), equal_nan=True)
    again = floats.converted(FP8, 0.5).values
    assert np.array_equal(again[codes & 0x7F < 0x7F], codes[codes & 0x7F < 0x7F])
    assert set(again[codes & 0x7F == 0x7F].tolist()) <= {0x7F, 0xFF}


def test_fp8_is_rounded_as_torch_rounds_and_holds_no_more_than_448() -> None:
    """All codes, what lies between them, ties among it, and far beyond."""
    magnitudes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (magnitudes[1:] + magnitudes[:-1]) / 2
    near = torch.cat([ties, torch.nextafter(ties, torch.zeros(1)), torch.nextafter(ties, torch.full((1,), 999.0)), magnitudes])
    draw = torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-5, 3, 20_000)
    both = torch.cat([near, -near, draw.clamp(-448, 448)])
    rounded = Numbers("float32", both.numpy().reshape(-1, 1, 1)).converted(FP8)
    assert np.array_equal(rounded.values.reshape(-1), both.to(torch.float8_e4m3fn).view(torch.uint8).numpy())
    beyond = np.array([449.0, 1e30, np.inf, -np.inf, -1e9], np.float32).reshape(-1, 1, 1)
    largest = Numbers("float32", beyond).converted(FP8, 0.25).converted("float32", 0.25)
    assert largest.values.reshape(-1).tolist() == [112.0, 112.0, 112.0, -112.0, -112.0]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_fp8_comes_back_exactly_from_wider_types(dtype: str) -> None:
    before = numbers("float32", 16).converted(FP8, 0.5)
    assert same(before.converted(dtype, 0.5).converted(FP8, 0.5), before)
    beyond = Numbers("float32", np.full((1, 1, 2), 1e30, np.float32)).converted("float16").values
    assert np.isfinite(beyond).all()
