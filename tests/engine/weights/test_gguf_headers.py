"""Every key of a GGUF file's header and every tensor is used, or refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.loader.gguf.convert import convert_gguf_weights
from pdmesh.engine.loader.gguf.source import GgufSource
from pdmesh.engine.loader.headers import check_model
from pdmesh.engine.loader.loader import load_model
from tests.engine.paged_loop import PagedLoop
from tests.engine.tiny_gguf import write_gguf
from tests.support.tiny_models import make_tiny_model

PROMPT = [10 + (7 * i) % 200 for i in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def written(folder: Path, path: Path, **extra: Any) -> Path:
    write_gguf(folder, path / "model.gguf", extra={name.replace("__", "."): value for name, value in extra.items()})
    return path / "model.gguf"


NEUTRAL = {
    "vocab_size": 320, "rope__dimension_count": 16, "attention__value_length": 16, "expert_count": 0, "attention__causal": True,
    "rope__scaling__finetuned": False, "rope__scale_linear": 1.0, "residual_scale": 1.0, "attention__sliding_window": 2048,
}  # fmt: skip


@pytest.mark.parametrize("key", NEUTRAL)
def test_keys_that_change_nothing_pass(folder: Path, tmp_path: Path, key: str) -> None:
    check_model(written(folder, tmp_path, **{key: NEUTRAL[key]}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope__dimension_count", 8), ("attention__value_length", 8), ("expert_shared_count", 4), ("attention__causal", False),
        ("use_parallel_residual", True), ("attention__sliding_window", 128), ("logit_scale", 0.5), ("embedding_scale", 12.0),
        ("residual_scale", 0.2), ("attention__scale", 0.1), ("attn_logit_softcapping", 50.0), ("rope__freq_base_swa", 1e4),
        ("attention__max_alibi_bias", 8.0), ("rope__scaling__attn_factor", 2.0), ("a_key_of_tomorrow", "x"),
    ],
)  # fmt: skip
def test_keys_that_nothing_reads_are_refused_by_name(folder: Path, tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"model.gguf: GGUF keys? llama\.{key.replace('__', '.')} .*Hugging Face folder"):
        check_model(written(folder, tmp_path, **{key: value}))


def test_the_older_key_of_linear_scaling(folder: Path, tmp_path: Path) -> None:
    rope = GgufSource(written(folder, tmp_path, rope__scale_linear=2.0)).config.rope
    assert (rope.rope_type, rope.factor) == ("linear", 2.0)


@pytest.mark.parametrize("key", ["rope__scaling__attn_factor", "rope__scaling__yarn_attn_factor"])
def test_factor_of_attention_of_yarn(folder: Path, tmp_path: Path, key: str) -> None:
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 512}
    plain = GgufSource(written(folder, tmp_path, **yarn)).config
    assert plain.rope.attention_factor is None and plain.max_context == 2048
    given = GgufSource(written(folder, tmp_path, **yarn, **{key: 0.5, "rope__scaling__yarn_beta_fast": 16.0})).config
    assert given.rope.attention_factor == pytest.approx(0.5 * (1 + 0.1 * math.log(4)))
    assert given.rope.beta_fast == 16.0


def test_biases_of_the_mlp_are_used(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "hf", mlp_bias=True)
    path = written(folder, tmp_path)
    assert GgufSource(path).config.mlp_bias
    loaded = load_model(EngineConfig(model=str(path), num_blocks=32, dtype="float32", backend="torch"))
    theirs = AutoModelForCausalLM.from_pretrained(convert_gguf_weights(path, tmp_path / "converted"))
    with torch.inference_mode():
        torch.testing.assert_close(
            PagedLoop(loaded).logits(PROMPT), theirs(torch.tensor([PROMPT])).logits[0], atol=1e-4, rtol=1e-5
        )
    biases = {name: values for name, values in load_file(folder / "model.safetensors").items() if name.endswith("_proj.bias")}
    assert all(torch.equal(GgufSource(path).get(name), torch.from_numpy(values)) for name, values in biases.items())


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("model.layers.0.mlp.gate_proj.bias", (128,), "no tensor for 'model.layers.0.mlp.down_proj.bias'"),
        (
            "model.layers.1.self_attn.k_proj.bias",
            (32,),
            r"tensors blk\.1\.attn_k\.bias are used by nothing in architecture llama",
        ),
        ("model.layers.7.mlp.gate_proj.weight", (128, 64), r"tensors blk\.7\.ffn_gate\.weight are used by nothing"),
    ],
)
def test_a_tensor_that_nothing_uses_is_named(folder: Path, tmp_path: Path, name: str, shape: tuple[int, ...], said: str) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: np.ones(shape, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=said):
        check_model(written(tmp_path, tmp_path))


def test_a_missing_tensor_and_a_wrong_shape_are_named_by_the_header(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    down = "model.layers.1.mlp.down_proj.weight"
    save_file({**tensors, down: tensors[down][:32]}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{down}: shape \(32, 128\) in the checkpoint, \(64, 128\) by its config"):
        check_model(written(tmp_path, tmp_path))
    del tensors[down]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"model.gguf: no tensor for '{down}'"):
        check_model(written(tmp_path, tmp_path))
