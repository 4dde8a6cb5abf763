"""Folders that are not an adapter of the model, or need what is not computed: refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.loader.safetensors import read_config
from pdmesh.engine.lora.adapter import Site
from pdmesh.engine.lora.config import lora_config
from pdmesh.engine.lora.folder import load_adapter
from tests.engine.test_model_transformers import reference
from tests.support.adapters import changed, make_adapter
from tests.support.tiny_families import make_tiny_family
from tests.support.tiny_models import make_tiny_model

transformers = pytest.importorskip("transformers")
LAYER = "base_model.model.model.layers.0"
Q_A, Q_B = f"{LAYER}.self_attn.q_proj.lora_A.weight", f"{LAYER}.self_attn.q_proj.lora_B.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter"), reference(folder), ["q_proj", "v_proj", "down_proj"])


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "use_dora: True is not supported: DoRA"),
    "trained biases": ({"bias": "all"}, "bias: 'all' is not supported"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save: "),
    "trained tokens": ({"trainable_token_indices": [5]}, "trainable_token_indices: .*embeddings"),
    "bias of B": ({"lora_bias": True}, "lora_bias: True"),
    "parameters": ({"target_parameters": ["experts.down_proj"]}, "target_parameters: "),
    "another method": ({"peft_type": "LOHA"}, "peft_type: 'LOHA'"),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: 'pissa_niter_4' also changes the base"),
    "replicated layers": ({"layer_replication": [[0, 1]]}, "layer_replication: "),
    "activated": ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens: "),
    "a key of tomorrow": ({"use_xlora": True}, "use_xlora: not known here"),
    "rank 257": ({"r": 257}, "r: 257 is not a rank from 1 to 256"),
    "rank 0": ({"r": 0}, "r: 0 is not a rank"),
    "rank as text": ({"r": "8"}, "r: '8' is not a rank"),
    "a pattern's rank": ({"rank_pattern": {"q_proj": 300}}, r"rank_pattern\['q_proj'\]: 300"),
    "a flag as text": ({"use_rslora": "False"}, "use_rslora: 'False' is neither true nor false"),
    "alpha": ({"lora_alpha": None}, "lora_alpha: None is not a number"),
    "no targets": ({"target_modules": []}, "target_modules: empty"),
    "targets of another kind": ({"target_modules": 5}, "target_modules: 5 is neither"),
    "a pattern that is none": ({"target_modules": "*.q_proj"}, "adapter_config.json: "),
    "patterns as a list": ({"alpha_pattern": ["q_proj"]}, "alpha_pattern: "),
    "layers as text": ({"layers_to_transform": "all"}, "layers_to_transform: 'all'"),
    "other ranks than the weights": ({"r": 4}, r"down_proj.lora_A.weight: shape \(8, 128\), by .* \(4, 128\)"),
    "too many targets": ({"target_modules": ["q_proj", "v_proj", "down_proj", "o_proj"]}, "self_attn.o_proj: named by"),
    "too few targets": ({"target_modules": ["q_proj", "v_proj"]}, "mlp.down_proj.lora_A.weight: adapter_config.json does not"),
    "fewer layers": ({"layers_to_transform": [1]}, "layers.0.mlp.down_proj.lora_A.weight: adapter_config.json does not target"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configs(folder: Path, adapter: Path, tmp_path: Path, name: str) -> None:
    fields, message = BAD_CONFIGS[name]
    with pytest.raises(ValueError, match=message):
        load_adapter("a", changed(adapter, tmp_path, **fields), read_config(folder))


NOT_FINITE = torch.zeros(8, 64).index_fill_(0, torch.tensor(3), float("nan"))
BAD_TENSORS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "no B": ({Q_B: None}, r"q_proj.lora_B.weight: missing; the file is incomplete"),
    "no A": ({Q_A: None}, r"q_proj.lora_A.weight: missing"),
    "a layer less": ({Q_A: None, Q_B: None}, "layers.0.self_attn.q_proj: named by target_modules"),
    "B of another width": ({Q_B: torch.zeros(63, 8)}, r"q_proj.lora_B.weight: shape \(63, 8\), by .* \(64, 8\)"),
    "A transposed": ({Q_A: torch.zeros(64, 8)}, r"q_proj.lora_A.weight: shape \(64, 8\)"),
    "a layer that is not there": ({f"{LAYER[:-1]}7.self_attn.q_proj.lora_A.weight": torch.zeros(8, 64)}, "layers.7.self_attn"),
    "a map that is not there": ({f"{LAYER}.self_attn.wqkv.lora_A.weight": torch.zeros(8, 64)}, "wqkv.lora_A.weight: no map"),
    "magnitudes": ({f"{LAYER}.self_attn.q_proj.lora_magnitude_vector": torch.zeros(64)}, "lora_magnitude_vector: DoRA"),
    "adapted embeddings": ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(8, 320)}, "lora_embedding_A: "),
    "trained embeddings": ({"base_model.model.model.embed_tokens.weight": torch.zeros(320, 64)}, "embed_tokens.weight: trained"),
    "the head": ({"base_model.model.lm_head.lora_A.weight": torch.zeros(8, 64)}, "lm_head.lora_A.weight: the output head"),
    "a bias": ({f"{LAYER}.self_attn.q_proj.bias": torch.zeros(64)}, "q_proj.bias: biases"),
    "something else": ({f"{LAYER}.self_attn.q_proj.lora_C.weight": torch.zeros(8)}, "lora_C.weight: neither"),
    "not a number": ({Q_A: NOT_FINITE}, "q_proj.lora_A.weight: some of its numbers are not finite"),
    "integers": ({Q_A: torch.zeros(8, 64, dtype=torch.int8)}, "q_proj.lora_A.weight: dtype int8"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_tensors(folder: Path, adapter: Path, tmp_path: Path, name: str) -> None:
    tensors, message = BAD_TENSORS[name]
    with pytest.raises(ValueError, match=message) as caught:
        load_adapter("a", changed(adapter, tmp_path, tensors), read_config(folder))
    assert str(tmp_path) in str(caught.value)


def test_folders_that_lack_files(folder: Path, adapter: Path, tmp_path: Path) -> None:
    model = read_config(folder)
    with pytest.raises(ValueError, match=r"no adapter_config\.json"):
        load_adapter("a", tmp_path / "nowhere", model)
    (tmp_path / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    with pytest.raises(ValueError, match=r"no adapter_model\.safetensors"):
        load_adapter("a", tmp_path, model)
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match="safe_serialization=True"):
        load_adapter("a", tmp_path, model)
    (tmp_path / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes()[:1000])
    with pytest.raises(ValueError, match="cut off"):
        load_adapter("a", tmp_path, model)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds no JSON object"):
        load_adapter("a", tmp_path, model)


def test_an_adapter_of_another_model(adapter: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path, hidden_size=96, num_attention_heads=6)
    with pytest.raises(ValueError, match=r"by adapter_config\.json and the model .*: not of this model"):
        load_adapter("a", adapter, read_config(other))


def test_experts_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_family(tmp_path / "m", "qwen2_moe")
    path = make_adapter(tmp_path / "a", reference(folder), ["q_proj"])
    name = "base_model.model.model.layers.1.mlp.experts.0.up_proj.lora_A.weight"
    with pytest.raises(ValueError, match=r"experts\.0\.up_proj\.lora_A\.weight: no map of this model that adapters may change"):
        load_adapter("a", changed(path, tmp_path / "b", {name: torch.zeros(8, 64)}), read_config(folder))
    assert {site.stem for site in load_adapter("a", path, read_config(folder)).maps} == {"self_attn.q_proj"}


def test_the_digest_follows_the_content(folder: Path, adapter: Path, tmp_path: Path) -> None:
    model = read_config(folder)
    one = load_adapter("a", adapter, model).id
    assert load_adapter("a", changed(adapter, tmp_path / "other", lora_alpha=17), model).id.digest != one.digest
    assert load_adapter("b", adapter, model).id.digest == one.digest


def test_ranks_and_scales_are_pefts() -> None:
    config = lora_config({
        "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"],
        "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 4, "q_proj": 16},
        "alpha_pattern": {"v_proj": 3.0},
    })  # fmt: skip
    assert [config.rank_of(f"model.layers.{layer}.self_attn.q_proj") for layer in (0, 1, 11)] == [16, 4, 16]
    assert config.scale_of("model.layers.1.self_attn.q_proj") == 4.0
    assert config.scale_of("model.layers.0.self_attn.v_proj") == 3 / 8
    stabilized = lora_config({"r": 16, "lora_alpha": 16, "use_rslora": True, "target_modules": "all-linear"})
    assert stabilized.scale_of("model.layers.0.mlp.up_proj") == 4.0
    assert stabilized.is_target("model.layers.0.mlp.up_proj")


def test_targets_are_pefts() -> None:
    by_layer = lora_config({"target_modules": ["q_proj"], "layers_to_transform": [1, 3], "layers_pattern": "layers"})
    assert [by_layer.is_target(f"model.layers.{layer}.self_attn.q_proj") for layer in range(4)] == [False, True, False, True]
    by_pattern = lora_config({"target_modules": r".*\.(q|k)_proj", "exclude_modules": r".*\.0\..*"})
    assert not by_pattern.is_target("model.layers.0.self_attn.q_proj")
    assert by_pattern.is_target("model.layers.1.self_attn.k_proj") and not by_pattern.is_target("model.layers.1.self_attn.o_proj")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora": ("a",)}, "lora: 'a' is not NAME=FOLDER"),
        ({"lora": ("a b=/x",)}, "lora: 'a b' is not 1 to 128"),
        ({"lora": ("a=/x", "a=/y")}, "lora: a is given twice"),
        ({"lora": ("a=/x", "b=/y"), "max_loras": 1}, "lora: 2 adapters, and max_loras is 1"),
        ({"max_loras": 1000}, "max_loras: 1000 is more than 256"),
        ({"max_loras": 2, "tensor_parallel": 2, "backend": "torch"}, "lora, max_loras: adapters do not go with tensor_parallel"),
    ],
)
def test_bad_settings(fields: dict[str, Any], message: str) -> None:
    config = EngineConfig(model="m", **fields)
    with pytest.raises(ValueError, match=message):
        config.validate()
        config.check_own_ranks()


def test_a_fused_map_gives_each_part_its_rows(tmp_path: Path) -> None:
    folder = make_tiny_family(tmp_path / "m", "phi3")
    model = read_config(folder)
    path = make_adapter(tmp_path / "a", reference(folder), ["qkv_proj"])
    maps = load_adapter("a", path, model).maps
    from safetensors.torch import load_file

    stored = load_file(path / "adapter_model.safetensors")[f"{LAYER}.self_attn.qkv_proj.lora_B.weight"] * 2.0
    parts = [maps[Site(0, f"self_attn.{name}_proj")].b for name in "qkv"]
    assert torch.equal(torch.cat(parts), stored)


def test_the_file_names_are_those_that_peft_writes(adapter: Path, tmp_path: Path, folder: Path) -> None:
    """Older files name the adapter in each tensor."""
    content = json.loads((adapter / "adapter_config.json").read_text())
    from safetensors.torch import load_file

    tensors = {
        name.replace(".weight", ".default.weight"): t for name, t in load_file(adapter / "adapter_model.safetensors").items()
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    maps, expected = (load_adapter("a", path, read_config(folder)).maps for path in (tmp_path, adapter))
    assert maps.keys() == expected.keys() and all(torch.equal(maps[site].b, expected[site].b) for site in maps)
