"""Every family against transformers: greedy tokens are equal in float32, prompts in chunks and decode in one batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdmesh.engine.loader.headers import check_headers
from pdmesh.engine.loader.safetensors import SafetensorsSource
from pdmesh.engine.models.registry import FAMILIES, LACKING, RECURRENT
from tests.engine.paged_loop import PagedLoop, load
from tests.engine.test_model_transformers import greedy, prompt, reference
from tests.support.tiny_families import VARIANTS, make_tiny_family

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_logits_and_greedy_tokens_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    folder = make_tiny_family(tmp_path, variant)
    model = reference(folder, dtype=torch.float32, attn_implementation="eager")
    loaded = load(folder, backend="torch", dtype="float32")
    assert check_headers(SafetensorsSource(folder)) == [], "every tensor is used"
    token_ids = prompt(90)
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0]
    logits = PagedLoop(loaded).logits(token_ids, 32)
    torch.testing.assert_close(logits, expected, atol=2e-4 * float(expected.abs().max()), rtol=1e-4)
    # Of longrope the engine has the frequencies beyond the original context at every position.
    shift = 50 if "longrope" in variant else 0
    prompts = [prompt(1 + shift, seed=1), prompt(30 + shift, seed=2), prompt(40 + shift, seed=3)]
    tokens = [greedy(model, token_ids, 24) for token_ids in prompts]
    assert len({token for some in tokens for token in some}) > 6, "greedy output that hardly varies shows nothing"
    assert PagedLoop(loaded).generate(prompts, 24) == tokens


def test_every_family_has_a_variant() -> None:
    assert {kind for kind, _ in VARIANTS.values()} == FAMILIES.keys() - {"internlm3"}  # transformers has no model of it
    assert not FAMILIES.keys() & (LACKING.keys() | RECURRENT)


def test_keys_of_either_set_of_longropes_divisors_are_not_interchangeable(tmp_path: Path) -> None:
    """Within the original context of 48 a worker has the short divisors, and gives transformers' tokens; the numeric mode, by
    which workers are paired, differs."""
    folder = make_tiny_family(tmp_path, "phi3, longrope")
    short, long = (load(folder, backend="torch", dtype="float32", max_context=length) for length in (48, 49))
    assert long.numeric_mode == f"{short.numeric_mode}-long"
    model, token_ids = reference(folder, dtype=torch.float32, attn_implementation="eager"), prompt(20)
    assert PagedLoop(short).generate([token_ids], 20) == [greedy(model, token_ids, 20)]
