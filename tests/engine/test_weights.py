"""Checkpoints: what is read is what was written, in every format; what is broken or not supported is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.loader.builder import open_checkpoint
from pdmesh.engine.loader.gguf.check import check_gguf
from pdmesh.engine.loader.gguf.convert import convert_gguf_weights
from pdmesh.engine.loader.gguf.source import GgufSource
from pdmesh.engine.loader.loader import load_model
from pdmesh.engine.loader.safetensors import MissingTensor, SafetensorsSource
from pdmesh.engine.models.decoder import DecoderModel
from tests.engine.backends import needs_native
from tests.engine.paged_loop import PagedLoop, load
from tests.engine.tiny_gguf import write_gguf
from tests.support.tiny_models import IM_END, IM_START, make_tiny_model

Gguf = tuple[Path, Path, dict[str, np.ndarray]]  # the original folder, the file, the values it stands for
PROMPT = list(b"The quick brown fox")
GGUF_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-bias": ("llama", {"attention_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def shard(folder: Path, num_shards: int) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for index in range(num_shards):
        file = f"model-{index + 1:05}-of-{num_shards:05}.safetensors"
        save_file({name: tensors[name] for name in names[index::num_shards]}, folder / file)
        weight_map.update(dict.fromkeys(names[index::num_shards], file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


def test_a_sharded_folder_is_the_same_model(folder: Path) -> None:
    expected = PagedLoop(load(folder)).logits(PROMPT)
    shard(folder, 3)
    assert torch.equal(PagedLoop(load(folder)).logits(PROMPT), expected)


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder, 2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shards are missing: model-00002-of-00002\.safetensors"):
        open_checkpoint(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(MissingTensor, match=r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load(folder)


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 256}))
    with pytest.raises(ValueError, match=r"down_proj\.weight: shape \(64, 128\) in the checkpoint, \(64, 256\) by its"):
        load(folder)


def test_a_mapped_tensor_is_not_copied_when_the_dtype_is_equal(folder: Path) -> None:
    loaded = load(folder, backend="torch")
    assert isinstance(loaded.model, DecoderModel)
    assert loaded.model.dtype == torch.float32
    mapped = SafetensorsSource(folder).get("model.norm.weight")
    assert mapped.to("cpu", torch.float32) is mapped


@pytest.mark.parametrize(
    ("dtype", "expected"), [("auto", torch.bfloat16), ("float32", torch.float32), ("float16", torch.float16)]
)
def test_the_dtype_is_the_checkpoints_or_as_asked(tmp_path: Path, dtype: str, expected: torch.dtype) -> None:
    loaded = load(make_tiny_model(tmp_path, dtype="bfloat16"), dtype=dtype, backend="torch")
    assert isinstance(loaded.model, DecoderModel)
    assert loaded.dtype == loaded.kv_dtype == loaded.model.dtype == expected
    assert loaded.numeric_mode.startswith(str(expected).removeprefix("torch.") + "-cpu-")


def test_end_of_sequence_ids_are_those_of_generation(folder: Path) -> None:
    assert SafetensorsSource(folder).config.eos_token_ids == {IM_END}
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert SafetensorsSource(folder).config.eos_token_ids == {1, 2}


@pytest.mark.parametrize(("backend", "doing"), [("torch", "loading"), pytest.param("native", "packing", marks=needs_native)])
def test_progress_rises_to_one(folder: Path, backend: str, doing: str) -> None:
    seen: list[tuple[float, str]] = []
    load_model(EngineConfig(model=str(folder), backend=backend), lambda share, text: seen.append((share, text)))
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert seen[-1] == (1.0, "loaded")
    assert (0.3, f"{doing} layer 1 of 2") in seen


@pytest.mark.parametrize(
    ("name", "message"), [("nowhere", "does not exist; give a model folder"), ("file.txt", "neither a folder nor a .gguf file")]
)
def test_what_is_not_a_model_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(ValueError, match=message):
        load(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", r"config\.json: Expecting"),
        ("config.json", "[1]", r"config\.json: it holds no JSON object"),
        ("generation_config.json", '{"eos_token_id": "abc"}', r"generation_config\.json: eos_token_id is 'abc'"),
        ("model.safetensors", "", r"model\.safetensors cannot be read .*get it again"),
        ("model.safetensors.index.json", "{}", r"index\.json: it has no weight_map"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    folder = make_tiny_model(tmp_path / "hf", "llama")
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize(
    "content", [b"", b"hi", b"GGUF", b"GGUF\3\0\0\0" + b"\xff" * 7 + b"\x7f" + b"\xff" * 8, b"GGUF\3\0\0\0" + b"\1" * 99]
)
def test_a_damaged_gguf_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "damaged.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged\.gguf"):
        load(tmp_path / "damaged.gguf")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        load(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="device: cuda is not available"):
        load(folder, device="cuda")


@pytest.fixture(params=sorted(GGUF_KINDS))
def gguf(request: pytest.FixtureRequest, tmp_path: Path) -> Gguf:
    kind, overrides = GGUF_KINDS[request.param]
    folder = make_tiny_model(tmp_path / "hf", kind, **overrides)
    return folder, tmp_path / "model.gguf", write_gguf(folder, tmp_path / "model.gguf")


def test_a_gguf_gives_back_exactly_what_it_stands_for(gguf: Gguf) -> None:
    folder, path, expected = gguf
    source, original = GgufSource(path), SafetensorsSource(folder)
    assert frozenset(check_gguf(source)) == original.names() == frozenset(expected)
    assert source.num_elements() == original.num_elements()
    for name, values in expected.items():
        assert torch.equal(source.get(name), torch.from_numpy(values)), name
        assert torch.allclose(source.get(name), original.get(name), atol=0.1), name


def test_a_gguf_has_the_config_of_its_original(gguf: Gguf) -> None:
    folder, path, _ = gguf
    ours, theirs = GgufSource(path).config, SafetensorsSource(folder).config
    for name in set(ours.__dataclass_fields__) - {"norm_eps"}:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.norm_eps == pytest.approx(theirs.norm_eps)


def test_a_converted_gguf_is_the_same_model_here_and_in_transformers(gguf: Gguf, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    _, path, _ = gguf
    seen: list[float] = []
    converted = convert_gguf_weights(path, tmp_path / "converted", lambda share, _: seen.append(share))
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    logits = PagedLoop(load(path, dtype="float32")).logits(PROMPT)
    assert torch.equal(PagedLoop(load(converted, dtype="float32")).logits(PROMPT), logits)
    model = transformers.AutoModelForCausalLM.from_pretrained(converted)
    assert model.dtype == torch.float32
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (IM_START, IM_END)
    with torch.inference_mode():
        torch.testing.assert_close(model(torch.tensor([PROMPT])).logits[0], logits, atol=1e-4, rtol=1e-5)


def test_llama3_frequencies_of_a_gguf_become_its_rope_scaling(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 10000.0,
    }
    folder = make_tiny_model(tmp_path / "hf", rope_parameters=scaling, max_position_embeddings=16384)
    base = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    wavelength = 2 * np.pi / base
    smooth = (8192 / wavelength - 1) / 3
    between = 1 / ((1 - smooth) / 32 + smooth)
    factors = np.where(wavelength < 2048, 1.0, np.where(wavelength > 8192, 32.0, between))
    write_gguf(folder, tmp_path / "model.gguf", rope_freqs=factors)
    ours, theirs = GgufSource(tmp_path / "model.gguf").config.rope, SafetensorsSource(folder).config.rope
    assert ours == theirs
    write_gguf(folder, tmp_path / "other.gguf", rope_freqs=factors * np.linspace(1, 2, 8))
    with pytest.raises(ValueError, match=r"rope_freqs\.weight does not hold Llama 3 frequencies"):
        GgufSource(tmp_path / "other.gguf")


def test_rope_scaling_of_a_gguf(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(folder, path, extra={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert (GgufSource(path).config.rope.rope_type, GgufSource(path).config.rope.factor) == ("linear", 4.0)
    write_gguf(folder, path, extra={"rope.scaling.type": "longrope"})
    with pytest.raises(ValueError, match="rope scaling 'longrope' is not supported"):
        GgufSource(path)
