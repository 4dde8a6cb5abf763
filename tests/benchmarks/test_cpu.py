"""Figures of `make bench-cpu` from made-up medians, the rounds with children that echo, and random weights."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.cpu import own, parts
from benchmarks.cpu.__main__ import parse_args, with_notes
from benchmarks.cpu.cases import Decode, Measured, Plan, Prefill, RandomPrompts, behind, cases_of, decode_case, prefill_case
from benchmarks.cpu.contest import Contest, Seat
from benchmarks.cpu.figures import Goals, Results, Versus, all_figures
from benchmarks.cpu.limits import BF16, INT8, READ, MachineLimits, ModelSizes
from benchmarks.cpu.own import Held, kv_figures, memory_figures
from benchmarks.cpu.parts import Found, side_by_side
from benchmarks.engine_runs import make_engine
from benchmarks.harness import Figure, Kept
from benchmarks.peers import shapes, weights
from benchmarks.peers.environments import OURS, OURS_LARGE, PEERS, PEERS_LARGE, Contestant, Environment, PeerError, Weights
from benchmarks.peers.servers import Child
from benchmarks.peers.shapes import EXPERTS_1B, LLAMA_1B, LLAMA_3B, Shape
from benchmarks.peers.weights import Subject, random
from tests.support.tiny_models import make_tiny_model

PLAN = Plan(batches=(1, 4), prefills=(100,))
SIZES = ModelSizes(layer_weights=900, head_weights=100, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
MEDIANS = {
    READ: 1e-6,  # a thousand bytes a second
    INT8: 1e-3,
    BF16: 5e-4,
    decode_case("pdmesh int8", 1): 0.8,
    decode_case("pdmesh bf16", 1): 0.4,
    decode_case("pdmesh int4", 1): 1.2,
    decode_case("pdmesh int8", 4): 2.0,
    decode_case("vLLM bf16", 1): 0.2,
    decode_case("llama.cpp Q8_0", 1): 0.25,
    decode_case("llama.cpp Q8_0", 4): 1.0,
    decode_case("llama.cpp Q4_0", 1): 0.6,
    prefill_case("pdmesh int8", 100): 200.0,
}
GOALS = Goals(
    versus={
        "pdmesh int8": Versus({1: 4.0, 4: 3.0}, {100: 2.0}, share=0.9, either=True),
        "pdmesh int4": Versus({1: 2.3}, share=0.85),
    },
    prefill_share={"pdmesh int8": 0.7},
    over={("pdmesh int4", "pdmesh int8"): 1.6},
)


def results(contestants: list[Contestant]) -> Results:
    notes = {"pdmesh int8": {"weight_bytes": 1000}}
    return Results("a model", PLAN, GOALS, SIZES, contestants, MEDIANS, notes, MachineLimits.of(MEDIANS))


def named(found: Results) -> dict[str, Figure]:
    return {figure.name.removeprefix("a model: "): figure for figure in all_figures(found)}


def test_figures_follow_from_medians() -> None:
    figures = named(results([*OURS_LARGE, *PEERS_LARGE]))
    ratio = figures["pdmesh int8 over the fastest peer: decode, batch 1"]
    assert ratio.value == pytest.approx(3.2)
    assert (ratio.goal, ratio.peer) == (None, "llama.cpp Q8_0, 0.25 tokens/s")  # bandwidth may take its place
    assert figures["pdmesh int8: batch 1, 4 times the fastest peer or 90% of read bandwidth"].value == pytest.approx(0.8 / 0.9)
    assert figures["pdmesh int8 over the fastest peer: decode, batch 4"].goal == 3.0
    assert figures["pdmesh int4 over the fastest peer: decode, batch 1"].value == pytest.approx(2.0)  # of 4 bits alone
    assert "pdmesh int8 over the fastest peer: prefill, 100 tokens" not in figures  # no peer was measured
    assert figures["pdmesh int4 over pdmesh int8: decode, batch 1"].value == pytest.approx(1.5)
    share = next(figure for name, figure in figures.items() if "pdmesh int8: batch 1, share of read bandwidth" in name)
    assert share.value == pytest.approx(0.8)


def test_where_bits_do_not_count_every_peer_is_a_rival() -> None:
    found = replace(results([*OURS, *PEERS_LARGE]), goals=replace(GOALS, by_bits=False))
    assert named(found)["pdmesh int8 over the fastest peer: decode, batch 1"].peer == "llama.cpp Q4_0, 0.6 tokens/s"


def test_limits_follow_bytes_or_products() -> None:
    limits = MachineLimits(bytes_s=1000, int8_operations_s=1e9, bf16_operations_s=1e6)
    assert limits.decode_speed(SIZES, 1.0, batch=1, context=0) == pytest.approx(1.0)
    assert limits.decode_speed(SIZES, 2.0, batch=4, context=0) == pytest.approx(2.0)
    assert limits.decode_speed(SIZES, 2.0, batch=10**6, context=0) == pytest.approx(1e6 / 2000)
    wide, narrow = (limits.decode_speed(SIZES, 1.0, batch=1, context=1000, kv_bytes_per_token=width) for width in (None, 20.0))
    assert wide == pytest.approx(1000 / (1000 + 1000 * 32))
    assert narrow == pytest.approx(1000 / (1000 + 1000 * 20))
    attention_s = 4 * 2 * 8 * 10 * 11 / 2 / 1e6
    assert limits.prefill_speed(SIZES, 2.0, 10) == pytest.approx(10 / (2 * (9000 + 100) / 1e6 + attention_s))
    weights_s = 2 * (9000 + 100) / 1e9
    assert limits.prefill_speed(SIZES, 1.0, 10) == pytest.approx(10 / (weights_s + attention_s))
    both = replace(limits, kv_operations_s=4e6)
    assert both.prefill_speed(SIZES, 1.0, 10) == pytest.approx(10 / (weights_s + attention_s / 4))
    assert both.prefill_speed(SIZES, 2.0, 10) == limits.prefill_speed(SIZES, 2.0, 10)


def test_a_step_reads_the_experts_that_its_tokens_take() -> None:
    sizes = replace(SIZES, expert_weights=800, active_share=0.125)
    assert sizes.num_weights == 1100
    assert sizes.weights_read(1) == pytest.approx(1100)
    assert sizes.weights_read(2) == pytest.approx(1000 + 800 * (1 - 0.875**2))
    assert sizes.weights_read(10**4) == pytest.approx(1800)


def test_failed_case_has_a_reason_and_no_median() -> None:
    measured, calls = Measured(), 0

    def case() -> float:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise PeerError("gone")
        return 1.0

    for number in range(3):
        if measured.wants("x", number):
            measured.take("x", case)
    assert calls == 2  # the third asked nobody
    assert (measured.medians, measured.failures) == ({}, {"x": "gone"})


def test_what_was_measured_outlives_the_process(tmp_path: Path) -> None:
    first = Measured.resumed(Kept(tmp_path))
    first.take("x", lambda: 2.0)
    first.keep()
    again = Measured.resumed(Kept(tmp_path))
    assert (again.wants("x", 0), again.wants("x", 1), again.medians) == (False, True, {"x": 2.0})


def test_a_peer_far_behind_is_not_asked_again() -> None:
    medians = {"a": 1.0, "b": 0.69, "c": 0.71}
    assert [behind(name, ["a", "b", "c"], medians, 0.7) for name in ("a", "b", "c", "d")] == [False, True, False, False]


def test_a_peer_far_behind_at_a_short_prompt_is_not_asked_for_a_long_one(tmp_path: Path, contest: Contest) -> None:
    contest.plan = replace(contest.plan, prefills=(8, 80))
    slow, quick = (seat(name, tmp_path, contest) for name in ("slow", "quick"))
    contest.seats = [slow, quick]
    for each in contest.seats:
        each.contestant = replace(each.contestant, environment=Environment("a peer's", ()))
    measured = Measured(samples={"slow: prefill, 8 tokens": [4.0], "quick: prefill, 8 tokens": [10.0]})
    assert [contest._wants(each, Prefill(80), measured, 0) for each in (slow, quick)] == [False, True]
    assert measured.failures == {"slow: prefill, 80 tokens": "not asked: behind 50% of the fastest one's speed at 8 tokens"}
    assert not contest._wants(slow, Prefill(8), measured, 1), "nor again for that one"


class Echo(Seat):
    """A seat whose process is a child that echoes."""

    def start(self, *, as_measured: bool) -> Child:
        STARTED.append(self.name)
        return Child(Path(sys.executable), "tests.benchmarks.echo_child", {"version": "7"}, self.weights / "log")


STARTED: list[str] = []


@pytest.fixture
def contest(tmp_path: Path) -> Iterator[Contest]:
    STARTED.clear()
    plan = Plan(rounds=2, batches=(1,), prompt_tokens=4, new_tokens=2, prefills=(8,))
    with Contest(Subject("none"), plan, RandomPrompts(1000), stays=False) as made:
        yield made


def seat(name: str, tmp_path: Path, contest: Contest, *, library: str = "pdmesh") -> Seat:
    folder = tmp_path / name
    folder.mkdir()
    return Echo(Contestant(name, library, "checkpoint", 1.0), None, folder, 64, stays=contest.stays)


@pytest.mark.parametrize("stays", [False, True])
def test_contestants_take_turns(tmp_path: Path, contest: Contest, monkeypatch: pytest.MonkeyPatch, *, stays: bool) -> None:
    monkeypatch.setattr("benchmarks.cpu.contest.LIMIT_CASES", {})
    monkeypatch.setattr(Decode, "measure", lambda *_: 2.0)  # an echo takes no time
    contest.stays = stays
    contest.seats = [seat(name, tmp_path, contest) for name in ("a", "b")]
    measured = Measured()
    contest.measure(measured)
    rounds_with_a_start = 1 if stays else 2
    assert ["a", "b"] * rounds_with_a_start == STARTED
    assert {name: len(values) for name, values in measured.samples.items()} == {
        case.name_of(name): 2 for name in ("a", "b") for case in cases_of(contest.plan)
    }
    assert measured.notes["a"]["first tokens"] == measured.notes["b"]["first tokens"]
    assert [one.child is not None for one in contest.seats] == [stays, stays]


def test_one_that_cannot_start_is_left_out_with_its_reason(
    tmp_path: Path, contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.cpu.contest.LIMIT_CASES", {})
    contest.seats = [seat("a", tmp_path, contest, library="llama.cpp")]

    def refuses(*_: object) -> None:
        raise PeerError("illegal instruction")

    monkeypatch.setattr(Prefill, "warm_up", refuses)
    contest.measure(Measured())
    assert contest.absent == {"a": "illegal instruction"}
    assert len(STARTED) == 2  # once with its extra buffers, once without, and not in the second round


def test_the_table_shows_what_is_missing() -> None:
    shown = side_by_side(results([*OURS_LARGE, *PEERS_LARGE])).splitlines()
    assert shown[0].split() == ["a", "model", "batch", "1", "batch", "4", "prefill", "100"]
    assert next(line for line in shown if line.startswith("vLLM")).split() == ["vLLM", "bf16", "0.2", "-", "-"]


def test_only_whole_runs_are_written() -> None:
    args, names = parse_args([])
    assert (args.is_printed, args.peers, args.rounds) == (False, None, None)
    assert names == ["smollm2", "tinyllama", "llama1b", "llama3b", "experts", "long", "accuracy", "start", "memory"]
    args, names = parse_args(["--only", "experts", "--peers", "llama, vllm"])
    assert (args.is_printed, args.peers, names) == (True, ["llama", "vllm"], ["experts"])
    assert parse_args(["--peers", "none"])[0].peers == ["none"]
    for wrong in (["--peers", "ollama"], ["--rounds", "0"], ["--only", "nothing"]):
        with pytest.raises(SystemExit):
            parse_args(wrong)


def test_a_part_replaces_what_it_said_before_and_nothing_else() -> None:
    known = {
        "figures": [1],
        "not_measured": {"smollm2: a": "old", "experts: a": "stays", "of an older form": "goes"},
        "contestants": {"smollm2: b": {}},
    }
    found = Found([], {"c": "new"}, {"d": {"version": "1"}})
    assert with_notes(known, "smollm2", found) == {
        "figures": [1],
        "not_measured": {"experts: a": "stays", "smollm2: c": "new"},
        "contestants": {"smollm2: d": {"version": "1"}},
    }


def test_kv_figures() -> None:
    speed, share = kv_figures(8, 1064, (1.0, 3.0), kv_bytes=10.0, bytes_s=80_000.0)
    assert speed.value == pytest.approx(8 / 3)
    assert share.value == pytest.approx(8 * 1000 * 10 / 80_000 / 2)
    assert "disturbed" in str(kv_figures(1, 1064, (1.0, 1.0), 10.0, 1.0)[1].value)


def test_memory_figures() -> None:
    pool = 64 * 2**20
    found = memory_figures("x", 100e6, Held(int(500e6) + pool, int(400e6)), Held(0, int(600e6) + pool))
    assert [figure.value for figure in found[2:]] == [pytest.approx(400.0), pytest.approx(200.0)]


def test_a_long_context_is_measured_on_a_real_engine(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    engine = make_engine(folder, kv_memory_mb=16, prefix_caching=False, dtype="float32", max_num_batched_tokens=64)
    prompts = RandomPrompts(engine.model_config.vocab_size)
    for _ in range(2):
        assert own.step_seconds(engine, prompts, 2, 100, 4) > 0
    engine.check_integrity()
    engine.close()


TINY = Shape(
    "tiny-experts",
    {
        **EXPERTS_1B.config, "vocab_size": 64, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    },
)  # fmt: skip


def test_random_weights_are_those_of_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer").mkdir()
    for name in shapes._TOKENIZER_FILES:
        (tmp_path / "tokenizer" / name).write_text("{}")
    monkeypatch.setattr(shapes, "ensure_model", lambda *_: tmp_path / "tokenizer")
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path / "cache"))
    folder = random(TINY).folder(lambda _: None)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {path.name for path in folder.glob("*.safetensors")}
    layer = load_file(folder / "model-layer-001.safetensors")
    gate = layer["model.layers.1.mlp.experts.3.gate_proj.weight"]
    assert (gate.shape, gate.dtype) == ((16, 32), torch.bfloat16)
    assert gate.float().std().item() == pytest.approx(32**-0.5, rel=0.2)
    sizes = ModelSizes.read(folder)
    assert (sizes.expert_weights, sizes.active_share) == (2 * 4 * 3 * 16 * 32, 0.5)
    assert torch.equal(gate, shapes._values("model.layers.1.mlp.experts.3.gate_proj.weight", (16, 32)))


@pytest.mark.parametrize("kind", ["q4_0", "q4_1"])
def test_llama_cpp_makes_4_bits_of_random_weights_in_8(kind: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its converter, which gets the kind by its name; the file is made once."""
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path))
    folder = tmp_path / "peers" / "weights"
    folder.mkdir(parents=True)
    (folder / f"{TINY.name}.Q8_0.gguf").write_bytes(b"8 bits")
    monkeypatch.setattr(Subject, "folder", lambda *_: tmp_path)
    asked = []

    def convert(_environment: Environment, module: str, arguments: Sequence[object], made: Path, *_: object) -> None:
        asked.append((module, *arguments))
        made.write_bytes(b"4 bits")

    monkeypatch.setattr(weights, "_convert", convert)
    (four,) = (each for each in PEERS_LARGE if each.weights == kind)
    assert (four.library, four.bits, four.name) == ("llama.cpp", 4, f"llama.cpp {kind.upper()}")
    for _ in range(2):
        made = weights.ensure_weights(random(TINY), kind, lambda _: None)
        assert made == folder / f"{TINY.name}.{kind.upper()}.gguf" and made.read_bytes() == b"4 bits"
    [(module, source, _target, given)] = asked
    assert (module, source, given) == ("llama", folder / f"{TINY.name}.Q8_0.gguf", kind)


@pytest.mark.parametrize(("shape", "billions"), [(LLAMA_1B, 1.24), (LLAMA_3B, 3.21), (EXPERTS_1B, 1.0)])
def test_shapes_have_the_sizes_that_they_are_named_after(shape: Shape, billions: float) -> None:
    total = sum(torch.Size(size).numel() for file in shape.tensors.values() for size in file.values())
    assert total / 1e9 == pytest.approx(billions, rel=0.02)


def test_every_part_has_goals_for_what_it_measures() -> None:
    for part in parts.PARTS.values():
        names = {contestant.name for contestant in part.ours}
        assert set(part.goals.versus) <= names
        assert {batch for versus in part.goals.versus.values() for batch in versus.decode} <= set(part.plan.batches)
        assert {length for versus in part.goals.versus.values() for length in versus.prefill} <= set(part.plan.prefills)
    assert list(PEERS) != list(PEERS_LARGE)
