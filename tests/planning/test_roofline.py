"""The roofline against figures that others published, against arithmetic by hand, and against its own chords."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.planner.shapes import ShapeError, decoder_of, read_decoder
from pdmesh.planning.devices import DEVICES, Device, DeviceError, device_of, find_device
from pdmesh.planning.latency_model import (
    OVERHEAD_PER_LAYER_S,
    OVERHEAD_PER_SEQUENCE_S,
    OVERHEAD_S,
    Hardware,
    ModelShape,
    Work,
    prior_of,
)
from pdmesh.planning.roofline import ALL_REDUCE_S, RESERVED_BYTES, Decoder, Roofline

LLAMA2_7B = Decoder(32, 4096, 11008, 32, 32, 128, 32000, 4096)
LLAMA3_8B = Decoder(32, 4096, 14336, 32, 8, 128, 128256, 131072)
LLAMA3_70B = Decoder(80, 8192, 28672, 64, 8, 128, 128256, 131072)
PERFECT_A10 = replace(DEVICES["a10"], compute_share=1.0, memory_share=1.0)
H100 = DEVICES["h100-sxm"]


def test_parameters_are_those_of_the_models_names() -> None:
    """Published counts: 6.74, 8.03 and 70.6 billion; norms are left out."""
    assert LLAMA2_7B.num_parameters == pytest.approx(6.74e9, rel=0.001)
    assert LLAMA3_8B.num_parameters == pytest.approx(8.03e9, rel=0.001)
    assert LLAMA3_70B.num_parameters == pytest.approx(70.6e9, rel=0.001)


def test_kv_of_a_token_as_the_vllm_paper_has_it() -> None:
    """Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023, §3: 800 KB for
    OPT-13B (40 layers of 5120, float16)."""
    opt_13b = Decoder(40, 5120, 20480, 40, 40, 128, 50272, 2048)
    assert opt_13b.kv_bytes_per_token("float16") == 800 * 1024
    assert opt_13b.kv_bytes_per_token("fp8") == 400 * 1024
    assert LLAMA3_8B.kv_bytes_per_token("bfloat16") == 128 * 1024
    assert LLAMA3_8B.kv_bytes_per_token("int8") == 2 * 32 * 8 * (128 + 4)


def test_a_token_alone_takes_the_weights_over_the_bandwidth() -> None:
    """Baseten, "A guide to LLM inference and performance", 2023: Llama 2 7B on an A10, 14 GB / 600 GB/s, is some 23 ms."""
    roofline = Roofline(PERFECT_A10, LLAMA2_7B)
    parts = roofline.decode_parts(1, 1)
    assert parts["reading weights"] == pytest.approx(23e-3, rel=0.05)
    assert max(parts, key=lambda name: parts[name]) == "reading weights"


def test_a_prompt_takes_its_products_over_the_peak() -> None:
    """The same page: 350 tokens · 2 · 7e9 operations / 125e12 a second is 39 ms; the weights are 6.5e9, not 7e9."""
    parts = Roofline(PERFECT_A10, LLAMA2_7B).prefill_parts(350)
    assert parts["products"] == pytest.approx(39e-3 * 6.476 / 7, rel=0.01)
    assert parts["attention"] == pytest.approx(4 * 32 * 4096 * 350 * 351 / 2 / 125e12)


def test_by_hand() -> None:
    """A device of 1e12 operations and 1e10 bytes a second, a model of one layer, two of them with a link."""
    device = Device("toy", {"int8": 2e12}, 1e10, 4e9, 1e9, compute_share=0.5, memory_share=0.5, link_share=0.5)
    decoder = Decoder(1, 100, 400, 10, 2, 10, 1000, 500)
    layer, head = 100 * 10 * 2 * 12 + 3 * 100 * 400, 100_000
    assert (decoder.num_weights, decoder.num_head_weights) == (layer, head) == (144_000, 100_000)
    alone = Roofline(device, decoder, "int8", "int8", "bfloat16")
    assert alone.read_s == pytest.approx(244_000 / 5e9)
    assert alone.token_s == pytest.approx(288_000 / 1e12)
    assert alone.row_s == pytest.approx(488_000 / 1e12)
    assert alone.context_s == pytest.approx(2 * 2 * 10 * 2 / 5e9)
    assert alone.attention_s == pytest.approx(4 * 100 / 1e12)
    assert alone.overhead_s == pytest.approx(OVERHEAD_S + OVERHEAD_PER_LAYER_S)
    assert alone.kv_tokens(0.5) == int((4e9 - RESERVED_BYTES - 344_000) * 0.5 / 80)
    both = replace(alone, tensor_parallel=2)
    assert both.read_s == pytest.approx(alone.read_s / 2)
    assert both.token_s == pytest.approx(alone.token_s / 2)
    assert both.reduce_s == pytest.approx(2 * (2 * 1 / 2 * 100 * 2) / 5e8)
    assert both.overhead_s == pytest.approx(alone.overhead_s + 2 * ALL_REDUCE_S)
    assert both.kv_tokens(0.5) > 2 * alone.kv_tokens(0.5)


WINDOWS = (1024, None, 300)


@given(context=st.integers(1, 5000))
def test_a_layer_with_a_window_reads_what_it_reaches(context: int) -> None:
    decoder = Decoder(3, 100, 400, 10, 2, 10, 1000, 5000, reaches=tuple(window for window in WINDOWS if window))
    roofline, of_layer = Roofline(PERFECT_A10, decoder, context=context), 2 * 2 * 10 * 2
    seen = [[min(position, window or position) for window in WINDOWS] for position in range(1, context + 1)]
    read_s = 7 * of_layer * sum(seen[-1]) / roofline.bytes_per_s
    assert roofline.decode_parts(7, context)["reading KV"] == pytest.approx(read_s)
    operations = 4 * 10 * 10 * sum(map(sum, seen))
    assert roofline.prefill_parts(context)["attention"] == pytest.approx(operations / roofline.operations_per_s)
    model = roofline.latency(2048, 16)
    assert model.decode_s(16, 16 * context) == pytest.approx(sum(roofline.decode_parts(16, context).values()))
    assert roofline.kv_tokens(0.5) == replace(roofline, decoder=replace(decoder, reaches=())).kv_tokens(0.5), "the pool keeps all"


def test_windows_are_those_of_the_config() -> None:
    config = {**CONFIG, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 99, "max_window_layers": 1}
    decoder = decoder_of(config)
    assert decoder.reaches == (99,) * (decoder.num_layers - 1)
    hardware, shape = Hardware(1e12, 1e10), ModelShape(4, 1000, 100, 1000, 64, 16, reaches=(99, 99, 99))
    some, none = (prior_of(hardware, each, context=396) for each in (shape, replace(shape, reaches=())))
    assert some.per_context_token_s == pytest.approx(none.per_context_token_s * (1 + 3 / 4) / 4)
    assert some.per_prefill_context_s == pytest.approx(none.per_prefill_context_s * (1 + 3 / 4) / 4)


def test_the_larger_of_reading_and_computing_is_named() -> None:
    """On an H100 the two meet at some 184 rows, 989.4e12 · 0.5 / (3.35e12 · 0.8)."""
    roofline = Roofline(H100, LLAMA3_8B)
    assert "reading weights" in roofline.decode_parts(180, 1)
    assert "products" in roofline.decode_parts(190, 1)
    few, many = roofline.decode_parts(16, 100), roofline.decode_parts(16, 100_000)
    assert max(few, key=lambda name: few[name]) == "reading weights"
    assert max(many, key=lambda name: many[name]) == "reading KV"


@given(chunk=st.integers(64, 16384), batch=st.integers(1, 1024), share=st.floats(0, 1))
def test_chords_are_exact_at_their_ends_and_never_below(chunk: int, batch: int, share: float) -> None:
    roofline = Roofline(H100, LLAMA3_8B)
    model = roofline.latency(chunk, batch)
    for part in (0.0, share, 1.0):
        num = round(part * chunk)
        curve = sum(roofline.prefill_parts(num).values())
        line = model.step_s(Work(prefill_tokens=num, prefill_context=num * (num + 1) // 2))
        assert line >= curve * (1 - 1e-9)
        assert line <= curve + roofline.read_s
        rows = round(part * batch)
        curve = sum(roofline.decode_parts(rows, 1000).values())
        assert curve * (1 - 1e-9) <= model.decode_s(rows, 1000 * rows) <= curve + roofline.read_s
    assert model.decode_s(batch, 0) == pytest.approx(sum(roofline.decode_parts(batch, 0).values()))
    assert model.per_sequence_s >= OVERHEAD_PER_SEQUENCE_S


def test_a_model_that_does_not_fit_leaves_no_room() -> None:
    assert Roofline(DEVICES["a100-80g"], LLAMA3_70B).kv_tokens(0.9) == 0
    assert Roofline(DEVICES["a100-80g"], LLAMA3_70B, tensor_parallel=4).kv_tokens(0.9) > 100_000


def test_degrees_that_cannot_be_are_named() -> None:
    with pytest.raises(ValueError, match="tensor_parallel: 3 does not divide the model's 8 KV heads; give one of 1, 2, 4, 8"):
        Roofline(H100, LLAMA3_8B, tensor_parallel=3)
    with pytest.raises(ValueError, match="tensor_parallel: epyc-2-cores has no link"):
        Roofline(DEVICES["epyc-2-cores"], LLAMA3_8B, "int8", "int8", tensor_parallel=2)
    with pytest.raises(DeviceError, match="epyc-2-cores has no figure for products in float16"):
        Roofline(DEVICES["epyc-2-cores"], LLAMA3_8B, products="float16")


def test_devices_from_files(tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    path.write_text(
        json.dumps({"operations_per_s": {"bfloat16": 1e12}, "bytes_per_s": 1e11, "memory_bytes": 1e10, "memory_share": 0.9})
    )
    device = find_device(str(path))
    assert (device.name, device.memory_share, device.link_bytes_per_s) == ("toy", 0.9, 0.0)
    path.write_text("[]")
    with pytest.raises(DeviceError, match=r"toy\.json: holds no table"):
        find_device(str(path))
    with pytest.raises(DeviceError, match=r"'h100' is not known; give one of h100-sxm, "):
        find_device("h100")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"speed": 1}, "speed: unknown field"),
        ({"operations_per_s": {"int3": 1.0}}, "operations_per_s: give a table"),
        ({"operations_per_s": 5}, "operations_per_s: must be a table"),
        ({"bytes_per_s": 0}, "bytes_per_s: 0 is not more than 0"),
        ({"bytes_per_s": "fast"}, "bytes_per_s: 'fast' is not a number"),
        ({"is_gpu": "yes"}, "is_gpu: 'yes' is not true or false"),
        ({"compute_share": 1.5}, r"compute_share: 1.5 is not in \(0, 1\]"),
    ],
)
def test_what_is_no_device(change: dict[str, object], said: str) -> None:
    table = {"operations_per_s": {"bfloat16": 1e12}, "bytes_per_s": 1e11, "memory_bytes": 1e10}
    with pytest.raises(ValueError, match=said):
        device_of("toy", {**table, **change})


def test_known_devices_say_where_their_figures_are_from() -> None:
    assert all(device.source for device in DEVICES.values())
    assert all(device.bytes_per_s < device.memory_bytes * 1000 for device in DEVICES.values())


CONFIG = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip


def test_a_decoder_from_a_config() -> None:
    decoder = decoder_of(CONFIG)
    assert decoder.head_dim == 64
    assert decoder.num_parameters == pytest.approx(134.5e6, rel=0.001)  # SmolLM2-135M
    assert decoder_of({**CONFIG, "model_type": "qwen3"}).head_dim == 128


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": None}, "config.json has no 'hidden_size'"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many', not a count"),
        ({"num_key_value_heads": 4}, "num_attention_heads 9 is not a multiple"),
        ({"num_local_experts": 8}, "num_local_experts: not read for model_type 'llama'"),
        ({"model_type": "mamba2"}, "model_type 'mamba2' is not supported: its layers have a recurrent state"),
    ],
)
def test_what_is_no_decoder(change: dict[str, object], said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises(ShapeError, match=said):
        read_decoder(path)
