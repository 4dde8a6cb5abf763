"""What cannot be read is refused by name, from config.json and headers alone; what lies about itself is refused too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdmesh.engine.loader.headers import check_model
from pdmesh.engine.loader.quantized.registry import weight_format
from pdmesh.engine.loader.safetensors import SafetensorsSource, StoredTensors
from pdmesh.engine.models.reader import UnsupportedModel
from tests.engine.paged_loop import load
from tests.support.quantized_checkpoints import FORMATS, scheme, write_mxfp4, write_quantized
from tests.support.tiny_families import make_tiny_family
from tests.support.tiny_models import make_tiny_model

pytest.importorskip("transformers")

UP = "model.layers.0.mlp.up_proj"
GPTQ, AWQ = FORMATS["gptq 4 bits g32"].config, FORMATS["awq g32"].config
PACKED, FLOAT = FORMATS["compressed w4a16 g32"].config, FORMATS["compressed fp8 by output"].config
BLOCKS, NF4 = FORMATS["fp8 in blocks"].config, FORMATS["bitsandbytes nf4"].config


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_family(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)


def group(**changes: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {**scheme(4, "group", group_size=32), **changes}}}


def weights(*, is_float: bool = False, **changes: Any) -> dict[str, Any]:
    own = scheme(8, "channel", is_float=True) if is_float else scheme(4, "group", group_size=32)
    return {"config_groups": {"group_0": {**own, "weights": {**own["weights"], **changes}}}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quant_method": "hqq"},
            "quantization_config: quant_method 'hqq' is not supported; give plain weights, a GGUF, or one of",
        ),
        ({"quant_method": "aqlm"}, "'aqlm' is not supported"),
        ({"quant_method": "quark"}, "'quark' is not supported"),
        ({"bits": 4}, "quant_method 'None' is not supported"),
        (7, "quantization_config is 7, not a mapping"),
        ({**GPTQ, "bits": 5}, "quantization_config.bits 5 is not supported"),
        ({**GPTQ, "group_size": 0}, "quantization_config.group_size 0.0 is not supported"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "quantization_config.checkpoint_format 'marlin' is not supported"),
        ({**GPTQ, "dynamic": {r"+:.*\.up_proj": {"bits": 8}}}, r"quantization_config.dynamic: \+:.*: modules with other bits"),
        ({**GPTQ, "pack_dtype": "int16"}, "quantization_config.pack_dtype 'int16' is not supported"),
        ({**GPTQ, "new_layout": 1}, "quantization_config.new_layout: not read for quant_method 'gptq'"),
        ({**AWQ, "version": "gemv"}, "quantization_config.version 'gemv' is not supported; this engine reads AWQ's gemm layout"),
        ({**AWQ, "zero_point": False}, "quantization_config.zero_point False is not supported"),
        ({**AWQ, "bits": 8}, "quantization_config.bits 8 is not supported"),
        ({**BLOCKS, "weight_block_size": [128]}, r"weight_block_size \[128\] is not supported; give \[rows, columns\]"),
        ({**BLOCKS, "fmt": "e5m2"}, "quantization_config.fmt 'e5m2' is not supported"),
        ({**BLOCKS, "expert_dtype": "fp4"}, "quantization_config.expert_dtype 'fp4' is not supported"),
        ({**NF4, "bnb_4bit_quant_type": "af4"}, "bnb_4bit_quant_type 'af4' is not supported"),
        ({**NF4, "load_in_8bit": True}, "bitsandbytes has either 4 or 8 bits"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            "quant_algo 'NVFP4' of ModelOpt is not supported; this engine reads FP8",
        ),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "W4A8_AWQ"}},
            "quantization.quant_algo 'W4A8_AWQ' of ModelOpt",
        ),
        ({"quant_method": "mxfp4", "swizzled": True}, "quantization_config.swizzled: not read"),
        ({**PACKED, "format": "marlin-24"}, "group_0.format 'marlin-24' is not supported"),
        ({**PACKED, "format": "nvfp4-pack-quantized"}, "group_0.format 'nvfp4-pack-quantized' is not supported"),
        (
            {**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format 'sparse-24-bitmask' is not supported",
        ),
        ({**PACKED, "transform_config": {"config_groups": {"R1": {}}}}, "transform_config: weights that were rotated"),
        ({**PACKED, "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "kv_cache_scheme.type 'int' is not supported"),
        ({**PACKED, "config_groups": {}}, "config_groups is empty"),
        (
            {**PACKED, **group(targets=["LlamaAttention"])},
            "group_0.targets LlamaAttention: give Linear, names of modules, or patterns",
        ),
        ({**PACKED, **weights(num_bits=3)}, "pack-quantized with 3 bits of type int is not supported"),
        ({**PACKED, **weights(strategy="tensor_group")}, "weights.strategy 'tensor_group' is not supported"),
        ({**PACKED, **weights(dynamic=True)}, "weights.dynamic True is not supported"),
        ({**PACKED, **weights(group_size=None)}, "weights.group_size: strategy group needs it"),
        ({**PACKED, **weights(strategy="block")}, "blocks of integers are not supported"),
        ({**FLOAT, **weights(is_float=True, symmetric=False)}, "fp8 with zero points is not supported"),
        ({**FLOAT, **weights(is_float=True, num_bits=4)}, "float-quantized with 4 bits of type float is not supported"),
        ({**FLOAT, **weights(is_float=True, strategy="block", block_structure="x")}, r"block_structure \[\] is not supported"),
        ({**FLOAT, **weights(is_float=True, strategy="group")}, "fp8 in groups is not supported"),
    ],
)
def test_settings_are_refused_by_key(settings: object, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        weight_format({"quantization_config": settings})


def test_weights_that_only_have_scales_of_kv_are_plain() -> None:
    kv = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    assert weight_format({"quantization_config": {**PACKED, "config_groups": {}, "kv_cache_scheme": kv}}) is None
    assert weight_format({"quantization_config": {"quant_method": "modelopt", "quant_algo": None}}) is None
    assert weight_format({"quantization_config": {}}) is None
    assert weight_format({}) is None


def changed(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def to(name: str, dtype: torch.dtype) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


def cut(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()})


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({"model.layers.0.other": tensors.pop(name)})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq 4 bits g32", to(f"{UP}.qweight", torch.int64), r"up_proj\.qweight: stored as I64; GPTQ"),
        ("gptq 4 bits g32", to(f"{UP}.scales", torch.int32), r"up_proj\.scales: stored as I32; GPTQ, 4 bits in groups of 32 has"),
        ("gptq 4 bits g32", without(f"{UP}.qzeros"), r"no tensor '.*up_proj\.qzeros', which GPTQ.* needs"),
        ("gptq 4 bits g32", cut(f"{UP}.scales"), r"up_proj\.scales: shape \(1, 96\) in the checkpoint, \(2, 96\) by"),
        ("gptq 4 bits g32", cut(f"{UP}.g_idx"), r"up_proj\.g_idx: shape \(63,\) in the checkpoint, \(64,\) or \(0,\) by"),
        ("awq g32", cut(f"{UP}.qzeros"), r"up_proj\.qzeros: shape \(1, 12\) in the checkpoint, \(2, 12\) by"),
        ("compressed w4a16 g32", cut(f"{UP}.weight_scale"), r"up_proj\.weight_scale: shape \(95, 2\) in the .* \(96, 2\)"),
        ("compressed w4a16, asymmetric", without(f"{UP}.weight_zero_point"), r"no tensor '.*up_proj\.weight_zero_point'"),
        ("compressed w4a16, act-order", without(f"{UP}.weight_g_idx"), r"no tensor '.*up_proj\.weight_g_idx'"),
        ("compressed int8 by output", to(f"{UP}.weight", torch.uint8), r"up_proj\.weight: stored as U8; .* has I8 there"),
        ("compressed fp8 by output", to(f"{UP}.weight", torch.float8_e5m2), r"up_proj\.weight: stored as F8_E5M2"),
        ("compressed fp8 in blocks", cut(f"{UP}.weight_scale"), r"up_proj\.weight_scale: shape \(2, 2\) in the .* \(3, 2\)"),
        ("fp8 in blocks", without(f"{UP}.weight_scale_inv"), r"no tensor '.*up_proj\.weight_scale_inv', which DeepSeek's fp8"),
        ("fp8 in blocks", cut(f"{UP}.weight_scale_inv"), r"weight_scale_inv: shape \(2, 2\) in the checkpoint, \(3, 2\)"),
        ("fp8 by tensor", to(f"{UP}.weight", torch.float8_e5m2), r"up_proj\.weight is stored as F8_E5M2, and per-tensor fp8"),
        ("fp8 by tensor", to(f"{UP}.weight", torch.int8), r"up_proj\.weight is stored as I8, and per-tensor fp8"),
        ("bitsandbytes nf4", without(f"{UP}.weight.absmax"), r"no tensor '.*up_proj\.weight\.absmax'"),
        ("bitsandbytes nf4, double", without(f"{UP}.weight.nested_absmax"), r"no tensor '.*nested_absmax', which absmax"),
        ("bitsandbytes nf4", without(f"{UP}.weight.quant_state.bitsandbytes__nf4"), r"up_proj\.weight is stored as U8, and bits"),
        ("bitsandbytes int8", cut(f"{UP}.SCB"), r"up_proj\.SCB: shape \(95,\) in the checkpoint, \(96,\) by"),
    ],
)  # fmt: skip
def test_stored_tensors_are_what_the_format_says(
    name: str,
    change: Callable[[dict[str, Tensor]], None],
    message: str,
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = changed(write_quantized(llama, tmp_path, FORMATS[name])[0], change)
    monkeypatch.setattr(StoredTensors, "tensor", None)  # nothing is read yet
    with pytest.raises(ValueError, match=f"{folder}: .*{message}"):
        SafetensorsSource(folder)


def test_a_module_that_no_group_targets_is_refused(llama: Path, tmp_path: Path) -> None:
    folder, _ = write_quantized(llama, tmp_path, FORMATS["compressed int8 by output"])
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"]["ignore"] = ["re:.*up_proj"]
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.0\.mlp\.up_proj: its weight is quantized, and no config group"):
        SafetensorsSource(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
@pytest.mark.parametrize("name", [UP, "lm_head", "model.embed_tokens"])
def test_words_are_no_weights(dtype: torch.dtype, name: str, llama: Path, tmp_path: Path) -> None:
    """Plain names, a dtype of codes, and nothing that says what they stand for: not even with a scale beside."""
    folder, _ = write_quantized(llama, tmp_path, FORMATS["compressed int8 by output"])
    tensors = load_file(llama / "model.safetensors")
    tensors |= {f"{name}.weight": tensors[f"{name}.weight"].to(dtype), f"{name}.weight_scale": torch.tensor(1.0)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_bytes((llama / "config.json").read_bytes())
    with pytest.raises(
        UnsupportedModel, match=rf"{name}\.weight is stored as (I8|U8|F8_\w+), but config.json has no quantization_"
    ):
        SafetensorsSource(folder)


@pytest.mark.parametrize("name", ["gptq 4 bits g32", "compressed w4a16 g32", "bitsandbytes nf4"])
def test_parts_of_a_format_need_its_settings(name: str, llama: Path, tmp_path: Path) -> None:
    folder, _ = write_quantized(llama, tmp_path, FORMATS[name])
    (folder / "config.json").write_bytes((llama / "config.json").read_bytes())
    with pytest.raises(UnsupportedModel, match=r"but config.json has no quantization_config"):
        SafetensorsSource(folder)


def test_mxfp4_shapes_are_checked(tmp_path: Path) -> None:
    folder, _ = write_mxfp4(make_tiny_family(tmp_path / "plain", "gpt_oss", num_hidden_layers=2), tmp_path)
    changed(folder, cut("model.layers.1.mlp.experts.down_proj_scales"))
    with pytest.raises(ValueError, match=r"down_proj_scales: shape \(5, 64, 3\) in the checkpoint, \(6, 64, 3\) by"):
        SafetensorsSource(folder)


def test_damaged_numbers_are_named(llama: Path, tmp_path: Path) -> None:
    folder, _ = write_quantized(llama, tmp_path / "1", FORMATS["gptq 4 bits g32"])
    changed(folder, lambda tensors: tensors[f"{UP}.g_idx"].fill_(9))
    with pytest.raises(ValueError, match=r"up_proj\.g_idx: groups from 9 to 9, and there are 2; it is damaged"):
        SafetensorsSource(folder).get(f"{UP}.weight")
    folder, _ = write_quantized(llama, tmp_path / "3", FORMATS["compressed int4 in bytes"])
    changed(folder, lambda tensors: tensors[f"{UP}.weight"].fill_(9))
    with pytest.raises(ValueError, match=r"up_proj\.weight: values from 9 to 9 have more than 4 bits"):
        SafetensorsSource(folder).get(f"{UP}.weight")
    folder, _ = write_quantized(llama, tmp_path / "4", FORMATS["compressed int8 by output"])
    changed(folder, lambda tensors: tensors.update({f"{UP}.weight_zero_point": torch.ones(96, 1, dtype=torch.int8)}))
    with pytest.raises(ValueError, match=r"up_proj\.weight_zero_point: it is not 0, and quantization_config says"):
        SafetensorsSource(folder).get(f"{UP}.weight")
    folder, _ = write_quantized(llama, tmp_path / "2", FORMATS["bitsandbytes nf4"])
    changed(folder, lambda tensors: tensors[f"{UP}.weight.quant_state.bitsandbytes__nf4"].fill_(65))
    with pytest.raises(ValueError, match=r"quant_state\.bitsandbytes__nf4: it is no state of a 4-bit weight"):
        SafetensorsSource(folder).get(f"{UP}.weight")


def test_side_files_are_named_when_damaged(llama: Path, tmp_path: Path) -> None:
    folder, _ = write_quantized(llama, tmp_path, FORMATS["modelopt fp8"])
    (folder / "hf_quant_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"hf_quant_config\.json: it holds no JSON object"):
        SafetensorsSource(folder)


# Tensors that nothing uses


def test_extra_tensors_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_tiny_model(tmp_path)
    changed(folder, lambda tensors: tensors.update({f"vision.{number}.weight": torch.ones(2) for number in range(7)}))
    load(folder)
    said = [record.getMessage() for record in caplog.records if "vision.0.weight" in record.getMessage()]
    names = ", ".join(f"vision.{number}.weight" for number in range(5))
    assert said == [f"{folder}: tensors that nothing uses: {names} and 2 more"]


def test_a_bias_of_zeros_beside_a_quantized_weight_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = make_tiny_family(tmp_path / "plain", "qwen3", num_hidden_layers=2)
    folder, _ = write_quantized(plain, tmp_path, FORMATS["gptq 4 bits g32"])
    changed(folder, lambda tensors: tensors.update({f"{UP}.bias": torch.zeros(96)}))
    load(folder)
    assert "nothing uses" not in caplog.text
    changed(folder, lambda tensors: tensors[f"{UP}.bias"].fill_(1))
    load(folder)
    assert f"tensors that nothing uses: {UP}.bias" in caplog.text


def test_overrides_reach_the_keys_that_say_how_weights_are_stored(llama: Path, tmp_path: Path) -> None:
    folder, _ = write_quantized(llama, tmp_path, FORMATS["gptq 4 bits g32"])
    with pytest.raises(ValueError, match=r"scales: shape \(3, 64\) in the checkpoint, \(2, 64\) by its quantization_config"):
        SafetensorsSource(folder, ["quantization_config.group_size=64"])
    with pytest.raises(UnsupportedModel, match=r"qweight: a .*quantized weight, but config.json has no"):
        SafetensorsSource(folder, ["quantization_config=null"])


LAYOUTS = ("gptq 3 bits g32", "awq g32", "compressed w4a16 g32", "compressed int8 by output", "fp8 in blocks", "bitsandbytes nf4")


@pytest.mark.parametrize("name", LAYOUTS)
def test_headers_show_that_config_and_weights_are_of_two_models(name: str, llama: Path, tmp_path: Path) -> None:
    folder, _ = write_quantized(llama, tmp_path, FORMATS[name])
    check_model(folder)
    with pytest.raises(ValueError, match=r"no tensor 'model.layers.2.*the checkpoint is incomplete"):
        check_model(folder, ["num_hidden_layers=3"])
    with pytest.raises(ValueError, match=r"down_proj.weight: shape \(64, 96\) in the checkpoint, \(64, 128\) by its config"):
        check_model(folder, ["intermediate_size=128"])


def test_headers_show_the_shape_of_experts_in_mxfp4(tmp_path: Path) -> None:
    folder, _ = write_mxfp4(make_tiny_family(tmp_path / "plain", "gpt_oss"), tmp_path)
    check_model(folder)
    down = "model.layers.1.mlp.experts.down_proj"

    def narrow(tensors: dict[str, Tensor]) -> None:
        for part in (f"{down}_blocks", f"{down}_scales"):
            tensors[part] = tensors[part][:, :, :-1].contiguous()

    with pytest.raises(ValueError, match=r"experts.0.down_proj.weight: shape \(64, 64\) in the checkpoint, \(64, 96\) by"):
        check_model(changed(folder, narrow))
