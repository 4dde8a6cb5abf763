"""Adapters of every family, on torch and on the native kernels: greedy tokens are those of the model with W + scale * B A, in one
batch with the base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdmesh.engine.lora.folder import load_adapter, modules_of
from tests.engine.backends import BACKENDS
from tests.engine.kernels.cpu.test_families import family
from tests.engine.lora.mixed import generate
from tests.engine.paged_loop import load
from tests.engine.test_model_transformers import greedy, prompt, reference
from tests.support.adapters import linear_modules, make_adapter, merge
from tests.support.tiny_families import VARIANTS, reads_images

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("variant", sorted(name for name in VARIANTS if not reads_images(name)))
def test_tokens_are_those_of_the_merged_model(variant: str, tmp_path: Path) -> None:
    folder = family(tmp_path / "model", variant)
    model = reference(folder, dtype=torch.float32, attn_implementation="eager")
    computed = [backend for backend in BACKENDS if backend == "torch" or variant != "apertus"]  # no kernel has its activation
    backends = {backend: load(folder, backend=backend, dtype="float32", max_loras=2) for backend in computed}
    config = backends["torch"].config
    modules = list(modules_of(config))
    assert set(modules) <= linear_modules(model).keys()
    path = make_adapter(tmp_path / "adapter", model, modules, use_rslora=True)
    prompts = [prompt(51, seed=1), prompt(80, seed=2), prompt(90, seed=3)]
    base = [greedy(model, token_ids, 12) for token_ids in prompts]
    merge(model, path)
    adapted = [greedy(model, token_ids, 12) for token_ids in prompts]
    assert all(one != other for one, other in zip(base, adapted, strict=True)), "an adapter that changes nothing shows nothing"
    for backend, loaded in backends.items():
        assert loaded.adapter_slots is not None
        loaded.adapter_slots.put(1, load_adapter("a", path, config))
        assert generate(loaded, prompts, [1, 1, 1], 12) == adapted, backend
        assert generate(loaded, prompts, [-1, 1, -1], 12) == [base[0], adapted[1], base[2]], backend
        assert generate(loaded, prompts, [], 12) == base, backend
