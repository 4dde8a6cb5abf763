"""Weights are those of the packages that define the formats, to the bit, on files that these packages wrote or read.

Packages that are not installed are skipped; transformers' own code (MXFP4, block-scaled fp8) is always compared with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdmesh.engine.loader.quantized.fp8 import dequantize_blocks
from pdmesh.engine.loader.quantized.mxfp4 import dequantize_mxfp4
from pdmesh.engine.loader.safetensors import SafetensorsSource
from tests.support.quantized_checkpoints import FORMATS, bitsandbytes4, bitsandbytes8, scheme, write_quantized
from tests.support.tiny_families import make_tiny_family

STEM = "model.layers.1.mlp.down_proj"
WIDE = "model.layers.1.mlp.up_proj"
"""64 inputs: bitsandbytes 0.50 on a CPU takes a wrong scale where a row is no multiple of the block."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return make_tiny_family(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)


def read_module(folder: Path, stem: str) -> dict[str, Tensor]:
    """The stored tensors of one module by their local names."""
    stored = load_file(folder / "model.safetensors")
    return {name.removeprefix(f"{stem}."): tensor for name, tensor in stored.items() if name.startswith(f"{stem}.")}


def with_module(
    plain: Path, folder: Path, parts: dict[str, Tensor], config: dict[str, Any], stem: str = STEM
) -> SafetensorsSource:
    """A folder in which one module is quantized, in the tensors `parts`."""
    folder.mkdir()
    stored = load_file(plain / "model.safetensors")
    del stored[f"{stem}.weight"]
    parts = {f"{stem}.{name}": part.clone().contiguous() for name, part in parts.items()}
    save_file({**stored, **parts}, folder / "model.safetensors", {"format": "pt"})
    content = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "quantization_config": config}))
    return SafetensorsSource(folder)


@pytest.mark.parametrize("blocks", [(2, 5, 3), (1, 1, 1)])
def test_mxfp4_is_that_of_transformers(blocks: tuple[int, int, int]) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 255, blocks, dtype=torch.uint8, generator=generator)
    expected = mxfp4.convert_moe_packed_tensors(codes, scales, dtype=torch.bfloat16)
    for expert in range(blocks[0]):
        assert torch.equal(dequantize_mxfp4(codes[expert], scales[expert]).t(), expected[expert])


def test_block_scaled_fp8_is_that_of_transformers() -> None:
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).mul_(100).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, generator=generator)
    expected = finegrained.Fp8Dequantize(None)._dequantize_one(weight, scales)
    assert torch.equal(dequantize_blocks(weight, scales, (32, 32)), expected)


@pytest.mark.parametrize("name", sorted(name for name in FORMATS if name.startswith("compressed")))
def test_compressed_tensors_reads_the_same(name: str, llama: Path, tmp_path: Path) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    if "act-order" in name:
        pytest.skip("the package reads no g_idx any more: it stores columns in the order of groups")
    if "early" in name:
        pytest.skip("the package reads packed zero points alone")
    form = FORMATS[name]
    quantized, _ = write_quantized(llama, tmp_path, form)
    for stem in (STEM, "model.layers.0.self_attn.q_proj"):
        config = list(form.config["config_groups"].values())[-1 if "mlp" in stem else 0]
        layout = config.get("format") or form.config["format"]
        compressor = compressors.BaseCompressor.get_value_from_registry(layout)
        expected = compressor.decompress(read_module(quantized, stem), quantization.QuantizationScheme(**config))["weight"]
        actual = SafetensorsSource(quantized).get(f"{stem}.weight")
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("layout", "weights"),
    [
        ("pack-quantized", scheme(4, "group", group_size=32)["weights"]),
        ("pack-quantized", scheme(4, "group", group_size=32, symmetric=False)["weights"]),
        ("pack-quantized", scheme(8, "channel")["weights"]),
        ("int-quantized", scheme(8, "channel")["weights"]),
        ("float-quantized", scheme(8, "channel", is_float=True)["weights"]),
    ],
)
def test_what_compressed_tensors_writes(layout: str, weights: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    weight = load_file(llama / "model.safetensors")[f"{STEM}.weight"].bfloat16()
    groups = weight.shape[1] // 32 if weights["strategy"] == "group" else 1
    low, high = weight.view(len(weight), groups, -1).amin(2), weight.view(len(weight), groups, -1).amax(2)
    top = 448 if weights["type"] == "float" else 2 ** weights["num_bits"] - 1
    scales = (high - low) / top if weights["type"] == "int" else torch.maximum(high, -low) / top
    state = {"weight": weight, "weight_scale": scales.bfloat16()}
    if not weights["symmetric"]:
        state["weight_zero_point"] = (-low / scales).round().clamp(0, 15).to(torch.int8) - 8
    config = {**scheme(8, "channel"), "weights": weights}
    settings = quantization.QuantizationScheme(**config)
    compressor = compressors.BaseCompressor.get_value_from_registry(layout)
    stored = compressor.compress(state, settings)
    whole = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": config}, "ignore": ["lm_head"]}
    source = with_module(llama, tmp_path / "quantized", stored, whole)
    expected = compressor.decompress(stored, settings)["weight"]
    assert torch.equal(source.get(f"{STEM}.weight"), expected)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bitsandbytes_in_4_bits(kind: str, nested: bool, dtype: torch.dtype, llama: Path, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = load_file(llama / "model.safetensors")[f"{WIDE}.weight"].to(dtype)
    codes, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=kind)
    parts = {"weight": codes, **{f"weight.{name.removeprefix('weight.')}": t for name, t in state.as_dict(packed=True).items()}}
    source = with_module(llama, tmp_path / "quantized", parts, bitsandbytes4(kind, nested=nested).config, WIDE)
    actual = source.get(f"{WIDE}.weight")
    assert actual.dtype == dtype
    assert torch.equal(actual, functional.dequantize_4bit(codes, state))


def test_bitsandbytes_in_8_bits(llama: Path, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = load_file(llama / "model.safetensors")[f"{STEM}.weight"].half()
    values, scb, _ = functional.int8_vectorwise_quant(weight)
    source = with_module(llama, tmp_path / "quantized", {"weight": values, "SCB": scb}, bitsandbytes8().config)
    expected = functional.int8_vectorwise_dequant(values, scb)
    assert torch.equal(source.get(f"{STEM}.weight"), expected)
    exact = source.get_int8(f"{STEM}.weight")
    assert exact is not None
    torch.testing.assert_close(exact.values * exact.scales[:, None], expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("name", ["awq g32", "awq by output"])
def test_awq_is_that_of_autoawq(name: str, llama: Path, tmp_path: Path) -> None:
    packing = pytest.importorskip("awq.utils.packing_utils", exc_type=ImportError)
    quantized, _ = write_quantized(llama, tmp_path, FORMATS[name])
    parts, width = read_module(quantized, STEM), 96
    group = FORMATS[name].config["group_size"]
    expected = packing.dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"], 4, width if group == -1 else group)
    assert torch.equal(SafetensorsSource(quantized).get(f"{STEM}.weight"), expected.t())


@pytest.mark.parametrize(
    "name", sorted(name for name in FORMATS if name.startswith("gptq") and "v2" not in name and "3 bits" not in name)
)
def test_gptq_is_that_of_autogptq(name: str, llama: Path, tmp_path: Path) -> None:
    """Its product with the identity is the weight."""
    package = pytest.importorskip("auto_gptq.nn_modules.qlinear.qlinear_cuda", exc_type=ImportError)
    quantized, _ = write_quantized(llama, tmp_path, FORMATS[name])
    parts, config = read_module(quantized, STEM), FORMATS[name].config
    linear = package.QuantLinear(config["bits"], config["group_size"], 96, 64, bias=False, kernel_switch_threshold=0)
    linear.load_state_dict({key: parts[key] for key in ("qweight", "qzeros", "scales", "g_idx") if key in parts}, strict=False)
    expected = linear(torch.eye(96).half()).t()
    assert torch.equal(SafetensorsSource(quantized).get(f"{STEM}.weight"), expected)
