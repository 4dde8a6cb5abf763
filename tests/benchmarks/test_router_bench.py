"""The pure parts of the router's bench: mixes, objectives, how figures are made of what was seen, and how they merge."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import policy_cost
from benchmarks.harness import Figure, Kept, merged, reached, table
from benchmarks.router import disturbances, lending, overload, peers, placement
from benchmarks.router.__main__ import PARTS, SUITE
from benchmarks.router.meshes import Call, Seen
from benchmarks.router.mixes import MIXES, Cell, Idle, Kind, Mix, book_of, compared, figures_of, named, objectives, ratio
from pdmesh.loadtest.record import ObjectiveBook, Objectives, Outcome, Record
from pdmesh.loadtest.stats import Window
from pdmesh.v1 import mesh_pb2, worker_pb2
from router.routing.worker_reports import snapshot_of


def value_of(figures: list[Figure], name: str) -> float | str:
    return next(figure.value for figure in figures if figure.name == name)


def record(at_s: float, outcome: Outcome = Outcome.OK, *, ttft_s: float = 0.1, tenant: str = "") -> Record:
    times = array("d", [at_s + ttft_s, at_s + ttft_s + 0.1]) if outcome is Outcome.OK else array("d")
    kind = tenant or "standard"
    return Record(0, 0, kind, tenant, "standard", at_s, at_s, at_s + 0.01, outcome, 10, 2, token_times=times)


def test_the_mixes_cover_what_was_promised() -> None:
    kinds = [kind for mix in MIXES for kind in mix.kinds]
    assert len(MIXES) >= 16
    assert max(mix.turns for mix in MIXES) > 1
    assert len({mix.key for mix in MIXES}) == len(MIXES)
    assert {kind.num_input for kind in kinds} >= {32, 4000}
    assert {kind.num_output for kind in kinds} >= {16, 512}
    assert min(mix.load for mix in MIXES) == 0.3
    assert max(mix.load for mix in MIXES) == 1.1


def test_a_mix_offers_its_share_of_the_capacity_in_requests_of_its_kinds() -> None:
    mix = Mix((Kind(100, 10, 3), Kind(2000, 5, 1)), 0.5)
    workload = mix.workload(8.0)
    assert workload.arrivals.rate == 4.0
    assert [(one.share, one.input_tokens.parameters, one.output_tokens.parameters) for one in workload.classes] == [
        (3, (100,), (10,)),
        (1, (2000,), (5,)),
    ]
    assert mix.lengths == [(100, 10)] * 3 + [(2000, 5)]


def test_turns_of_conversations_are_as_many_requests_as_without_them() -> None:
    workload = Mix((Kind(100, 10),), 0.5, turns=4).workload(8.0)
    assert workload.arrivals.rate * workload.turns.parameters[0] == 4.0
    assert Mix((Kind(100, 10),), 0.5, turns=4).name == "100+10 in 4 turns at 50% of single turns"


def test_objectives_follow_the_rule_for_each_kind() -> None:
    idle = {"100+10": Idle(0.2, 0.01), "2000+5": Idle(2.0, 0.02)}
    book = book_of(Mix((Kind(100, 10), Kind(2000, 5)), 1.0), idle)
    assert book.of("100+10") == Objectives(ttft_ms=1500.0, tpot_ms=30.0)
    assert book.of("2000+5") == objectives(idle["2000+5"]) == Objectives(ttft_ms=10_500.0, tpot_ms=60.0)


@given(st.floats(0.001, 100), st.lists(st.floats(0.001, 100), min_size=1))
def test_the_ratio_is_to_the_best_of_the_others(ours: float, theirs: list[float]) -> None:
    value = ratio(ours, theirs, least=1.0)
    assert value is not None
    assert (value >= 1) == all(ours >= one for one in theirs)
    assert math.isclose(value * max(theirs), ours)


def test_where_no_system_keeps_the_objectives_there_is_no_ratio() -> None:
    assert ratio(0.0, [0.0, 0.0], least=0.1) is None
    assert ratio(1.0, [0.0], least=0.0) is None, "a window without requests"


def test_a_rival_that_kept_nothing_counts_as_one_request() -> None:
    assert ratio(1.0, [0.0, 0.0], least=0.25) == 4.0


def cells_of(**goodput: Sequence[float]) -> dict[str, list[Cell]]:
    return {key: [Cell(2.0, value, value / 2, 100.0, 10.0, 60) for value in values] for key, values in goodput.items()}


def test_figures_of_mixes_name_the_lowest_and_the_best() -> None:
    cells = {
        MIXES[0]: cells_of(mesh=[1.0], a=[0.5], b=[1.25]),
        MIXES[1]: cells_of(mesh=[1.5], a=[1.0], b=[0.2]),
        MIXES[2]: cells_of(mesh=[0.0], a=[0.0], b=[0.0]),
    }
    figures = figures_of(cells, "mesh", {"mesh": "ours", "a": "one", "b": "two"})
    assert value_of(figures, "goodput over the better aggregated: lowest of all mixes") == 0.8
    assert value_of(figures, "goodput over the better aggregated: best of all mixes") == 1.5
    assert value_of(figures, "mixes of which at least 20 requests came") == 3
    assert value_of(figures, "mixes: rounds") == 1
    assert value_of(figures, f"mix 3: {MIXES[2].name}: goodput over the better aggregated") == "no system kept the objectives"
    assert figures[0].peer == "the better of: one, two"


def test_a_mix_of_which_too_few_requests_came_is_not_told() -> None:
    few = {key: [replace(cell, num_requests=9) for cell in cells] for key, cells in cells_of(mesh=[0.1] * 2, a=[1.0] * 2).items()}
    cells = {MIXES[0]: few, MIXES[1]: cells_of(mesh=[1.5], a=[1.0]), MIXES[2]: dict[str, list[Cell]]()}
    figures = figures_of(cells, "mesh", {"mesh": "ours", "a": "one"})
    assert value_of(figures, "goodput over the better aggregated: lowest of all mixes") == 1.5
    assert value_of(figures, "mixes of which at least 20 requests came") == 1
    for number in (1, 3):
        name = f"mix {number}: {MIXES[number - 1].name}: goodput over the better aggregated"
        assert value_of(figures, name) == "not told: fewer than 20 requests in an hour of all mixes"
    assert "60 requests, of which one is 1.7%" in str(next(each.peer for each in figures if each.name.startswith("mix 2")))


def test_the_better_one_is_the_same_in_all_rounds_and_the_median_is_of_paired_ratios() -> None:
    found = compared(cells_of(mesh=[1.0, 2.0, 3.0], a=[2.0, 1.0, 2.0], b=[0.5, 3.0, 0.5]), "mesh")
    assert found.better == "a"
    assert found.ratios == (0.5, 2.0, 1.5)
    assert found.median == 1.5
    assert found.pooled == 6.0 / 5.0


def test_a_round_in_which_no_system_kept_the_objectives_is_left_out() -> None:
    found = compared(cells_of(mesh=[0.0, 1.0], a=[0.0, 2.0]), "mesh")
    assert (found.ratios, found.num_empty) == ((0.5,), 0)
    assert "kept nothing" not in found.in_words


def test_a_ratio_is_a_number_where_the_rival_kept_nothing_in_most_rounds_and_the_figure_says_so() -> None:
    cells = cells_of(mesh=[1.0, 1.0, 1.0, 1.0, 1.0], a=[0.0, 0.0, 0.0, 1.0, 2.0])
    found = compared(cells, "mesh")
    one = 2.0 / 60
    assert found.ratios == (1 / one, 1 / one, 1 / one, 1.0, 0.5)
    assert found.median == 1 / one
    assert found.num_empty == 3
    (figure,) = [each for each in figures_of({MIXES[0]: cells}, "mesh", {"mesh": "ours", "a": "one"}) if each.goal == 0.98][1:]
    assert figure.value == 1 / one
    assert str(figure.peer).endswith("it kept nothing in 3 of 5 rounds, taken as one request: at least so much")


def test_a_rival_that_kept_nothing_at_all_has_a_ratio_too() -> None:
    found = compared(cells_of(mesh=[1.0, 0.0], a=[0.0, 0.0]), "mesh")
    assert found.ratios == (1.0 / (2.0 / 60),)
    assert math.isclose(found.pooled or 0.0, 30.0)


def test_a_part_replaces_its_own_figures_and_leaves_the_others() -> None:
    def figure(name: str, value: float) -> Figure:
        return Figure(name, value, "s", "lower")

    first = merged({"machine": "here"}, "kill", [figure("k", 1.0)])
    second = merged(first, "mixes", [figure("m", 2.0)])
    third = merged(second, "kill", [figure("k", 3.0), figure("more", 4.0)])
    assert third["machine"] == "here"
    assert [(one["name"], one["value"]) for one in third["figures"]] == [("k", 3.0), ("more", 4.0), ("m", 2.0)]
    assert second["figures"][0]["value"] == 1.0


@pytest.mark.parametrize(
    ("value", "better", "goal", "expected"),
    [
        (1.0, "higher", 0.98, True),
        (0.9, "higher", 0.98, False),
        (1.5, "lower", 1.5, True),
        (1.6, "lower", 1.5, False),
        ("none", "lower", 1.5, None),
        (1.0, "lower", None, None),
    ],
)
def test_a_goal_is_reached_or_not(value: float | str, better: str, goal: float | None, expected: bool | None) -> None:
    figure = Figure("it", value, "times", better, goal)  # type: ignore[arg-type]
    assert reached(figure) is expected


def test_the_table_says_what_was_missed() -> None:
    good, bad = Figure("good", 2.0, "times", "higher", 1.0), Figure("bad one", 0.5, "times", "higher", 1.0)
    assert table([]) == []
    first, second = table([good, bad])
    assert first.startswith("good   ")
    assert first.endswith(">= 1: reached")
    assert second.endswith(">= 1: MISSED")


def test_what_was_kept_is_found_again_until_it_is_forgotten(tmp_path: Path) -> None:
    Kept(tmp_path / "part").put("cell", {"goodput": 1.5})
    kept = Kept(tmp_path / "part")
    assert kept.get("cell") == {"goodput": 1.5}
    assert kept.get("other") is None
    assert len(kept) == 1
    kept.forget()
    assert kept.get("cell") is None


def test_parts_come_in_their_order_and_unknown_ones_are_named() -> None:
    assert SUITE.chosen("") == list(PARTS)
    assert SUITE.chosen("prefix,mixes") == ["mixes", "prefix"]
    with pytest.raises(ValueError, match=r"only: there is no part 'nonsense'; there are mixes"):
        SUITE.chosen("mixes,nonsense")


def test_lending_compares_turn_by_turn() -> None:
    turns = {"two-cores": [(1.0, 100.0), (2.0, 50.0), (1.0, 100.0)], "lending": [(1.1, 90.0), (2.4, 60.0), (0.9, 100.0)]}
    turns["divided"] = [(2 * ttft_s, rate / 2) for ttft_s, rate in turns["two-cores"]]
    figures = lending.of({key: [lending.Turn(*each) for each in listed] for key, listed in turns.items()})
    assert [round(float(figure.value), 6) for figure in figures] == [1.1, 1.0, 2.0, 0.5]


def stream(start_s: float, step_s: float, count: int = 11) -> Call:
    return Call(start_s, [start_s + step_s * (number + 1) for number in range(count)], count)


def test_interference_compares_the_slowest_with_the_idle_median() -> None:
    seen = disturbances.felt([stream(0, 0.01)] * 3, [stream(0, 0.01)] * 98 + [stream(0, 0.03)] * 2, [stream(0, 1.0)])
    assert math.isclose(seen.ratio, 3.0, rel_tol=0.02)
    assert math.isclose(seen.prompt_ttft_p50, 1.0)
    with pytest.raises(ValueError, match="no stream was answered"):
        disturbances.felt([], [stream(0, 0.01)], [])


def test_prediction_without_requests_is_no_number() -> None:
    assert placement.prediction_figures_of(mesh_pb2.GetStatusResponse())[0].value == "no request was compared"
    worker = mesh_pb2.WorkerStatus(
        info=worker_pb2.WorkerInfo(worker_id="w"),
        load=worker_pb2.LoadReport(latency_model=worker_pb2.LatencyModel(num_steps=7, prefill_error=0.25, decode_error=0.125)),
    )
    told = mesh_pb2.PredictionStatus(num_requests=4, ttft_error=0.0625, tpot_error=0.03125, ttft_bias=-0.5, tpot_bias=0.5)
    figures = placement.prediction_figures_of(mesh_pb2.GetStatusResponse(workers=[worker], prediction=told))
    assert [figure.value for figure in figures] == [0.0625, 0.03125, -0.5, 0.5, 4, 0.25, 0.125, 7]


BOOK = ObjectiveBook(Objectives(ttft_ms=500, tpot_ms=200))


def test_overload_judges_admitted_and_refused_apart() -> None:
    records = [*(record(1.0) for _ in range(9)), record(2.0, ttft_s=0.9), *(record(3.0, Outcome.REFUSED) for _ in range(20))]
    seen = Seen(records, Window(0.0, 10.0), BOOK)
    assert seen.admitted_attainment == 0.9
    figures = overload.overload_figures(overload.Found(1.0, 0.6), seen, overload.Memory(100.0, 1.0))
    assert math.isclose(float(value_of(figures, "3x overload: goodput over that at capacity")), 1.5)
    assert math.isclose(float(value_of(figures, "3x overload: refusal p99, from when it was sent")), 10.0)
    assert math.isclose(float(value_of(figures, "3x overload: refused")), 2 / 3)


def test_where_all_are_refused_nothing_was_attained_and_where_none_is_there_is_no_latency() -> None:
    refused = Seen([record(1.0, Outcome.REFUSED)], Window(0.0, 10.0), BOOK)
    assert refused.admitted_attainment == 0.0
    figures = overload.overload_figures(
        overload.Found(1.0, 1.0), Seen([record(1.0)], Window(0.0, 10.0), BOOK), overload.Memory(1, 0)
    )
    assert value_of(figures, "3x overload: refusal p99, from when it was sent") == "none was refused"


def test_the_modest_tenant_is_below_its_fair_share_and_judged_alone() -> None:
    load = overload.tenants(10.0)
    modest, flooding = load.classes
    share = load.arrivals.rate / (modest.share + flooding.share)
    assert math.isclose(share * modest.share, 3.0)
    assert math.isclose(share * flooding.share, 30.0)
    records = [record(1.0, tenant="modest"), *(record(2.0, Outcome.REFUSED, tenant="flooding") for _ in range(9))]
    figures = overload.tenant_figures(Seen(records, Window(0.0, 10.0), BOOK))
    assert figures[0].value == 1.0
    assert figures[1].value == 1.0


def test_memory_grows_by_the_line_through_its_second_half() -> None:
    times = [float(number) for number in range(11)]
    assert overload.memory_of(times, [50.0 + 2 * at for at in times]) == overload.Memory(70.0, 10.0)
    assert overload.memory_of(times, [10.0 * min(at, 5) for at in times]).growth == 0.0


def halves(spared: list[disturbances.Followed], struck: list[disturbances.Followed]) -> disturbances.Halves:
    return disturbances.Halves(spared, struck)


def test_a_kill_counts_the_same_tokens_only() -> None:
    def followed(*tokens: int, resumes: int = 0, error: str = "") -> disturbances.Followed:
        return disturbances.Followed(tokens=list(tokens), num_resumes=resumes, error=error, completed=not error)

    before = halves([followed(1, 2), followed(3)], [followed(4), followed(5, 6)])
    after = halves([followed(1, 2), followed(3, resumes=1)], [followed(4, resumes=1), followed(5, 7, resumes=1)])
    values = {
        figure.name.removeprefix("one of two routers killed: "): figure.value
        for figure in disturbances.kill_figures_of(before, after)
    }
    assert values["streams of the killed router: completed with the same tokens"] == 1
    assert values["streams of the killed router: resumed on the other"] == 2
    assert values["requests of the other router: completed with the same tokens"] == 2
    assert values["requests of the other router: resumed"] == 1


def test_conversations_go_on_and_share_few_system_prompts() -> None:
    sessions = list(placement.conversations(3, 400.0))
    assert sessions == list(placement.conversations(3, 400.0))
    assert len({session.turns[0].segments[0].key for session in sessions}) == placement.NUM_PROMPTS
    questions = [turn.segments[-1].key for session in sessions for turn in session.turns]
    assert len(set(questions)) == len(questions) == placement.TURNS * len(sessions)


def test_prefixes_are_compared_by_medians() -> None:
    figures = placement.figures_of({"predict": [record(1.0, ttft_s=0.1)], "round-robin": [record(1.0, ttft_s=0.3)]})
    assert math.isclose(float(figures[0].value), 3.0)
    with pytest.raises(ValueError, match="round-robin: nothing was answered"):
        placement.figures_of({"predict": [record(1.0)], "round-robin": []})


def test_peers_are_compared_at_their_best() -> None:
    goodputs = {"mesh": {1.0: 1.0, 2.0: 1.8}, "vllm": {1.0: 0.9, 2.0: 0.1}, "smg": {1.0: 0.0, 2.0: 0.0}}
    figures = peers.figures_of(goodputs, {"mesh": "ours", "vllm": "theirs", "smg": "others"})
    assert value_of(figures, "ours over theirs: best goodput") == 2.0
    assert value_of(figures, "ours over others: best goodput") == "1.8 requests/s against none"


def test_a_report_of_the_measured_fleet_gives_the_view_that_it_is_of() -> None:
    draw = random.Random(0)
    for number in range(4):
        before = policy_cost.view(number, draw)
        load = policy_cost.report(before, draw)
        after = snapshot_of(policy_cost.described(before), load, decode=before.decode)
        assert (after.key, after.revision, after.layout) == (before.key, before.revision, before.layout)


def test_mixes_are_chosen_by_the_names_that_results_show() -> None:
    assert named([]) == MIXES
    assert [mix.name for mix in named(["420+256 at 90%", "32+64 at 110%"])] == ["420+256 at 90%", "32+64 at 110%"]
    with pytest.raises(ValueError, match=r"no mix '420'.*420\+64 at 70%"):
        named(["420"])
