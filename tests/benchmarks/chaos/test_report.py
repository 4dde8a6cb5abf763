"""Rounds survive their way through a file, stalls find the faults that they belong to, and figures count what they say."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos import report
from tests.chaos.plan import ANY_MOMENT, Kind
from tests.chaos.record import Dealt, Progress, Round, Tally, with_stalls


def dealt(number: int, began: float, ended: float, kind: Kind = Kind.KILL, victim: str = "decode-0") -> Dealt:
    return Dealt(number, str(kind), ANY_MOMENT, victim, began, ended)


def a_round(number: int = 0, campaign: str = "tiny", num_wrong: int = 0) -> Round:
    faults = with_stalls([dealt(0, 1.0, 2.0), dealt(1, 5.0, 6.0, Kind.STOP)], [(1.5, 2.5), (5.5, 5.75)])
    return Round(
        campaign,
        number,
        10.0,
        faults,
        [7],
        Tally(num_requests=3, waits=[(1.5, 2.5)], num_wrong=num_wrong, transports=Counter(tcp=2)),
    )


def test_a_stall_belongs_to_the_faults_that_it_overlaps() -> None:
    first, second, third = with_stalls(
        [dealt(0, 0.0, 2.0), dealt(1, 1.0, 3.0), dealt(2, 9.0, 10.0)], [(0.25, 0.75), (1.5, 3.5), (4.0, 8.0)]
    )
    assert (first.stall_s, first.own_stall_s) == (2.0, 0.5)
    assert (second.stall_s, second.own_stall_s) == (2.0, None)
    assert (third.stall_s, third.own_stall_s) == (None, None)


def test_a_round_survives_its_way_through_json() -> None:
    assert Round.from_json(json.loads(json.dumps(a_round().to_json()))) == a_round()


def test_progress_goes_on_behind_the_last_whole_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path))
    progress = Progress("plan", fresh=False)
    progress.add(a_round(0))
    progress.add(a_round(1))
    cut_off = progress.path.read_text()[:-20]
    progress.path.write_text(cut_off)
    again = Progress("plan", fresh=False)
    assert again.rounds == [a_round(0)]
    assert again.find("tiny", 0) is not None and again.find("tiny", 1) is None
    assert Progress("plan", fresh=True).rounds == []


def test_starts_beside_a_fault_of_redis_are_told_apart() -> None:
    def start(number: int, began: float, serving_s: float) -> Dealt:
        return replace(dealt(number, began, began + 1.0), serving_s=serving_s)

    redis = dealt(2, 4.5, 5.2, Kind.REDIS_STOP, "redis")
    faults = [start(0, 1.0, 0.5), start(1, 5.0, 7.0), redis]
    found = {figure.name: figure.value for figure in report.figures([replace(a_round(), dealt=faults)])}
    values = [value for name, value in found.items() if "serving" in name or "no fault of Redis" in name]
    assert values == [7.0, 0.5]


def test_figures_count_faults_requests_and_stalls() -> None:
    rounds = [a_round(0), a_round(1, report.REAL_MODEL)]
    found = {figure.name: figure.value for figure in report.figures(rounds, [Kind.KILL, Kind.STOP])}
    assert found["faults injected"] == 4
    assert found["faults of the kind that has fewest"] == 2
    assert found["faults of the kind and state that have fewest"] == 0
    assert found["faults on SmolLM2"] == 2
    assert found["requests"] == 6
    assert found["longest stall after SIGKILL of a decode worker, no other fault beside it (2 stalls)"] == 1.0
    assert report.failures(rounds) == []


def test_stalls_on_a_busy_machine_are_figures_of_their_own() -> None:
    rounds = [a_round(0, report.REAL_MODEL), a_round(1, f"{report.REAL_MODEL}, {report.BUSY}")]
    stalls = {figure.name: figure.goal for figure in report.figures(rounds) if "SIGKILL of a decode worker" in figure.name}
    name = "longest stall after SIGKILL of a decode worker, no other fault beside it (1 stalls)"
    assert stalls == {
        name: "<= 1.3 and the time to prefill",
        f"{name}, three busy loops beside the mesh": "<= 3.9 and the time to prefill",
    }


def test_whatever_must_not_be_is_a_failure() -> None:
    assert report.failures([a_round(num_wrong=2)]) == ["2 wrong tokens"]
    broken = Round("tiny", 0, 1.0, [], [], Tally(errors=["Unavailable: x"]), blocks_leaked=3, problems=["decode-0: 3 blocks"])
    assert report.failures([broken]) == ["Unavailable: x", "decode-0: 3 blocks"]


def test_the_table_names_each_kind() -> None:
    text = "\n".join(report.lines([a_round()]))
    assert "kill" in text and "stop" in text and "{'tcp': 2}" in text
