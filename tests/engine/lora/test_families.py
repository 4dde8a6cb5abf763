"""Adapters of every family: greedy tokens are those of the model with W + scale * B A, in one batch with the base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdmesh.engine.lora.folder import load_adapter, modules_of
from tests.engine.lora.mixed import generate
from tests.engine.paged_loop import load
from tests.engine.test_model_transformers import greedy, prompt, reference
from tests.support.adapters import linear_modules, make_adapter, merge
from tests.support.tiny_families import VARIANTS, make_tiny_family, reads_images

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("variant", sorted(name for name in VARIANTS if not reads_images(name)))
def test_tokens_are_those_of_the_merged_model(variant: str, tmp_path: Path) -> None:
    folder = make_tiny_family(tmp_path / "model", variant)
    model = reference(folder, dtype=torch.float32, attn_implementation="eager")
    loaded = load(folder, backend="torch", dtype="float32", max_loras=2)
    modules = list(modules_of(loaded.config))
    assert set(modules) <= linear_modules(model).keys()
    path = make_adapter(tmp_path / "adapter", model, modules, use_rslora=True)
    slots = loaded.adapter_slots
    assert slots is not None
    slots.put(1, load_adapter("a", path, loaded.config))
    prompts = [prompt(51, seed=1), prompt(80, seed=2), prompt(90, seed=3)]
    base = [greedy(model, token_ids, 12) for token_ids in prompts]
    merge(model, path)
    adapted = [greedy(model, token_ids, 12) for token_ids in prompts]
    assert all(one != other for one, other in zip(base, adapted, strict=True)), "an adapter that changes nothing shows nothing"
    assert generate(loaded, prompts, [1, 1, 1], 12) == adapted
    assert generate(loaded, prompts, [-1, 1, -1], 12) == [base[0], adapted[1], base[2]]
    assert generate(loaded, prompts, [], 12) == base
