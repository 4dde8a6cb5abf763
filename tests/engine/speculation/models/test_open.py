"""Which models may draft for which, and what the pool beside the target's takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kv_cache.pool import KVShape
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.memory import DoesNotFit
from pdmesh.engine.speculation.draft_models.kv import ParallelKV
from pdmesh.engine.speculation.draft_models.loading import Target, load_draft_model, open_draft_model, vocabulary_hash
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_model

SHAPE = KVShape(num_layers=2, num_blocks=10, block_size=16, num_kv_heads=2, head_dim=16, dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(config_of(folder))


def config_of(folder: Path, **settings: object) -> EngineConfig:
    return EngineConfig(model=str(folder), backend="torch", **{"max_context": 512, **settings})  # type: ignore[arg-type]


def target_of(folder: Path, loaded: LoadedModel, **settings: object) -> Target:
    return Target(config_of(folder, **settings), loaded.config, SHAPE)


def test_a_smaller_model_with_the_same_tokens_in_the_engines_numbers(folder: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    small = make_tiny_model(tmp_path, "qwen2", hidden_size=32, num_hidden_layers=1, max_position_embeddings=600)
    draft = load_draft_model(str(small), config_of(folder, dtype="bfloat16"), loaded.config)
    assert (draft.config.num_layers, draft.dtype) == (1, torch.bfloat16)
    assert draft.model.rotary.num_positions == 512  # type: ignore[union-attr]  # the engine's context, not its own


def test_another_number_of_tokens(folder: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path, vocab_size=VOCAB_SIZE + 8)
    with pytest.raises(ValueError, match=r"draft_model: it has 328 tokens, the model has 320; give a model with the same voc"):
        load_draft_model(str(other), config_of(folder), loaded.config)
    with pytest.raises(ValueError, match="draft_model: it has 328 tokens"):
        open_draft_model(load_model(config_of(other)), target_of(folder, loaded), lambda _sequence, _num_tokens, _num_kept: True)


def test_other_tokens(folder: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path)
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["a"], content["model"]["vocab"]["b"] = (content["model"]["vocab"][token] for token in "ba")
    file.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"draft_model: the tokens of .* \(tokenizer\.json differs\); give a model with the same"
    ):
        load_draft_model(str(other), config_of(folder), loaded.config)
    file.unlink()
    assert load_draft_model(str(other), config_of(folder), loaded.config).config.vocab_size == VOCAB_SIZE


def test_a_shorter_context(folder: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    near = make_tiny_model(tmp_path, max_position_embeddings=128)
    with pytest.raises(ValueError, match="draft_model: it sees 128 tokens, max_context is 512; give max_context=128, or a draft"):
        load_draft_model(str(near), config_of(folder), loaded.config)
    assert load_draft_model(str(near), config_of(folder, max_context=128), loaded.config).config.max_context == 128


def test_what_is_wrong_with_its_weights_is_not_said_of_the_model(folder: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path)
    [weights] = other.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(ValueError, match=f"^draft_model: {weights} cannot be read"):
        load_draft_model(str(other), config_of(folder), loaded.config)


def test_no_such_model(folder: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"draft_model: .*/none does not exist; give a model folder or a \.gguf file"):
        load_draft_model(str(tmp_path / "none"), config_of(folder), loaded.config)


def test_a_vocabulary_is_its_tokens_and_ids_only(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tokenizer.json"
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"], content["model"]["vocab"] = {"type": "NFC"}, dict(sorted(content["model"]["vocab"].items()))
    copy.write_text(json.dumps(content, indent=1))
    assert vocabulary_hash(str(tmp_path)) == vocabulary_hash(str(folder)) is not None
    content["added_tokens"][0]["id"] += 5
    copy.write_text(json.dumps(content))
    assert vocabulary_hash(str(tmp_path)) != vocabulary_hash(str(folder))
    content["model"]["vocab"] = [[token, 0.0] for token in content["model"]["vocab"]]
    copy.write_text(json.dumps(content))
    assert vocabulary_hash(str(tmp_path)) is not None
    assert vocabulary_hash(str(tmp_path / "model.gguf")) is None


def test_the_pool_beside_the_targets(loaded: LoadedModel) -> None:
    kv = ParallelKV(loaded, SHAPE)
    assert kv.tensor.shape == (2, 2, 10, 16, 2, 16)
    assert kv.num_bytes == kv.tensor.nbytes == 2 * 2 * 10 * 16 * 2 * 16 * 4
    kv.close()
    kv.close()


def test_a_pool_that_does_not_fit(loaded: LoadedModel) -> None:
    with pytest.raises(DoesNotFit, match=r"draft_model: its KV pool needs [\d,]+ MiB \(1000000000 blocks, .* lower num_blocks"):
        ParallelKV(loaded, replace(SHAPE, num_blocks=10**9))
