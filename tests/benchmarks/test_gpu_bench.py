"""What of the GPU benchmark needs no GPU and no triton: plan, counts, what is written; and that it says what is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.command import Gathered, PartProcess, figures_of, kept_parts, misses, table, value_of, write
from benchmarks.gpu.context import MOST_REPEATS, ROUNDS, Deadline, covered_share, repeats_for
from benchmarks.gpu.parts.mesh import last_line
from benchmarks.gpu.peers import affordable_output, window_of
from benchmarks.gpu.plan import LEAST_S, LIMIT_S, NOT_EQUAL, PARTS, RESERVE_S, Part, allotment_s, chosen, parse_args
from benchmarks.gpu.shapes import (
    BLOCK_SIZE,
    FULL,
    TINY,
    Heads,
    Sequence,
    attention_bytes,
    causal_operations,
    decode_batch,
    decode_bytes,
    prefill_operations,
    product_operations,
    ragged_prompts,
)
from benchmarks.harness import Figure
from pdmesh.engine.hardware import ModelCost
from pdmesh.engine.kernels.triton.split_kv import SPLITS, Splits
from pdmesh.engine.loader.quantize import dequantize_fp8, dequantize_int4, dequantize_int8
from tests.gpu.errors import num_differing, over_bound, over_roundings, relative_error
from tests.support.random_weights import RandomSource, engine_config, random_fp8, random_int4, random_int8

ROOT = Path(__file__).parents[2]


def test_correctness_comes_first_and_all_parts_fit_the_limit() -> None:
    names = [part.name for part in PARTS]
    assert names[:5] == ["machine", "compile", "kernels", "greedy", "decode"]
    assert names[-1] == "mesh"
    assert sum(part.budget_s for part in PARTS) <= LIMIT_S - RESERVE_S <= 472
    for name in names:
        assert (ROOT / "benchmarks/gpu/parts" / f"{name}.py").exists()


def test_parts_are_chosen_by_name_and_keep_their_order() -> None:
    assert [part.name for part in chosen(["decode", "machine"])] == ["machine", "decode"]
    assert chosen([]) == PARTS
    with pytest.raises(ValueError, match=r"only: there is no part 'decod'; there are machine, compile, kernels"):
        chosen(["decod"])


def test_a_part_gets_what_earlier_ones_left_and_the_last_ones_go_without() -> None:
    first, last = Part("first", 20, ""), Part("last", 30, "")
    assert allotment_s(first, [last], 100 + RESERVE_S) == 70
    assert allotment_s(first, [last], 40 + RESERVE_S) == 20
    assert allotment_s(first, [last], 12 + RESERVE_S) == 12
    assert allotment_s(last, [], 4 + RESERVE_S) is None
    assert allotment_s(last, [], LEAST_S + RESERVE_S) == LEAST_S


@pytest.mark.parametrize("used_share", [0.0, 0.5, 1.0])
def test_whatever_parts_take_of_their_time_the_limit_holds(used_share: float) -> None:
    now = 0.0
    for index, part in enumerate(PARTS):
        granted = allotment_s(part, PARTS[index + 1 :], LIMIT_S - now)
        assert granted is None or granted <= LIMIT_S - now - RESERVE_S
        now += used_share * (granted or 0.0)
    assert now <= LIMIT_S - RESERVE_S


def test_shapes_are_those_of_the_models() -> None:
    one, eight = FULL.config("1B"), FULL.config("8B")
    assert (RandomSource(one, "cpu", torch.bfloat16).num_elements() - one.vocab_size * one.hidden_size) == 1_235_814_400
    assert RandomSource(eight, "cpu", torch.bfloat16).num_elements() == 8_030_261_248
    assert FULL.heads["Qwen3-30B-A3B"] == Heads(32, 4, 128)
    for scale in (FULL, TINY):
        assert scale.max_context >= scale.prompt + scale.output


COST = ModelCost("triton", "bfloat16", 2, 1000, 300, 2600, 64, 4 * 2 * 4 * 16)


def test_bytes_of_a_step_and_operations_of_a_prompt() -> None:
    assert decode_bytes(COST, [10, 20]) == 2600 + 64 * 30
    # Three tokens see one, two and three keys.
    assert prefill_operations(COST, 3) == 2 * (1000 * 3 + 300) + 512 * 6
    assert product_operations(2, 3, 5) == 60


def test_bytes_of_8b_are_those_of_the_documentation() -> None:
    """docs/gpu.md: 16 GB of weights and 17 GB of keys and values for 32 sequences of 4 k tokens."""
    config = FULL.config("8B")
    per_token = config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2
    assert 32 * 4096 * per_token == pytest.approx(17.2e9, rel=0.01)


def test_bytes_of_attention() -> None:
    heads = Heads(32, 8, 128)
    keys_and_values = 2 * 65_536 * 8 * 128 * 2
    assert attention_bytes(heads, 65_536, 2, Splits(256, 1)) == keys_and_values == 268_435_456
    parts = attention_bytes(heads, 65_536, 2, SPLITS) - keys_and_values
    assert parts == 2 * 64 * 32 * 130 * 4
    assert causal_operations(heads, 2) == 4 * 32 * 128 * 3


def test_repeats_fill_the_time_and_no_more() -> None:
    assert repeats_for(0.01, 0.5) == 10
    assert repeats_for(10.0, 0.5) == 1
    assert repeats_for(0.0, 0.5) == MOST_REPEATS
    assert repeats_for(0.5 / ROUNDS / 7.5, 0.5) == 7


def test_a_deadline_says_what_may_still_begin() -> None:
    now = [100.0]
    deadline = Deadline(10.0, lambda: now[0])
    now[0] = 106.0
    assert deadline.left_s == pytest.approx(4.0)
    assert (deadline.allows(3.9), deadline.allows(4.1)) == (True, False)


def test_outputs_are_cut_to_what_time_allows() -> None:
    assert affordable_output(1000, 32, 4000.0, 60.0) == 1000
    assert affordable_output(1000, 32, 640.0, 30.0) == 400
    assert affordable_output(1000, 32, 1.0, 30.0) == 100


def test_spans_that_overlap_are_covered_once() -> None:
    assert covered_share([]) == 0.0
    assert covered_share([(0, 4), (2, 6), (8, 10)]) == pytest.approx(0.8)
    assert covered_share([(5, 10), (0, 10)]) == 1.0


def test_a_window_begins_when_everybody_has_a_token() -> None:
    window = window_of([[0.0, 1.0, 2.0, 3.0], [1.5, 2.5, 3.5]])
    assert (window.seconds, window.num_tokens) == (2.0, 4)
    with pytest.raises(ValueError, match="stamps"):
        window_of([[0.0], [1.0]])


def test_tokens_that_differ_or_are_missing_count() -> None:
    assert num_differing([[1, 2, 3], [4]], [[1, 2, 3], [4]]) == 0
    assert num_differing([[1, 9, 3], [4, 5]], [[1, 2, 3], [4]]) == 2
    assert [len(prompt) for prompt in ragged_prompts(320, 5)] == [1, 2, 5, 6, 10]


def test_errors_are_in_units_of_what_they_may_be() -> None:
    one = torch.ones(3)
    assert over_bound(one, one, torch.full((), 0.1)) == 0.0
    assert over_bound(one + 0.05, one, torch.full((), 0.1)) == pytest.approx(0.5, rel=1e-3)
    assert over_bound(torch.full((3,), torch.nan), one, one) == float("inf")
    assert over_bound(one[:2], one, one) == float("inf")
    assert over_roundings(one.bfloat16() * (1 + 2**-6), one.bfloat16(), 1.0) > 1.0
    assert relative_error(one * 1.5, one) == pytest.approx(0.5)
    assert relative_error(torch.full((3,), torch.nan), one) == float("inf")


def test_random_weights_depend_on_their_name_alone() -> None:
    source = RandomSource(TINY.config("8B"), "cpu", torch.float32)
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(source.get(name), source.get(name))
    assert not torch.equal(source.get(name), source.get(name.replace("1", "0")))
    assert source.get(name).std().item() == pytest.approx(128**-0.5, rel=0.1)
    assert source.get("model.norm.weight").mean().item() == pytest.approx(1.0, abs=0.1)


def test_random_codes_stand_for_weights_of_the_same_size() -> None:
    int8, int4 = random_int8("w", 64, 256, 0, "cpu"), random_int4("w", 64, 256, 32, "cpu")
    fp8 = random_fp8("w", 64, 256, 0, "cpu")
    for dense in (dequantize_int8(int8), dequantize_int4(int4), dequantize_fp8(fp8)):
        assert dense.std().item() == pytest.approx(1 / 16, rel=0.05)
        assert dense.mean().abs().item() < 0.01


def test_blocks_of_decode_rows_do_not_overlap_and_fit_the_pool() -> None:
    config = engine_config("cpu", max_num_seqs=3, max_context=40)
    batch = decode_batch([1, 16, 40], config.block_size)
    blocks = [block for table in batch.block_tables for block in table]
    assert len(set(blocks)) == len(blocks) == 1 + 1 + 3
    assert max(blocks) < config.num_blocks
    assert batch.slot_mapping.tolist() == [blocks[0] * 16, blocks[1] * 16 + 15, blocks[4] * 16 + 7]


def test_pages_and_the_dense_form_hold_the_same_keys() -> None:
    sequence = Sequence.random(Heads(4, 2, 8), 20, 3, "cpu", torch.float32)
    _, key, _ = sequence.dense()
    for position in (0, 15, 16, 19):
        page = sequence.kv[0, sequence.table[position // BLOCK_SIZE], position % BLOCK_SIZE]
        assert torch.equal(key[0, :, position], page)


@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("weights", ["none", "int8"])
def test_what_steps_launch_was_compiled_ahead(weights: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.benchmarks.gpu_kernels", weights]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["missing"] == []
    assert found["ahead"] > found["used"] >= 8


FIGURES = [
    Figure("reached", 80.0, "%", "higher", goal=75.0, limit=100.0),
    Figure("missed", 0.9, "ms", "lower", goal=0.8),
    Figure("absent", "did not run", "ms", "lower", goal=10.0),
    Figure("without a goal", 1.0, "x", "higher"),
]


def test_the_table_marks_goals_that_are_missed() -> None:
    assert [misses(figure) for figure in FIGURES] == [False, True, True, False]
    lines = table(FIGURES).splitlines()
    assert [("MISSED" in line, " ok" in line) for line in lines[1:]] == [
        (False, True),
        (True, False),
        (True, False),
        (False, False),
    ]


def test_the_file_has_the_format_of_the_others(tmp_path: Path) -> None:
    path = tmp_path / "new" / "gpu.json"
    parts = {
        "machine": Gathered("done", FIGURES[:1], ["a note"]),
        "decode": Gathered("cut off", FIGURES[1:], [], ["another token"]),
    }
    write(path, parts, {"name": "a GPU"})
    document = json.loads(path.read_text())
    others = json.loads((ROOT / "benchmarks/results/profile.json").read_text())
    assert document["figures"][0].keys() == others["figures"][0].keys()
    assert others["machine"].keys() < document["machine"].keys()
    assert document["machine"]["gpu"] == {"name": "a GPU"}
    assert [path.name for path in path.parent.iterdir()] == ["gpu.json"]
    assert [figure.name for figure in figures_of(parts)] == [figure.name for figure in FIGURES]
    assert kept_parts(path, {"name": "a GPU"}) == {"machine": parts["machine"]}, "what was cut off is measured again"
    assert kept_parts(path, {"name": "another GPU"}) == {}
    assert kept_parts(tmp_path / "none.json", {"name": "a GPU"}) == {}


def test_whole_lines_of_a_part_that_was_killed_are_kept(tmp_path: Path) -> None:
    sink, gathered = tmp_path / "part.jsonl", Gathered()
    lines = [{"figure": {**FIGURES[0].__dict__}}, {"note": "n"}, {"failure": "f"}]
    sink.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"figure": {"na')
    gathered.read(sink)
    gathered.read(tmp_path / "of a part that never began")
    assert (gathered.figures, gathered.notes, gathered.failures) == ([FIGURES[0]], ["n"], ["f"])
    assert (value_of({"a": gathered}, "reached"), value_of({"a": gathered}, "another")) == (80.0, None)


def test_what_becomes_of_a_part() -> None:
    def run(program: str, seconds: float = 60.0) -> str:
        return PartProcess([sys.executable, "-S", "-c", program]).run(seconds)

    assert run("") == "done"
    assert run(f"raise SystemExit({NOT_EQUAL})") == "something was not equal"
    assert run("raise SystemExit(7)") == "failed with status 7; its output says why"
    assert run("import os; os.kill(os.getpid(), 11)") == "ended by signal 11"


def test_a_part_whose_time_is_over_goes_with_what_it_started(tmp_path: Path) -> None:
    note = tmp_path / "child"
    program = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(note)!r}).write_text(str(child.pid))\n"
        "time.sleep(600)"
    )
    assert PartProcess([sys.executable, "-S", "-c", program]).run(1.0) == "cut off after 1 s"
    if note.exists():  # a busy machine may not have come so far
        assert _is_gone(int(note.read_text()))


def _is_gone(pid: int) -> bool:
    """Ended, whether or not somebody has taken note of it."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return False


def test_flags_that_cannot_be_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    cases = {"--device cpu": "--tiny: needed", "--only nothing": "only: there is no part 'nothing'", "--limit 0": "--limit: 0"}
    for flags, words in cases.items():
        with pytest.raises(SystemExit):
            parse_args(flags.split())
        assert words in capsys.readouterr().err
    assert [part.name for part in parse_args(["--only", "mesh,machine"]).parts] == ["machine", "mesh"]


def test_the_reason_of_a_mesh_that_does_not_start_is_its_last_line() -> None:
    assert (
        last_line("prefill-0 ended:\n  ValueError: the pool is not in CPU memory\n\n")
        == "ValueError: the pool is not in CPU memory"
    )
    assert last_line(" \n") == "no reason was given"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so nothing is missing")
def test_without_a_gpu_the_script_says_so_in_one_line() -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    ran = subprocess.run([ROOT / "benchmarks/gpu/run.sh"], env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 3
    assert ran.stdout == ""
    [line] = ran.stderr.splitlines()
    assert line.startswith("missing: a CUDA device; torch ")


def test_without_torch_the_script_says_so_in_one_line(tmp_path: Path) -> None:
    python = tmp_path / "python"  # an interpreter without any package
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    ran = subprocess.run(
        [ROOT / "benchmarks/gpu/run.sh"], env={**os.environ, "PYTHON": str(python)}, capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout) == (3, "")
    [line] = ran.stderr.splitlines()
    assert line.startswith("missing: torch, triton, transformers, numpy, safetensors")
