"""Every format: dequantized weights are those that the file stands for, to the bit, and the model computes their tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pdmesh.engine.loader.safetensors import SafetensorsSource
from pdmesh.engine.models.config import ModelConfig
from tests.engine.paged_loop import PagedLoop, load
from tests.engine.test_model_transformers import prompt
from tests.support.quantized_checkpoints import FORMATS, write_mxfp4, write_quantized
from tests.support.tiny_families import make_tiny_family

pytest.importorskip("transformers")

MODELS = {
    "phi3": ("gptq 4 bits g32, asymmetric", ()),  # queries, keys and values in one map; gate and up in one
    "mixtral": ("gptq 4 bits g32, act-order", ()),
    "qwen3_moe": ("awq g32", ()),
    "gpt_neox": ("compressed w4a16, asymmetric", ()),  # heads are taken out of groups of rows
    "falcon, new": ("compressed int8 by output", ()),
    "deepseek_v3": ("fp8 in blocks", ()),  # rows of rotated heads are put into another order
    "gpt2": ("bitsandbytes nf4", ("c_attn", "c_proj", "c_fc")),  # plain weights are stored [in, out]
}
"""Families whose names or tensors differ from a Llama's: a format, and the modules that a plain folder stores turned."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_family(tmp_path_factory.mktemp("llama"), "llama")


def check_weights(quantized: Path, dense: Path, names: list[str]) -> None:
    ours, theirs = SafetensorsSource(quantized), SafetensorsSource(dense)
    for name in names:
        assert torch.equal(ours.get(name).float(), theirs.get(name)), name


def check_tokens(quantized: Path, dense: Path) -> None:
    prompts = [prompt(3, seed=1), prompt(40, seed=2)]
    settings = {"backend": "torch", "dtype": "float32"}
    expected = PagedLoop(load(dense, **settings)).generate(prompts, 16)
    assert len({token for tokens in expected for token in tokens}) > 6, "greedy output that hardly varies shows nothing"
    assert PagedLoop(load(quantized, **settings)).generate(prompts, 16) == expected


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_weights_are_those_of_the_format_and_tokens_those_of_the_weights(name: str, llama: Path, tmp_path: Path) -> None:
    quantized, dense = write_quantized(llama, tmp_path, FORMATS[name])
    assert SafetensorsSource(quantized).quantized is not None
    check_weights(quantized, dense, [stored for stored in load_file(dense / "model.safetensors") if stored.endswith("weight")])
    check_tokens(quantized, dense)


@pytest.mark.parametrize("family", sorted(MODELS))
def test_fused_renamed_and_turned_weights_are_read_too(family: str, tmp_path: Path) -> None:
    name, transposed = MODELS[family]
    quantized, dense = write_quantized(
        make_tiny_family(tmp_path / "plain", family), tmp_path, FORMATS[name], transposed=transposed
    )
    check_weights(quantized, dense, canonical_names(SafetensorsSource(dense).config))
    check_tokens(quantized, dense)


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    quantized, dense = write_mxfp4(make_tiny_family(tmp_path / "plain", "gpt_oss"), tmp_path)
    experts = [f"model.layers.1.mlp.experts.{number}.{part}_proj.weight" for number in (0, 5) for part in ("gate", "up", "down")]
    check_weights(quantized, dense, experts)
    check_tokens(quantized, dense)


def canonical_names(config: ModelConfig) -> list[str]:
    """Names of maps in the first and the last layer, as loaders ask for them."""
    attention: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    if config.latent:
        attention = ("q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj", "o_proj")
    names = []
    for layer in (0, config.num_layers - 1):
        names += [f"model.layers.{layer}.self_attn.{part}.weight" for part in attention]
        mlp = [f"mlp.experts.{expert}" for expert in (0, 3)] if config.has_experts(layer) else ["mlp"]
        parts = ("gate_proj", "up_proj", "down_proj") if config.gated_mlp else ("up_proj", "down_proj")
        names += [f"model.layers.{layer}.{stem}.{part}.weight" for stem in mlp for part in parts]
    return names


def test_every_tensor_is_used_or_belongs_to_the_format(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, form in enumerate(FORMATS.values()):
        quantized, _ = write_quantized(llama, tmp_path / str(number), form)
        caplog.clear()
        load(quantized, backend="torch")
        assert "nothing uses" not in caplog.text


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_number_of_weights_is_that_of_the_plain_model(name: str, llama: Path, tmp_path: Path) -> None:
    quantized, dense = write_quantized(llama, tmp_path, FORMATS[name])
    ours, plain = SafetensorsSource(quantized).num_elements(), SafetensorsSource(dense).num_elements()
    assert plain <= ours <= plain * 1.02
