"""Every architecture of a GGUF file against transformers: files are made as llama.cpp's converter makes them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pdmesh.engine.loader.builder import open_checkpoint
from pdmesh.engine.loader.gguf.architectures import ARCHITECTURES
from pdmesh.engine.loader.gguf.check import check_gguf
from pdmesh.engine.loader.gguf.convert import convert_gguf_weights
from pdmesh.engine.loader.gguf.source import GgufSource
from pdmesh.engine.loader.headers import check_headers, check_model
from pdmesh.engine.loader.quantize import dequantize_int4
from pdmesh.engine.loader.safetensors import read_config
from tests.engine.paged_loop import PagedLoop, load
from tests.engine.test_model_transformers import prompt, reference
from tests.support.gguf_export import CASES, export
from tests.support.tiny_families import make_tiny_family

TOKENS = prompt(90)
_made: dict[str, Path] = {}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _made.clear()
    return tmp_path_factory.mktemp("architectures")


def made(place: Path, case: str, **how: Any) -> Path:
    """Return the file of a case, beside the folder that it was made of; each folder is made once."""
    variant, overrides = CASES[case]
    if case not in _made:
        _made[case] = make_tiny_family(place / case, variant, **overrides)
    return export(_made[case], _made[case] / f"model-{len(list(_made[case].iterdir()))}.gguf", **how)


def facts(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Return each number and word within a config, floats as a header holds them."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from facts(part, f"{name}.{key}")
    elif isinstance(value, (tuple, frozenset)):
        for index, part in enumerate(sorted(value) if isinstance(value, frozenset) else value):
            yield from facts(part, f"{name}.{index}")
    else:
        yield name, pytest.approx(value, rel=1e-6) if isinstance(value, float) else value


# A header gives the factor as a number, config.json may leave it to be computed; without scaling the other is not read.
_SAID_OTHERWISE = {".rope.attention_factor", ".rope.original_max_context", ".dtype"}


@pytest.mark.parametrize("case", sorted(CASES))
def test_tokens_are_those_of_transformers(place: Path, case: str) -> None:
    path = made(place, case)
    ours, theirs = (dict(facts(asdict(config))) for config in (GgufSource(path).config, read_config(path.parent)))
    assert {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)} <= _SAID_OTHERWISE
    model = reference(path.parent, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0]
    logits = PagedLoop(load(path, backend="torch", dtype="float32")).logits(TOKENS, 32)
    torch.testing.assert_close(logits, expected, atol=2e-4 * float(expected.abs().max()), rtol=1e-4)
    tokens = expected.argmax(-1)
    assert len(set(tokens.tolist())) > 6, "tokens that hardly vary show nothing"
    assert torch.equal(logits.argmax(-1), tokens)


def test_every_architecture_has_a_case() -> None:
    """Mistral's name is no architecture of llama.cpp, which writes those files as llama."""
    assert {case.partition(",")[0] for case in CASES} - {"mixtral"} == ARCHITECTURES.keys() - {"mistral"}


def test_the_page_lists_every_architecture() -> None:
    page = (Path(__file__).parents[3] / "docs/model_folders.md").read_text(encoding="utf-8")
    listed = page.partition("`general.architecture`)\n")[2].partition(";")[0]
    assert re.sub(r" \([^)]*\)", "", " ".join(listed.split())).split(", ") == list(ARCHITECTURES)


@pytest.mark.parametrize(
    ("case", "extra"),
    [
        ("gemma2", {"attention.scale": 0.2}), ("qwen3moe", {"expert_group_count": 4}),
        ("phi3", {"rope.scaling.attn_factor": 1.2}),
        ("gpt2", {"attention.max_alibi_bias": 8.0}), ("falcon", {"tensor_data_layout": "other"}),
        ("mixtral", {"expert_weights_norm": False}), ("olmoe", {"expert_gating_func": 2}),
        ("glm4", {"rope.dimension_sections": 4}), ("granite", {"rope.scaling.yarn_log_multiplier": 0.1}),
        ("cohere2", {"attention.value_length": 8}),
    ],
)  # fmt: skip
def test_keys_that_would_change_a_number_are_refused_by_name(place: Path, case: str, extra: dict[str, Any]) -> None:
    (key,) = extra
    with pytest.raises(ValueError, match=rf"GGUF keys? [a-z0-9-]+\.{key} "):
        check_model(made(place, case, extra=extra))


def rewritten(path: Path, change: Any, **keys: Any) -> Path:
    """Write the file anew. `change`: gets all tensors by name, and changes them; `keys`: more of the header, or other ones."""
    reader, target = gguf.GGUFReader(path), path.with_suffix(".changed.gguf")
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")) and name not in keys:
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for name, value in keys.items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    change(tensors)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return target


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("tokenizer.ggml.precompiled_charsmap", "AAAA", r"GGUF keys tokenizer\.ggml\.precompiled_charsmap are not read"),
        ("tokenizer.ggml.normalizer.lowercase", True, r"GGUF keys tokenizer\.ggml\.normalizer\.lowercase are not read"),
        ("general.type", "adapter", "general.type is 'adapter', not a model"),
        ("split.count", 3, "one of 3 parts; join them"),
        ("tokenizer.ggml.normalizer.lowercase", False, ""),
        ("tokenizer.ggml.fim_pre_token_id", 7, ""),
        ("tokenizer.chat_template.tool_use", "x", ""),
        ("quantize.imatrix.file", "x", ""),
        ("general.license", "mit", ""),
    ],
)
def test_keys_of_other_prefixes(place: Path, key: str, value: object, said: str) -> None:
    path = rewritten(made(place, "qwen2"), lambda tensors: None, **{key: value})
    if not said:
        check_model(path)
        return
    with pytest.raises(ValueError, match=said):
        check_model(path)


def same_model(one: Path, other: Path) -> bool:
    """Return whether both files hold one model, to the bit."""
    first, second = GgufSource(one), GgufSource(other)
    names = check_gguf(first)
    assert names == check_gguf(second)
    return first.config == second.config and all(torch.equal(first.get(name), second.get(name)) for name in names)


def test_yarn_of_deepseek_without_its_multiplier_scales_nothing(place: Path) -> None:
    config = GgufSource(made(place, "deepseek2, v3", extra={"rope.scaling.yarn_log_multiplier": None})).config
    assert (config.rope.rope_type, config.rope.attention_factor) == ("yarn", 1.0)
    assert config.scale == config.head_dim**-0.5


@pytest.mark.parametrize("case", ["deepseek2, v2", "deepseek2, v3"])
def test_a_latent_in_one_map_is_that_in_two(place: Path, case: str) -> None:
    assert same_model(made(place, case), made(place, case, old_latent=True))


def test_experts_one_by_one_and_gates_joined_with_ups_are_those_in_stacks(place: Path) -> None:
    path = made(place, "mixtral")

    def one_by_one(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if "_exps." in name]:
            stack = tensors.pop(name)
            tensors.update({name.replace("_exps.", f".{number}."): one for number, one in enumerate(stack)})

    def joined(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if "ffn_gate_exps" in name]:
            both = [tensors.pop(name), tensors.pop(name.replace("gate", "up"))]
            tensors[name.replace("gate", "gate_up")] = np.concatenate(both, 1)

    assert same_model(path, rewritten(path, one_by_one))
    assert same_model(path, rewritten(path, joined))


@pytest.mark.parametrize("case", ["qwen2", "ernie4_5", "phi2"])
def test_maps_in_one_are_those_apart(place: Path, case: str) -> None:
    path = made(place, case)

    def fused(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if ".attn_q." in name]:
            parts = [tensors.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
            tensors[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)

    assert same_model(path, rewritten(path, fused))


def test_layers_that_predict_further_tokens_are_left_out(place: Path) -> None:
    path = made(place, "glm4moe")

    def with_one_more(tensors: dict[str, np.ndarray]) -> None:
        tensors["blk.4.nextn.eh_proj.weight"] = np.ones((64, 128), np.float32)

    keys = {"glm4moe.block_count": 5, "glm4moe.nextn_predict_layers": 1}
    assert same_model(path, rewritten(path, with_one_more, **keys))


def test_rows_of_quantized_maps_are_taken_as_they_are(place: Path) -> None:
    """A part of a fused map, one expert of a stack: codes and numbers are those of the same rows."""
    for case in ("phi3", "granitemoe"):
        source = GgufSource(made(place, case, kind=gguf.GGMLQuantizationType.Q4_0))
        plain = GgufSource(made(place, case))
        names = [name for name in check_gguf(source) if source.get_int4(name) is not None]
        assert len(names) > 16
        for name in names:
            codes = source.get_int4(name)
            assert codes is not None and torch.equal(dequantize_int4(codes), source.get(name)), name
            assert (source.get(name) - plain.get(name)).abs().max() < 0.15 * plain.get(name).abs().max(), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_a_quantized_latent_is_expanded(place: Path, kind: str) -> None:
    """Its two maps have three dimensions each."""
    folder = make_tiny_family(place / f"latent {kind}", "deepseek_v2", qk_nope_head_dim=32, v_head_dim=32, num_hidden_layers=2)
    plain = export(folder, folder / "plain.gguf")
    quantized = export(folder, folder / "quantized.gguf", kind=gguf.GGMLQuantizationType[kind])
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    expected, found = (GgufSource(path).get(name) for path in (plain, quantized))
    assert found.shape == expected.shape and not torch.equal(found, expected)
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("case", ["gpt2", "granitemoe"])
def test_a_converted_file_is_the_same_model(place: Path, tmp_path: Path, case: str) -> None:
    """Its folder has the engine's own names, whatever those of the family are."""
    path = made(place, case)
    converted = convert_gguf_weights(path, tmp_path / "converted")
    source, _ = open_checkpoint(converted)
    assert check_headers(source) == []
    logits = [PagedLoop(load(each, backend="torch", dtype="float32")).logits(TOKENS[:20]) for each in (path, converted)]
    assert torch.equal(*logits)


def test_norms_of_heads_of_stablelm_lie_in_one_tensor(tmp_path: Path) -> None:
    """The exporter makes the file of the model without them; they are put in as llama.cpp's converter stacks them."""
    folder = make_tiny_family(tmp_path / "whole", "stablelm, qk norm")
    plain = shutil.copytree(folder, tmp_path / "plain")
    tensors = load_file(folder / "model.safetensors")
    norms = {name: tensor for name, tensor in tensors.items() if "_layernorm.norms." in name}
    save_file(
        {name: tensor for name, tensor in tensors.items() if name not in norms}, plain / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((folder / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**config, "qk_layernorm": False}))

    def with_norms(stored: dict[str, np.ndarray]) -> None:
        for layer in range(config["num_hidden_layers"]):
            for kind, count in (("q", config["num_attention_heads"]), ("k", config["num_key_value_heads"])):
                heads = [norms[f"model.layers.{layer}.self_attn.{kind}_layernorm.norms.{n}.weight"] for n in range(count)]
                stored[f"blk.{layer}.attn_{kind}_norm.weight"] = torch.stack(heads).float().numpy()

    path = rewritten(export(plain, tmp_path / "model.gguf"), with_norms)
    with torch.inference_mode():
        expected = reference(folder, dtype=torch.float32, attn_implementation="eager")(torch.tensor([TOKENS])).logits[0]
    logits = PagedLoop(load(path, backend="torch", dtype="float32")).logits(TOKENS, 32)
    torch.testing.assert_close(logits, expected, atol=2e-4 * float(expected.abs().max()), rtol=1e-4)
