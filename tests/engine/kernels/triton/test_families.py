"""Families whose parts the kernels compute: logits close to the reference's, and its greedy tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdmesh.engine.kernels.triton.experts.experts import GroupedExperts
from pdmesh.engine.kernels.triton.model import TritonModel
from pdmesh.engine.kernels.triton.split_kv import Splits
from pdmesh.engine.kernels.triton.support import why_not
from pdmesh.engine.loader.loader import LoadedModel
from pdmesh.engine.loader.safetensors import SafetensorsSource
from pdmesh.engine.loader.triton import TritonBuilder
from tests.engine.kernels.triton.paged import DEVICE
from tests.engine.paged_loop import PagedLoop, load
from tests.support.tiny_families import VARIANTS, make_tiny_family

pytest.importorskip("transformers")

SPLITS = Splits(16, 4)  # so that short contexts have several, which double at 64 keys
REFUSED = {
    "bias of QK norm": {"persimmon", "phi, qk norm"},
    "xielu activation": {"apertus"},
    "QK norm behind the rotary embedding": {"hunyuan_v1_dense", "hunyuan_v1_moe", "llama4", "llama4_text", "nanochat"},
    "temperature of queries": {"ministral3", "mistral3"},
}  # fmt: skip
COMPUTED = sorted(VARIANTS.keys() - set().union(*REFUSED.values()))
FEW = {"cohere, qk norm", "gemma2", "gpt_oss", "olmo3", "qwen2_moe"}  # kernels of each kind once


def variants() -> list[Any]:
    """All; those that have no part of their own are thorough."""
    return [pytest.param(name, marks=() if name in FEW else pytest.mark.thorough) for name in COMPUTED]


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=num_tokens)


def on_triton(folder: Path, reference: LoadedModel) -> LoadedModel:
    source = SafetensorsSource(folder)
    decoder = TritonBuilder(source, reference.dtype, DEVICE).build(reference.config.max_context, lambda _share, _text: None)
    return replace(reference, model=TritonModel(decoder, splits=SPLITS))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", variants())
def test_logits_and_greedy_tokens_are_those_of_the_reference(variant: str, tmp_path: Path) -> None:
    """A prompt in chunks, then prompts in one batch with decode steps of all."""
    folder = make_tiny_family(tmp_path, variant)
    reference = load(folder, backend="torch", device=DEVICE, dtype="float32")
    assert why_not(reference.config, 4) is None
    token_ids, prompts = prompt(40), [prompt(2, 1), prompt(33, 2)]
    own = on_triton(folder, reference)
    expected, found = (PagedLoop(each).logits(token_ids, 30) for each in (reference, own))
    torch.testing.assert_close(found, expected, atol=2e-4 * float(expected.abs().max()), rtol=1e-4)
    tokens, drawn = (PagedLoop(each).generate(prompts, 6) for each in (reference, own))
    assert len({token for some in tokens for token in some}) > 2, "greedy output that hardly varies shows nothing"
    assert drawn == tokens


@pytest.mark.parametrize("variant", ["gemma2", "cohere, qk norm"])
def test_logits_in_float16(variant: str, tmp_path: Path) -> None:
    """Roundings are the reference's, norms with wide weights among them."""
    folder = make_tiny_family(tmp_path, variant)
    reference = load(folder, backend="torch", device=DEVICE, dtype="float16")
    token_ids = prompt(30)
    expected, found = (PagedLoop(each).logits(token_ids, 24) for each in (reference, on_triton(folder, reference)))
    torch.testing.assert_close(found, expected, atol=0.02 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("part", REFUSED)
def test_other_parts_are_named(part: str, tmp_path: Path) -> None:
    for variant in sorted(REFUSED[part]):
        config = SafetensorsSource(make_tiny_family(tmp_path / variant, variant)).config
        assert why_not(config, 4) == f"its kernels have no {part}"


def test_steps_of_experts_as_graphs_draw_the_references_tokens(tmp_path: Path) -> None:
    """As they are loaded to serve; what the device counted is what tokens took, without padding."""
    folder = make_tiny_family(tmp_path, "qwen2_moe", num_hidden_layers=2)
    sizes = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "max_context": 64}
    loops = [PagedLoop(load(folder, backend=name, device=DEVICE, dtype="float32", **sizes)) for name in ("torch", "triton")]
    prompts = [prompt(9, 1), prompt(2, 2)]
    expected, found = (loop.generate(prompts, 5) for loop in loops)
    assert found == expected
    assert isinstance(loops[1].loaded.model, TritonModel)
    [mixture] = [mlp for mlp in loops[1].loaded.model.step.mlps if isinstance(mlp, GroupedExperts)]
    before = int(mixture.counts.sum())  # a graph that is recorded in a step runs it twice
    assert loops[1].generate(prompts, 5) == expected
    assert int(mixture.counts.sum()) - before == mixture.config.top_k * (9 + 2 + 4 * 2)


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_experts_in_words_are_close_to_the_references(form: str, tmp_path: Path) -> None:
    folder = make_tiny_family(tmp_path, "mixtral", num_hidden_layers=1, num_local_experts=3)
    reference = load(folder, backend="torch", device=DEVICE, dtype="float32")
    config = {"quantization": form, "max_num_batched_tokens": 16, "max_num_seqs": 4, "max_context": 64}
    words = load(folder, backend="triton", device=DEVICE, dtype="float32", quantization_group=32, **config)
    expected, found = (PagedLoop(each).logits(prompt(12)) for each in (reference, words))
    similarity = torch.nn.functional.cosine_similarity(found, expected)
    assert float(similarity.mean()) > {"int8": 0.995, "fp8": 0.99, "int4": 0.9}[form]


@pytest.mark.parametrize(("form", "least"), [("none", 0.999999), ("int8", 0.999)])
def test_a_bias_of_logits_is_added(form: str, least: float, tmp_path: Path) -> None:
    """To a plain head, and to one of words."""
    folder = make_tiny_family(tmp_path, "phi", num_hidden_layers=1)
    reference = load(folder, backend="torch", device=DEVICE, dtype="float32")
    sizes = {"max_num_batched_tokens": 8, "max_num_seqs": 4, "max_context": 64}
    own = load(folder, backend="triton", device=DEVICE, dtype="float32", quantization=form, **sizes)
    expected, found = (PagedLoop(each).logits(prompt(5)) for each in (reference, own))
    bias = SafetensorsSource(folder).get("lm_head.bias").to(DEVICE)
    assert float(torch.nn.functional.cosine_similarity(found, expected).min()) > least
    assert float(torch.nn.functional.cosine_similarity(found - bias, expected).max()) < least
