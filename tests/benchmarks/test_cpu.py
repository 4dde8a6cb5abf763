"""Figures of `make bench-cpu` from made-up medians, and the prompts behind them."""

import pytest

from benchmarks.cpu.__main__ import all_with_goals, parse_args, side_by_side
from benchmarks.cpu.contest import (
    BF16,
    INT8,
    READ,
    MachineLimits,
    Measured,
    ModelSizes,
    Plan,
    context_case,
    decode_case,
    prefill_case,
    start_case,
)
from benchmarks.cpu.figures import Results, all_figures
from benchmarks.peers.environments import OURS, PEERS, PeerError

PLAN = Plan(batches=(1, 4), prefill_tokens=100, long_context=1064)
SIZES = ModelSizes(layer_weights=900, head_weights=100, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
MEDIANS = {
    READ: 1e-6,  # a thousand bytes a second
    INT8: 1e-3,
    BF16: 5e-4,
    decode_case("pdmesh int8", 1): 0.8,
    decode_case("pdmesh bf16", 1): 0.4,
    decode_case("pdmesh int8", 4): 2.0,
    decode_case("vLLM bf16", 1): 0.2,
    decode_case("llama.cpp Q8_0", 1): 0.25,
    decode_case("llama.cpp Q8_0", 4): 1.0,
    prefill_case("pdmesh int8", 100): 200.0,
    context_case("pdmesh int8", 64): 1.0,
    context_case("pdmesh int8", 1064): 101.0,
    start_case("pdmesh int8"): 1.0,
    start_case("vLLM bf16"): 20.0,
}


def results() -> Results:
    about = {"pdmesh int8": {"weight_bytes": 1000, "kv_bytes_per_token": 64.0}}
    return Results(PLAN, SIZES, [*OURS, *PEERS], MEDIANS, about, MachineLimits.of(MEDIANS))


def test_figures_follow_from_medians() -> None:
    figures = {figure.name: figure for figure in all_figures(results())}
    ratio = figures["int8 over the fastest peer: decode, batch 1"]
    assert ratio.value == pytest.approx(3.2)
    assert (ratio.goal, ratio.peer) == (2.0, "llama.cpp Q8_0, 0 tokens/s")
    assert figures["int8 over the fastest peer: decode, batch 4"].value == pytest.approx(2.0)
    assert "int8 over the fastest peer: prefill, 100 tokens" not in figures  # no peer was measured
    assert figures["process start to first token, of vLLM's"].value == pytest.approx(0.05)
    share = next(figure for name, figure in figures.items() if "pdmesh int8: batch 1, share of read bandwidth" in name)
    assert share.value == pytest.approx(0.8)
    assert share.goal == 0.65
    kv = next(figure for name, figure in figures.items() if "KV read at 1064 tokens" in name)
    assert kv.value == pytest.approx(1000 * 64 / 100 / 1000)
    assert figures["pdmesh int8 over pdmesh bf16: decode, batch 1"].value == pytest.approx(2.0)


def test_limits_follow_bytes_or_products() -> None:
    limits = MachineLimits(bytes_s=1000, int8_operations_s=1e9, bf16_operations_s=1e6)
    assert limits.decode_speed(SIZES, 1.0, batch=1, context=0) == pytest.approx(1.0)
    assert limits.decode_speed(SIZES, 2.0, batch=4, context=0) == pytest.approx(2.0)
    assert limits.decode_speed(SIZES, 2.0, batch=10**6, context=0) == pytest.approx(1e6 / 2000)
    attention_s = 4 * 2 * 8 * 10 * 11 / 2 / 1e6
    assert limits.prefill_speed(SIZES, 2.0, 10) == pytest.approx(10 / (2 * (9000 + 100) / 1e6 + attention_s))


def test_failed_case_has_a_reason_and_no_median() -> None:
    measured, calls = Measured(), 0

    def case() -> float:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise PeerError("gone")
        return 1.0

    run = measured.recorded("x", case)
    values = [run() for _ in range(3)]
    assert values[0] == 1.0
    assert calls == 2  # the third asked nobody
    assert (measured.medians, measured.failures) == ({}, {"x": "gone"})


def test_tables_name_what_is_missing() -> None:
    shown = side_by_side(["pdmesh int8", "vLLM bf16"], MEDIANS, PLAN).splitlines()
    assert shown[0].split() == ["tokens/s", "batch", "1", "batch", "4", "prefill", "100"]
    assert shown[2].split() == ["vLLM", "bf16", "0", "-", "-"]
    table = all_with_goals(all_figures(results()))
    assert "MISSED" in table
    assert "met" in table


def test_only_whole_runs_are_written() -> None:
    assert parse_args([]).is_whole
    assert parse_args([]).peers == list(PEERS)
    some = parse_args(["--peers", "llama, vllm"])
    assert ([peer.environment.name for peer in some.peers], some.is_whole) == (["vllm", "llama-cpp", "llama-cpp"], False)
    assert parse_args(["--peers", "none"]).peers == []
    with pytest.raises(SystemExit):
        parse_args(["--peers", "ollama"])
