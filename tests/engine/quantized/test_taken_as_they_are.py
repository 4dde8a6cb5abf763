"""Codes on a grid that a kernel has are taken from the file; others are dequantized, and the log says what happened."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdmesh.engine.loader.quantize import dequantize_int4, dequantize_int8
from pdmesh.engine.loader.safetensors import SafetensorsSource
from tests.engine.backends import needs_native
from tests.engine.paged_loop import PagedLoop, load
from tests.engine.test_model_transformers import prompt
from tests.support.quantized_checkpoints import FORMATS, gptq, quantized, write_quantized
from tests.support.tiny_families import make_tiny_family

pytest.importorskip("transformers")

DOWN, QUERY = "model.layers.0.mlp.down_proj.weight", "model.layers.3.self_attn.q_proj.weight"
INT4 = [
    "gptq 4 bits g32", "gptq 4 bits g32, no g_idx", "gptq 4 bits g32, asymmetric", "gptq 4 bits g32, asymmetric v2",
    "gptq 4 bits by output", "gptq 2 bits g32", "gptq 3 bits g32", "gptq, quantize_config.json", "awq g32", "awq by output",
    "compressed w4a16 g32", "compressed w4a16, asymmetric", "compressed int4 in bytes",
    "compressed w4a16, asymmetric, early",
]  # fmt: skip
INT8 = [
    "compressed int8 by tensor",
    "gptq 8 bits by output",
    "compressed int8 by output",
    "compressed w8a8",
    "compressed w8a16 packed",
    "bitsandbytes int8",
]
BOTH = {"gptq 4 bits by output", "awq by output"}
"""Codes of 4 bits with one scale for a row are codes of 8 bits as well."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_family(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("name", INT4)
def test_4_bits(name: str, llama: Path, tmp_path: Path) -> None:
    source = SafetensorsSource(write_quantized(llama, tmp_path, FORMATS[name])[0])
    for tensor in (DOWN, QUERY):
        dense, weight = source.get(tensor), source.get_int4(tensor, 32)
        assert weight is not None
        assert (weight.group, weight.values.shape) == (32, dense.shape)
        # Two roundings of 16 bits apart: that of the package's weight, and that of the minimum, 1/128 of a step.
        step = weight.scales.float().abs().repeat_interleave(32, 1)
        rounding = dense.float().abs() * torch.finfo(dense.dtype).eps
        assert ((dequantize_int4(weight) - dense.float()).abs() <= rounding + step / 128).all()


@pytest.mark.parametrize("name", [*INT8, *sorted(BOTH)])
def test_8_bits(name: str, llama: Path, tmp_path: Path) -> None:
    source = SafetensorsSource(write_quantized(llama, tmp_path, FORMATS[name])[0])
    for tensor in (DOWN, QUERY):
        dense, weight = source.get(tensor), source.get_int8(tensor)
        assert weight is not None
        close = 2 * torch.finfo(dense.dtype).eps
        torch.testing.assert_close(dequantize_int8(weight), dense.float(), rtol=close, atol=0)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_no_kernel_has_is_dequantized(name: str, llama: Path, tmp_path: Path) -> None:
    source = SafetensorsSource(write_quantized(llama, tmp_path, FORMATS[name])[0])
    tensor = DOWN
    is_int4 = name in INT4 or name == "compressed, two groups"
    assert (source.get_int4(tensor, 32) is not None) == is_int4
    assert (source.get_int8(tensor) is not None) == (name in INT8 or name in BOTH)
    assert source.get_int4("model.norm.weight", 32) is None
    assert source.get_int8("lm_head.weight") is None


def test_codes_are_those_of_the_file_whatever_the_groups(llama: Path, tmp_path: Path) -> None:
    """A group of 32 within one of 96 has its scale."""
    weight = load_file(llama / "model.safetensors")[DOWN]
    codes, scales, zeros, _ = quantized(weight, 4, 0, symmetric=False, dtype=torch.float16)
    source = SafetensorsSource(write_quantized(llama, tmp_path, gptq(4, 0, symmetric=False))[0])
    exact = source.get_int4(DOWN, 32)
    assert exact is not None
    assert torch.equal(exact.values, codes.to(torch.uint8))
    assert torch.equal(exact.scales, scales.expand(-1, 3))
    assert torch.equal(exact.minimums, (-zeros * scales.float()).half().expand(-1, 3))
    assert source.get_int4(DOWN, 64) is None  # 96 inputs


def test_parts_of_fused_maps_are_taken_too(tmp_path: Path) -> None:
    plain = make_tiny_family(tmp_path / "plain", "gpt_neox")
    folder, _ = write_quantized(plain, tmp_path, FORMATS["gptq 4 bits g32"])
    source = SafetensorsSource(folder)
    for name in ("q_proj", "k_proj", "v_proj"):
        tensor = f"model.layers.0.self_attn.{name}.weight"
        exact = source.get_int4(tensor, 32)
        assert exact is not None
        assert torch.equal(dequantize_int4(exact).half(), source.get(tensor))


@needs_native
@pytest.mark.parametrize(
    ("name", "mode", "said"),
    [
        ("gptq 4 bits g32", "int4g32", "weights are GPTQ, 4 bits in groups of 32: 28 taken as they are, as int4;"),
        ("gptq 4 bits g32, act-order", "int8", "groups of 32: 28 dequantized to int8, rounded a second time;"),
        ("compressed int8 by output", "int8", "weights are compressed-tensors int8 by channel: 28 taken as they are, as int8;"),
        ("compressed w8a8", "int8", "as int8; activations are computed unquantized"),
        ("awq g32", "int4g32", "weights are AWQ, 4 bits in groups of 32: 28 taken as they are, as int4;"),
        ("bitsandbytes nf4, double", "int8", "weights are bitsandbytes nf4: 28 dequantized to int8, rounded a second time;"),
    ],
)
def test_the_cpu_kernels_compute_with_them(
    name: str, mode: str, said: str, llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, dense = write_quantized(llama, tmp_path, FORMATS[name])
    with caplog.at_level(logging.INFO):
        loaded = load(folder)
    assert loaded.numeric_mode.startswith(f"{mode}-native") or loaded.numeric_mode.startswith(f"{mode}+")
    assert said in caplog.text
    assert "GB here" in caplog.text
    logits = PagedLoop(loaded).logits(prompt(40))
    expected = PagedLoop(load(dense, backend="torch", dtype="float32")).logits(prompt(40))
    assert (logits - expected).norm() / expected.norm() < 0.08  # bfloat16, and activations in int8


@needs_native
def test_a_value_of_minus_128_is_no_overflow(llama: Path, tmp_path: Path) -> None:
    folder, dense = write_quantized(llama, tmp_path, FORMATS["compressed int8 by output"])
    stored = load_file(folder / "model.safetensors")
    plain = load_file(dense / "model.safetensors")
    for name in [name for name in stored if stored[name].dtype == torch.int8]:
        stored[name] = torch.where(stored[name] < 0, torch.tensor(-128, dtype=torch.int8), stored[name])
        plain[name] = stored[name].float() * stored[f"{name}_scale"].float()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    save_file(plain, dense / "model.safetensors", {"format": "pt"})
    logits = PagedLoop(load(folder, dtype="float32", quantization="int8")).logits(prompt(40))
    expected = PagedLoop(load(dense, backend="torch", dtype="float32")).logits(prompt(40))
    assert (logits - expected).norm() / expected.norm() < 0.05


def test_a_torch_worker_says_that_it_dequantizes(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = write_quantized(llama, tmp_path, FORMATS["fp8 in blocks"])
    with caplog.at_level(logging.INFO):
        load(folder, backend="torch", dtype="bfloat16")
    assert "weights are DeepSeek's fp8 in blocks of 32 x 32: 28 dequantized to bfloat16; activations are computed" in caplog.text


@needs_native
def test_larger_groups_take_fewer_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = make_tiny_family(tmp_path / "plain", "llama", hidden_size=128, intermediate_size=128)
    folder, _ = write_quantized(plain, tmp_path, gptq(4, 64))
    with caplog.at_level(logging.INFO):
        load(folder)
        assert "28 taken as they are, as int4 (give quantization_group=64 for fewer bytes)" in caplog.text
        caplog.clear()
        load(folder, quantization_group=64)
    assert "28 taken as they are, as int4;" in caplog.text
