"""Two results: what differs is found, what does not is not, and intervals hold the truth as often as they say."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from pdmesh.loadtest import result
from pdmesh.loadtest.compare import Difference, compare
from pdmesh.loadtest.record import ObjectiveBook, Objectives
from pdmesh.loadtest.result import Result, make_result
from pdmesh.loadtest.runner import RunLog
from pdmesh.loadtest.stats import Window
from pdmesh.loadtest.targets.target import Fleet
from tests.pdmesh.loadtest.records import record


def measured(seed: int, median_s: float = 0.2, num: int = 1500) -> Result:
    rng = random.Random(seed)
    records = [
        record(at_s, at_s + first, at_s + first + 0.01, phases_ms={"queue": 1.0, "compute": 2.0}, session=number)
        for number in range(num)
        for at_s, first in [(60 * number / num, rng.lognormvariate(0, 0.5) * median_s)]
    ]
    log = RunLog(records=records, fleet=[(0.0, Fleet(1, 2, 3, 4))])
    book = ObjectiveBook(Objectives(ttft_ms=400, quantile=0.9), {"batch": Objectives(ttft_ms=1000)})
    return make_result(
        log, Window(0, 60), book, target="t", model="m", started_at="now", settings={"rate": 5}, max_lateness_s=0.01
    )


def by_name(differences: list[Difference]) -> dict[str, Difference]:
    return {difference.name: difference for difference in differences}


def test_a_slower_system_is_surely_worse_and_the_other_way_round_better() -> None:
    fast, slow = measured(1, 0.2), measured(2, 0.3)
    there, back = by_name(compare(fast, slow)), by_name(compare(slow, fast))
    for name in ("TTFT p50", "TTFT p90", "E2E p50", "attainment", "goodput"):
        assert there[name].worse and back[name].better, name
    assert there["TTFT p50"].relative == pytest.approx(0.5, abs=0.1)
    assert there["TTFT p50"].low < 100 < there["TTFT p50"].high
    assert not there["TPOT p50"].worse and not there["TPOT p50"].better


def test_a_run_differs_from_itself_by_nothing() -> None:
    one = measured(1)
    for difference in compare(one, one):
        assert difference.a == difference.b and difference.low <= 0 <= difference.high and not difference.sure


def test_equal_systems_are_seldom_told_apart() -> None:
    """At 95 % one comparison in twenty errs; of 20, more than 5 would come by chance once in three thousand times."""
    sure = sum(by_name(compare(measured(2 * i, num=200), measured(2 * i + 1, num=200)))["TTFT p50"].sure for i in range(20))
    assert sure <= 5


def test_a_comparison_of_equals_calls_nothing_worse() -> None:
    """Of 40 at 5 % or less, more than 6 would come by chance once in three hundred times."""
    pairs = ((measured(10_000 + 2 * i, num=150), measured(10_001 + 2 * i, num=150)) for i in range(40))
    assert sum(any(item.worse for item in compare(a, b)) for a, b in pairs) <= 6


def queued(seed: int, num: int = 300) -> Result:
    """One server at 70 %: what follows each other met the same queue."""
    rng = random.Random(seed)
    due = free = 0.0
    records = []
    for _ in range(num):
        due += rng.expovariate(num / 60)
        free = max(free, due) + rng.expovariate(num / 60 / 0.7)
        records.append(record(due, free, free + 0.01 * rng.uniform(0.5, 2), free + 0.03))
    book = ObjectiveBook(Objectives(ttft_ms=800))
    log = RunLog(records=records)
    return make_result(log, Window(0, 60), book, target="t", model="", started_at="", settings={}, max_lateness_s=1)


def test_nor_does_one_of_equal_queues() -> None:
    """As above."""
    pairs = ((queued(2 * i), queued(2 * i + 1)) for i in range(30))
    assert sum(any(item.worse for item in compare(a, b)) for a, b in pairs) <= 5


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    one, path = measured(1, num=50), str(tmp_path / "a.json")
    result.write(one, path)
    assert result.as_json(result.read(path)) == result.as_json(one)
    assert compare(result.read(path), one) == compare(one, one)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "pdmesh-loadtest/1"}', '{"format": "pdmesh-loadtest/9"}'])
def test_what_is_no_result_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json"):
        result.read(str(path))


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("objectives_by_class", [], "objectives_by_class"),
        ("window", {"start_s": "0", "end_s": "1"}, "window.start_s"),
        ("window", {"start_s": 1, "end_s": 1}, "window"),
        ("sample", None, "sample"),
        ("settings", None, "settings"),
        ("timeline", {}, "timeline"),
    ],
)
def test_a_broken_result_is_bad_input_and_its_field_is_named(tmp_path: Path, name: str, value: object, named: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({**result.as_json(measured(1, num=20)), name: value}))
    with pytest.raises(ValueError, match=rf"x\.json: {named}"):
        result.read(str(path))


def test_a_column_of_words_is_named(tmp_path: Path) -> None:
    document = result.as_json(measured(1, num=2))
    document["sample"]["ttft"] = ["fast", "slow"]
    words = {**document, "sample": result.as_json(measured(1, num=2))["sample"]}
    words["summary"] = {**document["summary"], "ttft": {**document["summary"]["ttft"], "p50": "fast"}}
    (tmp_path / "y.json").write_text(json.dumps(words))
    with pytest.raises(ValueError, match=r"y\.json: summary\.ttft"):
        result.read(str(tmp_path / "y.json"))
    path = tmp_path / "x.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"sample\.ttft"):
        result.read(str(path))
