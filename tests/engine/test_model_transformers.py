"""Both backends against transformers: logits within float32 rounding, greedy tokens exactly equal."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.backends import BACKENDS
from tests.engine.model_kinds import KINDS
from tests.engine.paged_loop import PagedLoop, load
from tests.support.tiny_models import make_tiny_model

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=sorted(KINDS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, overrides = KINDS[request.param]
    return make_tiny_model(tmp_path_factory.mktemp(request.param), kind, **overrides)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=num_tokens)


def reference(folder: Path, **kwargs: object) -> Any:
    reads_images = "text_config" in json.loads((folder / "config.json").read_text())
    kind = transformers.AutoModelForImageTextToText if reads_images else transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, **kwargs).eval()


def greedy(model: Any, token_ids: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([token_ids])
    settings = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return list(output[0, len(token_ids) :].tolist())


def test_logits_are_those_of_transformers(folder: Path) -> None:
    token_ids = prompt(300)
    with torch.inference_mode():
        expected = reference(folder)(torch.tensor([token_ids])).logits[0]
    for backend in BACKENDS:
        logits = PagedLoop(load(folder, backend=backend, dtype="float32")).logits(token_ids, 128)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-5)


def test_greedy_tokens_are_those_of_transformers(folder: Path) -> None:
    model = reference(folder)
    prompts = [prompt(1, seed=1), prompt(30, seed=2), prompt(150, seed=3)]
    expected = [greedy(model, token_ids, 24) for token_ids in prompts]
    assert len({token for tokens in expected for token in tokens}) > 10, "greedy output that hardly varies shows nothing"
    for backend in BACKENDS:
        assert PagedLoop(load(folder, backend=backend, dtype="float32")).generate(prompts, 24) == expected, backend


@pytest.mark.parametrize("backend", BACKENDS)
def test_dynamic_rope_generates_beyond_the_models_own_context(tmp_path: Path, backend: str) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    folder = make_tiny_model(tmp_path, "llama", max_position_embeddings=64, rope_parameters=rope)
    token_ids = prompt(60)
    loaded = load(folder, max_context=200, backend=backend, dtype="float32")
    assert PagedLoop(loaded).generate([token_ids], 40) == [greedy(reference(folder), token_ids, 40)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_stay_close(tmp_path: Path, dtype: str) -> None:
    folder = make_tiny_model(tmp_path, "qwen3", dtype=dtype, initializer_range=0.05)
    token_ids = prompt(100)
    loaded = load(folder, backend="torch")
    assert str(loaded.dtype) == f"torch.{dtype}"
    with torch.inference_mode():
        expected = reference(folder, dtype=torch.float32)(torch.tensor([token_ids])).logits[0]
    actual = PagedLoop(loaded).logits(token_ids)
    assert actual.dtype == torch.float32
    assert (actual - expected).norm() / expected.norm() < 0.03
