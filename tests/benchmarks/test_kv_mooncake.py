"""Mooncake's trace through meshes with and without fetching and tiers: scaled so that what requests share stays."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.kv.mooncake import LAPTOP, TENTH, VARIANTS, Shape, compare, least_computed, load, main, prompt_of
from pdmesh.simulator.workers.spec import WorkerSpec


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Eight conversations of five turns that begin alike, whose history no pool of 700 blocks holds."""
    rows = [
        {"timestamp": 60_000 * turn + 1000 * number, "input_length": 512 * (8 + 8 * turn) + 100, "output_length": 200,
         "hash_ids": [0, *range(1000 * number + 1, 1000 * number + 9 + 8 * turn)]}
        for turn in range(5) for number in range(8)
    ]  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def spec() -> WorkerSpec:
    return replace(LAPTOP, prefix_tokens=TENTH, num_blocks=700)


def test_what_requests_share_stays_when_lengths_shrink(trace: str) -> None:
    whole, tenth = (load(trace, None, block, 1.0) for block in (512, TENTH))
    assert [each.hashes for each in whole] == [each.hashes for each in tenth] and len(tenth) == 40
    for long, short in zip(whole, tenth, strict=True):
        assert short.num_input == pytest.approx(long.num_input * 48 / 512, abs=0.5) and short.num_output == 19
        assert short.num_input >= len(short.hashes) * TENTH
    assert load(trace, 10, TENTH, 2.0)[9].at_s == whole[9].at_s / 2


def test_prompts_have_equal_tokens_where_the_trace_has_equal_blocks(trace: str) -> None:
    arrivals = load(trace, None, TENTH, 1.0)
    prompts = [prompt_of(number, arrival, TENTH) for number, arrival in enumerate(arrivals)]
    assert [len(prompt) for prompt in prompts] == [arrival.num_input for arrival in arrivals]
    first, other, again = prompts[0], prompts[1], prompts[8]
    num_shared = len(arrivals[0].hashes) * TENTH
    assert first[:num_shared] == again[:num_shared] and first[num_shared:] != again[num_shared : len(first)]
    assert first[:TENTH] == other[:TENTH] and first[TENTH:] != other[TENTH:]


def test_tiers_compute_little_more_than_what_is_new(trace: str) -> None:
    arrivals = load(trace, None, TENTH, 1.0)
    report = compare(arrivals, spec(), Shape(prefill=1, decode=1))
    runs = report["simulated"]
    assert isinstance(runs, dict) and list(runs) == list(VARIANTS)
    for run in runs.values():
        assert run["num_completed"] == 40
        parts = (run[f"num_{source}_tokens"] for source in ("computed", "reused", "fetched", "restored"))
        assert sum(parts) == run["num_prompt_tokens"] == sum(arrival.num_input for arrival in arrivals)
        assert run["num_computed_tokens"] >= least_computed(arrivals, TENTH)
    assert runs["tiers"]["num_computed_tokens"] < 1.3 * least_computed(arrivals, TENTH)
    assert runs["neither"]["num_computed_tokens"] > 1.5 * least_computed(arrivals, TENTH)
    assert runs["tiers"]["ttft_p90_s"] < runs["neither"]["ttft_p90_s"]
    assert runs["neither"]["num_fetched_tokens"] == runs["tiers"]["num_fetched_tokens"] == 0
    assert runs["fetching"]["num_restored_tokens"] == 0


def test_the_command_prints_the_same_figures_each_time(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for _ in range(2):
        main([trace, "--requests", "12", "--rate", "0.5x", "--prefill", "1", "--decode", "1"])
        shown.append(json.loads(capsys.readouterr().out))
    assert shown[0] == shown[1]
    assert shown[0]["num_requests"] == 12 and shown[0]["mesh"]["prefill"] == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rate", "fast"], "--rate"),
        (["--rate", "0x"], "--rate"),
        (["--block-tokens", "50"], "prefix_tokens: must be a multiple"),
        (["--tier-bytes", "0"], "tiers: must have a size"),
        (["--speed", "missing.json"], "missing.json"),
    ],
)
def test_wrong_flags_are_named(trace: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([trace, *flags])
    assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["missing.jsonl"])
    assert "no such file" in capsys.readouterr().err
