"""`make bench-vllm`: what its figures say of answers. What needs vLLM is measured, not tested here."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks.harness import Figure, Kept, reached
from benchmarks.router.mixes import Cell
from benchmarks.vllm.answers import STOCK, Answer, Settings, absent, compared, figures_of
from benchmarks.vllm.child import lead
from benchmarks.vllm.demo import figures as demo_figures
from benchmarks.vllm.demo import parts_error
from benchmarks.vllm.equality import ALONE, VARIED, WAYS, Task, behind, figures, varied_name
from benchmarks.vllm.families import CASES
from benchmarks.vllm.families import figures as family_figures
from benchmarks.vllm.side import CHOSEN, ONE, PLAIN, SEPARATED, SMG, exposed_figures, exposed_share, ratio_figures, stall_figure
from pdmesh.client.types import Choice, Generation, PrefillMode, Timings, Usage
from pdmesh.engine.sampling.counter_rng import gumbel

EXPECTED = {0: Answer((1, 2, 3, 4), (5.0, 0.5, 0.25, 7.0)), 1: Answer((5, 6, 7, 8), (4.0, 3.0, 0.125, 1.0))}


def _values(listed: list[Figure]) -> dict[str, float | str]:
    return {figure.name: figure.value for figure in listed}


def test_a_difference_counts_with_the_gap_of_its_first_token() -> None:
    found = {0: Answer((1, 2, 3, 4), evidence=2), 1: Answer((5, 9, 7, 8))}
    comparison = compared(found, EXPECTED)
    assert (comparison.answers_equal, comparison.tokens_equal, comparison.margin, comparison.evidence) == (0.5, 5 / 8, 3.0, 2)
    assert compared({0: EXPECTED[0]}, EXPECTED).margin_text == "no answer differs"
    assert compared({0: Answer((1, 9, 0, 0)), 1: Answer((5, 6, 9, 0))}, EXPECTED).margin == 0.125


def test_the_lead_of_a_seeded_draw_is_that_of_its_noisy_scores() -> None:
    likeliest = [(7, -0.5), (3, -1.25), (9, -4.0)]
    assert lead(likeliest, 0.0, 1, 0) == pytest.approx(0.75)
    noise = gumbel(2026, 0, 5, torch.tensor([7, 3, 9])).tolist()
    scores = sorted((logprob + 0.8 * each for (_, logprob), each in zip(likeliest, noise, strict=True)), reverse=True)
    assert lead(likeliest, 0.8, 2026, 5) == pytest.approx(scores[0] - scores[1], abs=1e-4)


def test_a_continued_answer_keeps_the_leads_of_what_it_drew() -> None:
    assert behind((), EXPECTED[0]) == EXPECTED[0]
    assert behind((8, 9), Answer((1,), (0.5,))) == Answer((8, 9, 1), (math.inf, math.inf, 0.5))


def test_an_answer_that_is_too_short_has_no_margin_that_excuses_it() -> None:
    assert compared({0: Answer((1, 2))}, EXPECTED).margin == math.inf


def test_only_equal_answers_reach_the_goal() -> None:
    equal, tokens, margin = figures_of("way", compared({0: Answer((1, 2, 3, 0)), 1: EXPECTED[1]}, EXPECTED), STOCK)
    assert (equal.value, reached(equal), tokens.value, margin.value) == (0.5, False, 7 / 8, 7.0)
    assert reached(figures_of("way", compared(EXPECTED, EXPECTED), STOCK)[0]) is True


def test_figures_of_ways_stand_beside_the_engine_alone_and_stock_vllm() -> None:
    other = {0: Answer((1, 2, 3, 4), (1.0, 1.0, 1.0, 1.0)), 1: Answer((5, 6, 7, 0), (1.0, 1.0, 1.0, 0.75))}
    of_engine = {varied_name(ALONE, how): other for how in VARIED}
    of_stock = {varied_name(STOCK, how): EXPECTED for how in VARIED}
    found = {ALONE: EXPECTED, **of_engine, STOCK: other, **of_stock, "remote": EXPECTED}
    values = _values(list(figures("float32", "greedy", found)))
    assert values["float32, greedy, remote: answers equal"] == 1.0
    assert values["float32, greedy, remote, beside stock vLLM alone: answers equal"] == 0.5
    assert values["float32, greedy, remote: answers to which it happened"] == 0
    assert values["float32, greedy, engine alone, all prompts at once: answers equal"] == 0.5
    batched = "float32, greedy, stock vLLM alone, asked again: smallest lead of the expected token at a first difference"
    assert values[batched] == 0.75
    seeded = list(figures("float32", "seeded", {ALONE: EXPECTED, **of_engine, "remote": other}))
    assert not [figure for figure in seeded if STOCK in figure.name]


def test_ways_that_lose_a_process_ask_a_third_of_the_prompts_and_a_killed_prefill_the_longest(tmp_path: Path) -> None:
    prompts = {number: [1] * (number + 1) for number in range(26)}
    task = Task(Settings(tmp_path, "float32"), prompts, Kept(tmp_path / "kept"))
    asked = {way.name: list(task.of(way)) for way in WAYS}
    assert asked["remote"] == asked["local"] == list(range(26))
    assert asked["decode killed"] == asked["router killed and resumed"] == list(range(0, 26, 3))
    assert asked["prefill killed"] == list(range(25, 16, -1))


def test_answers_that_an_interrupted_run_kept_are_read_again(tmp_path: Path) -> None:
    task = Task(Settings(tmp_path, "float32"), {}, Kept(tmp_path / "kept"))
    task.keep("remote", "greedy", {3: Answer((1, 2), (), 7)})
    assert task.known("remote", "greedy") == {3: Answer((1, 2), (), 7)}
    assert task.known("remote", "seeded") is None


def test_a_worker_and_vllm_alone_get_the_same_settings(tmp_path: Path) -> None:
    settings = Settings(tmp_path, "bfloat16", adapters={"a": tmp_path / "a"})
    options = settings.options("stock")
    flags = dict(zip(settings.flags[::2], settings.flags[1::2], strict=True))
    assert flags["--dtype"] == options["dtype"] == "bfloat16"
    assert flags["--kv-memory-mb"] == str(options["kv_memory_mb"])
    assert flags["--vllm-arg"] in settings.vllm_args
    assert flags["--lora"] == f"a={tmp_path / 'a'}"
    assert options["adapters"] == {"a": str(tmp_path / "a")}


def _generation(text: str, ttft_ns: int, prefill_ns: int, kv_bytes: int = 10, cached: int = 0) -> Generation:
    timings = Timings(ttft_ns=ttft_ns, prefill_compute_ns=prefill_ns, kv_bytes=kv_bytes, transport="shm", mode=PrefillMode.REMOTE)
    return Generation("r", "m", 0, (Choice(0, text, (1,), None, "", ()),), Usage(1, 1, cached), timings, 0)


def test_the_demo_shows_the_worst_sum_and_what_carried_kv() -> None:
    assert parts_error(_generation("", 100, 97)) == pytest.approx(0.03)
    first, again = _generation("Paris.", 100, 97), _generation("Paris.", 100, 90, kv_bytes=5, cached=32)
    values = _values(demo_figures([first], [again]))
    assert values["TTFT: largest difference of the sum of its parts"] == pytest.approx(0.1)
    assert values["transport"] == "shm"
    assert values["KV bytes of a hand-off: fewest"] == 5
    assert values["requests sent again with cache hits"] == 1.0
    assert values["answers to the question for the capital of France that name Paris"] == 1


def test_adapters_count_only_where_they_change_answers() -> None:
    lora = CASES[0]
    plain, changed = {0: Answer((1, 2), (1.0, 1.0))}, {0: Answer((1, 3), (1.0, 0.5))}
    values = _values(list(family_figures(lora, {"": plain, "a": changed, "b": plain}, {"": plain, "a": plain, "b": plain})))
    assert values["LoRA, two adapters: answers equal"] == 1.0
    assert values["LoRA, two adapters, a: tokens equal"] == 0.5
    assert values["LoRA, two adapters: adapters whose answers differ from the model's"] == 1


def test_what_is_absent_says_why_in_one_line() -> None:
    assert absent("Mixtral", "no kernel\nfor it").value == "absent: no kernel for it"


def _cell(goodput: float) -> Cell:
    return Cell(2.0, goodput, 0.9, 100.0, 20.0, 40)


def test_pdmesh_is_compared_with_the_better_of_the_others_and_with_smg_where_it_answers() -> None:
    mix, other = CHOSEN[0], CHOSEN[1]
    cells = {
        PLAIN: {mix: _cell(1.0), other: _cell(1.0)},
        SMG: {mix: _cell(0.5), other: _cell(0.0)},
        SEPARATED: {mix: _cell(0.9), other: _cell(0.5)},
        ONE: {mix: _cell(1.1)},
    }
    values = _values(list(ratio_figures(cells, (mix, other))))
    assert values[f"{mix.name}: pdmesh over the better of plain vLLM and SMG"] == pytest.approx(1.1)
    assert values[f"{mix.name}: pdmesh over {SMG}"] == pytest.approx(2.2)
    assert values[f"{other.name}: pdmesh over the better of plain vLLM and SMG"] == 0.5
    assert f"{other.name}: pdmesh over {SMG}" not in values


def test_hand_offs_and_stalls_have_goals() -> None:
    assert [reached(figure) for figure in exposed_figures({1000: 0.04, 4000: 0.06})] == [True, False]
    handed, late = (Timings(kv_bytes=size, kv_exposed_ns=size, prefill_compute_ns=100) for size in (3, 0))
    assert exposed_share([handed, late]) == pytest.approx(0.03)
    assert exposed_share([late]) is None
    assert str(exposed_figures({1000: None})[0].value).startswith("absent: ")
    assert reached(stall_figure([(1.5, 0.5), (3.0, 0.5)])) is False
