"""Families besides Llama's on the native backend: logits and greedy tokens are the torch backend's in float32, company and chunks
change no bit, and quantized weights round where the formats ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdmesh.engine.kernels.cpu.model import NativeModel, why_not
from pdmesh.engine.loader.builder import TorchBuilder
from pdmesh.engine.loader.safetensors import SafetensorsSource
from pdmesh.engine.models.decoder import DecoderModel
from tests.engine.backends import needs_native
from tests.engine.kernels.cpu.native_models import KV_DTYPES, WEIGHTS, native, prompt, reference
from tests.engine.kernels.cpu.oracle import LENGTH, errors, product
from tests.engine.kernels.cpu.schedules import PROMPTS, Run, play, runs
from tests.engine.kernels.cpu.test_model_narrow import DIVERGENCE
from tests.engine.paged_loop import PagedLoop
from tests.engine.test_tails import BUSHY, Case
from tests.engine.trees import verify
from tests.support.tiny_families import VARIANTS, make_tiny_family

pytestmark = needs_native
pytest.importorskip("transformers")

# Widths of heads and latents that fill vectors: the kernels take no others.
LATENT = {"kv_lora_rank": 48, "q_lora_rank": 32}
OVERRIDES: dict[str, dict[str, Any]] = {"gemma": {"head_dim": 32}, "deepseek_v2, groups": {"kv_lora_rank": 48}}
for _name in ("deepseek_v2", "deepseek_v3", "deepseek_v3, yarn", "glm4_moe_lite", "minicpm3", "youtu"):
    OVERRIDES[_name] = LATENT
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("apertus", {}, "its kernels have no xielu activation"),
    ("gemma", {}, "head_dim 24 is not a multiple of 16 up to 512"),
    ("minicpm3", {}, "q_lora_rank 24 is not a multiple of 16"),
    ("deepseek_v2, groups", {}, "kv_lora_rank + qk_rope_head_dim is 48, not a multiple of 32"),
    ("deepseek_v3", {"q_lora_rank": None, "qk_nope_head_dim": 24}, "qk_nope_head_dim 24 is not a multiple of 16"),
]
# Widths that groups of 32 divide.
DIVIDED = {"granitemoeshared": {"shared_intermediate_size": 64}}
DIVIDED |= {name: {"moe_intermediate_size": 64} for name in ("glm4_moe", "qwen2_moe")}
DENSE = ["cohere, qk norm", "falcon, new", "gemma2", "gemma3_text", "granite", "nemotron", "olmo2", "opt", "phi", "smollm3"]
DENSE += ["stablelm, parallel", "nanochat"]
MIXED = ["glm4_moe", "gpt_oss", "granitemoeshared", "mixtral", "phimoe", "qwen2_moe", "llama4_text"]
VARIED = [*DENSE, *MIXED, "deepseek_v2", "deepseek_v3, yarn", "minicpm3"]  # together they have every part


def family(folder: Path, variant: str, **overrides: Any) -> Path:
    return make_tiny_family(folder, variant, **{**OVERRIDES.get(variant, {}), **overrides})


@pytest.mark.parametrize("variant", sorted(VARIANTS.keys() - {"apertus"}))
def test_logits_and_greedy_tokens_are_those_of_the_torch_backend(variant: str, tmp_path: Path) -> None:
    folder, token_ids = family(tmp_path, variant), prompt(150)
    loop, torch_loop = native(folder, "float32", num_threads=2), reference(folder)
    expected = torch_loop.logits(token_ids)
    assert expected.std() > 0.1, "logits that hardly vary show nothing"
    torch.testing.assert_close(loop.logits(token_ids, 32), expected, atol=2e-5 * float(expected.abs().max()), rtol=1e-4)
    prompts = [prompt(length, seed) for seed, length in enumerate((51, 80, 90))]
    tokens = torch_loop.generate(prompts, 24)
    assert len({token for some in tokens for token in some}) > 6, "greedy output that hardly varies shows nothing"
    assert loop.generate(prompts, 24) == tokens


@pytest.mark.parametrize(("variant", "fields", "reason"), REFUSED)
def test_what_the_kernels_lack_is_named(variant: str, fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    assert why_not(SafetensorsSource(make_tiny_family(tmp_path, variant, **fields)).config, 16) == reason


@pytest.mark.parametrize(("variant", "weights"), list(zip(VARIED, ["float32", "int8", "bfloat16"] * 8, strict=False)))
def test_company_and_chunks_change_no_bit(variant: str, weights: str, tmp_path: Path) -> None:
    folder = family(tmp_path, variant)
    loops = [native(folder, weights, num_threads=threads, num_blocks=900) for threads in (1, 2)]
    alone = [loops[0].logits(tokens) for tokens in PROMPTS]

    @given(st.data())
    @settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
    def check(data: st.DataObject) -> None:
        count = data.draw(st.sampled_from([1, 2, 3, 5, 13, 40]))
        for loop in loops:
            play(loop, data.draw(st.lists(runs(), min_size=count, max_size=count)), alone)

    check()


class RoundedLinear:
    """A map whose rows and weights are rounded as the kernels round them, in float64."""

    kind = "rounded"

    def __init__(self, parts: Sequence[Tensor], bias: Tensor | None, form: str) -> None:
        self.parts, self.bias, self.form = parts, bias, form

    def __call__(self, x: Tensor) -> Tensor:
        wide = torch.cat([product(x.double(), part, self.form, 32) for part in self.parts], dim=1)
        return (wide if self.bias is None else wide + self.bias.double()).float()


class RoundedMaps:
    """Makes the maps of the torch reference (pdmesh/engine/loader/triton.py, QuantizedMaps)."""

    def __init__(self, source: SafetensorsSource, form: str) -> None:
        self.source, self.form = source, form

    def joined(self, parts: Sequence[tuple[str, int]], width: int, bias: Tensor | None) -> RoundedLinear:
        return RoundedLinear([self.source.get(f"{name}.weight") for name, _ in parts], bias, self.form)

    def head(self, weight: Tensor, bias: Tensor | None) -> RoundedLinear:
        return RoundedLinear([weight], bias, "int8")


def rounded_reference(loop: PagedLoop, folder: Path, form: str) -> PagedLoop:
    """The torch decoder whose products round as those of `loop`."""
    source = SafetensorsSource(folder)
    maps: Any = RoundedMaps(source, form)
    model = TorchBuilder(source, torch.float32, "cpu", maps).build(source.config.max_context, lambda _share, _text: None)
    return PagedLoop(replace(loop.loaded, model=model))


@pytest.mark.parametrize("variant", [*DENSE, *MIXED])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_it_rounds_where_its_formats_ask_for_it(weights: str, variant: str, tmp_path: Path) -> None:
    folder = family(tmp_path, variant, initializer_range=0.05, **DIVIDED.get(variant, {}))
    loop = native(folder, "float32", quantization=weights)
    logits, plain = loop.logits(prompt(LENGTH), 100), reference(folder).logits(prompt(LENGTH))
    off, rounding = errors(logits, rounded_reference(loop, folder, weights).logits(prompt(LENGTH))), errors(logits, plain)
    assert off.min() < 1e-5
    assert off.norm() < 0.5 * rounding.norm()


def test_tokens_of_each_expert_are_counted(tmp_path: Path) -> None:
    folder = family(tmp_path, "qwen3_moe")
    loops = native(folder, "float32", num_threads=2), reference(folder)
    for loop in loops:
        loop.logits(prompt(64))
        loop.logits(prompt(40, 1))
    model, decoder = loops[0].loaded.model, loops[1].loaded.model
    assert isinstance(model, NativeModel)
    assert isinstance(decoder, DecoderModel)
    found, expected = loops[0].loaded.expert_counts(), loops[1].loaded.expert_counts()
    assert found is not None and expected is not None
    assert torch.equal(found, expected)
    assert set(found.sum(1).tolist()) == {104 * 2}


def test_a_draft_model_of_the_first_layers_counts_its_own_tokens(tmp_path: Path) -> None:
    loop = native(family(tmp_path, "mixtral"), "float32")
    model = loop.loaded.model
    assert isinstance(model, NativeModel)
    first = PagedLoop(replace(loop.loaded, model=model.first_layers(2)))
    first.logits(prompt(20))
    counts = model.expert_counts()
    assert counts is not None and counts.sum(1).tolist() == [0, 0, 0, 0]
    loop.logits(prompt(20))
    counts = model.expert_counts()
    assert counts is not None and counts.sum(1).tolist() == [40, 40, 40, 40]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_predictions_of_latent_attention_stay_near_those_of_float32(weights: str, kv_dtype: str, tmp_path: Path) -> None:
    folder = family(tmp_path, "minicpm3", initializer_range=0.05)
    expected = reference(folder).logits(prompt(LENGTH)).log_softmax(-1)
    actual = native(folder, weights, kv_dtype=kv_dtype).logits(prompt(LENGTH)).log_softmax(-1)
    divergence = (expected.exp() * (expected - actual)).sum(-1)
    assert divergence.mean() < DIVERGENCE[weights]
    assert divergence.max() < 10 * DIVERGENCE[weights]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("variant", ["deepseek_v2", "gemma2", "gpt_oss"])
def test_company_and_chunks_change_no_bit_whatever_the_cache_holds(kv_dtype: str, variant: str, tmp_path: Path) -> None:
    folder = family(tmp_path, variant)
    loops = [native(folder, "int8", kv_dtype=kv_dtype, num_threads=threads, block_size=48) for threads in (1, 2)]
    alone = loops[0].logits(PROMPTS[0])
    schedule = [Run(0, 0, [100, 1, 1, 50, 48, 100], "all"), Run(0, 0, [1, 15, 2, 16, 200], "all"), Run(0, 1, [17, 128], "last")]
    for loop in loops:
        play(loop, schedule, [alone])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("variant", ["deepseek_v3, yarn", "gemma2", "gpt_oss", "llama4_text", "stablelm, parallel"])
def test_a_drafted_tree_has_the_bits_of_chains(variant: str, kv_dtype: str, tmp_path: Path) -> None:
    case = Case(native(family(tmp_path, variant), "int8", kv_dtype=kv_dtype, num_threads=2, num_blocks=600), {})
    for root, early, path in ((1, 0, (5, 6)), (15, 1, (0, 3, 4)), (16, 0, (0,)), (127, 1, (5, 6)), (129, 20, ())):
        token_ids = prompt(root)
        step = case.begin(token_ids, BUSHY, early=early)
        case.assert_as_chains(token_ids, step, *verify(case.loop, [step]))
        case.assert_goes_on(case.keep(token_ids, step, path), step.table)
        case.loop.release(step.table)


@pytest.mark.parametrize("variant", ["deepseek_v3, yarn", "gemma3_text", "gpt_oss", "smollm3"])
def test_a_model_of_the_first_layers(variant: str, tmp_path: Path) -> None:
    folder, loops = family(tmp_path, variant), []
    for loop in (native(folder, "float32", num_threads=2), reference(folder)):
        model = loop.loaded.model
        assert isinstance(model, NativeModel | DecoderModel)
        loops.append(PagedLoop(replace(loop.loaded, model=model.first_layers(2))))
    actual, expected = (loop.logits(prompt(90), 40) for loop in loops)
    torch.testing.assert_close(actual, expected, atol=2e-5 * float(expected.abs().max()), rtol=1e-4)
