"""`make bench-models`: what counts as equal, which variants run, and GGUF files with the tensors that llama.cpp expects."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.models.__main__ import QUICK_VARIANTS, variants_of
from benchmarks.models.equality import LENGTHS, Equality, equal_share, figures, prompts_of
from benchmarks.models.quantized import CHOSEN, perplexity
from benchmarks.models.speed import OURS, PEER, SHAPES, Shape
from benchmarks.models.speed import figures as speed_figures
from tests.support.gguf_export import Q8_0, export
from tests.support.quantized_checkpoints import FORMATS, write_quantized
from tests.support.tiny_families import VARIANTS, make_tiny_family

gguf = pytest.importorskip("gguf")
TINY: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"qk_nope_head_dim": 32, "kv_lora_rank": 64},
    "gemma2": {"tie_word_embeddings": True},
    "qwen3_moe": {"mlp_only_layers": []},
}
"""What the shapes that are measured have in common with llama.cpp's architectures, at the variants' own sizes."""


def test_tokens_count_up_to_the_first_difference() -> None:
    """Of 4 and 4: all, and two before one that differs; what comes behind it may be equal by chance."""
    assert equal_share([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4], [5, 6, 0, 8]]) == 6 / 8
    assert equal_share([[1, 2]], [[1]]) == 0.5
    assert equal_share([[1, 2]], [[3, 2]]) == 0


def test_a_family_counts_where_all_of_its_variants_are_equal() -> None:
    found = Equality()
    found.add("cohere", "torch engine", [[1, 2]], [[1, 2]])
    found.add("cohere, qk norm", "torch engine", [[1, 2]], [[1, 3]])
    found.add("gemma2", "torch engine", [[1, 2]], [[1, 2]])
    found.miss("gemma2", "native engine", "its kernels have no softcap")
    values = {figure.name: figure.value for figure in figures(found)}
    assert values["equal tokens: cohere, qk norm, torch engine"] == 0.5
    assert values["equal tokens: gemma2, native engine"] == "absent: its kernels have no softcap"
    assert values["families with equal tokens: torch engine"] == 1
    assert values["families with equal tokens: native engine"] == 0


def test_prompts_of_longrope_lie_beyond_the_original_context() -> None:
    assert [len(prompt) for prompt in prompts_of("gemma2")] == list(LENGTHS)
    assert min(len(prompt) for prompt in prompts_of("phi3, longrope")) > 48


def test_variants_by_name() -> None:
    assert variants_of("", quick=False) == list(VARIANTS)
    assert variants_of("", quick=True) == list(QUICK_VARIANTS)
    assert variants_of("cohere, qk norm", quick=False) == ["cohere, qk norm"]
    assert variants_of("gemma2,mixtral", quick=False) == ["gemma2", "mixtral"]
    with pytest.raises(ValueError, match="variants: there is no 'llama9'; there are arcee; cohere; "):
        variants_of("llama9", quick=False)


def test_who_is_absent_stands_with_the_reason() -> None:
    speeds = {f"{OURS}, batch 1": 300.0, f"{PEER}, batch 1": 100.0, f"{OURS}, batch 8": 900.0}
    found = {figure.name: figure.value for figure in speed_figures("sinks", speeds, {PEER: "not installed"})}
    assert found[f"decode of sinks, batch 1: times {PEER}"] == 3.0
    assert found[f"decode of sinks, batch 8: {PEER}"] == "absent: not installed"
    assert f"decode of sinks, batch 8: times {PEER}" not in found


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.variant)
def test_a_gguf_has_the_tensors_of_its_architecture(shape: Shape, tmp_path: Path) -> None:
    """Names are those of the gguf package's own list for llama.cpp's architecture; all heads, experts and layers are there."""
    folder = make_tiny_family(tmp_path / "model", shape.variant, **TINY.get(shape.variant, {}))
    reader = gguf.GGUFReader(str(export(folder, tmp_path / "model.gguf", kind=Q8_0)))
    architecture = reader.fields["general.architecture"].contents()
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[kind]}
    stems = {re.sub(r"blk\.\d+", "blk.{bid}", tensor.name.rpartition(".")[0]) for tensor in reader.tensors}
    assert stems - known == set()
    assert {"token_embd", "output_norm", "blk.{bid}.attn_norm", "blk.{bid}.attn_output"} <= stems
    assert {tensor.name for tensor in reader.tensors if tensor.tensor_type == gguf.GGMLQuantizationType.Q8_0}
    if "ffn_down_exps" in str(stems):
        experts = next(tensor for tensor in reader.tensors if "ffn_down_exps.weight" in tensor.name)
        assert int(experts.shape[-1]) == int(reader.fields[f"{architecture}.expert_count"].parts[-1][0])


def test_the_formats_that_are_measured_are_ones_that_can_be_written() -> None:
    assert CHOSEN
    assert set(CHOSEN) <= FORMATS.keys()


def test_perplexity_is_that_of_the_folders_own_numbers(tmp_path: Path) -> None:
    """A format that the kernels have as it is gives what its numbers give."""
    quantized, dense = write_quantized(
        make_tiny_family(tmp_path / "plain", "llama"), tmp_path, FORMATS["compressed int8 by output"]
    )
    windows = [[(7 * place) % 250 + 1 for place in range(64)]]
    run, weights = perplexity(quantized, windows)
    own, plain_weights = perplexity(dense, windows, quantization="none", dtype="float32")
    assert (weights, plain_weights) == ("int8", "float32")
    assert run == pytest.approx(own, rel=0.05)
