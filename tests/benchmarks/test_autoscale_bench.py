"""`python -m benchmarks.autoscale`: its parts by name, its traces by folder, coroutines or not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.autoscale import __main__ as autoscale_main
from benchmarks.autoscale.scenario import Options
from benchmarks.autoscale.zero import Seen, figures_of
from benchmarks.harness import Figure, Suite, run_parts

FIGURE = Figure("a", 1.0, "times", "lower")


def test_parts_keep_their_order_and_unknown_ones_are_named() -> None:
    assert autoscale_main.SUITE.chosen("") == list(autoscale_main.PARTS)
    assert autoscale_main.SUITE.chosen("speed,simulated") == ["simulated", "speed"]
    with pytest.raises(ValueError, match="only: there is no part 'nothing'; there are simulated"):
        autoscale_main.SUITE.chosen("speed,nothing")


def test_a_folder_of_traces_has_to_be_there(tmp_path: Path) -> None:
    assert autoscale_main.traces_of("") is None
    assert autoscale_main.traces_of(str(tmp_path)) == tmp_path
    with pytest.raises(ValueError, match=r"traces: .*nowhere is no folder"):
        autoscale_main.traces_of(str(tmp_path / "nowhere"))


def test_parts_are_coroutines_or_not_and_one_that_fails_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def later(options: Options) -> list[Figure]:
        return [FIGURE]

    def fails(options: Options) -> list[Figure]:
        raise RuntimeError("no luck")

    parts = {"now": lambda options: [FIGURE], "later": later, "fails": fails}
    monkeypatch.setattr("importlib.import_module", lambda name: SimpleNamespace(figures=parts[name.rpartition(".")[2]]))
    told: list[str] = []
    monkeypatch.setattr(Suite, "save", lambda suite, part, figures: told.append(part))
    measure, keep = autoscale_main.measure(Options()), autoscale_main.SUITE.save
    assert run_parts(["fails", "now", "later"], measure, keep) == {"fails": "RuntimeError: no luck"}
    assert told == ["now", "later"]
    with pytest.raises(SystemExit) as ended:
        autoscale_main.SUITE.main(["now"], autoscale_main.measure(Options(quick=True)), quick=True)
    assert ended.value.code == 0 and told == ["now", "later"]


def test_requests_from_zero_that_all_fail_are_a_figure() -> None:
    failed, ttft, over = figures_of(Seen(num_asked=3, failures=["late"] * 3))
    assert (failed.value, failed.unit) == (3, "of 3")
    assert ttft.value == over.value == "absent: no request was answered"
    assert figures_of(Seen(waits_s=[2.0], num_asked=1))[2].value == "absent: no worker was started"
    assert [figure.value for figure in figures_of(Seen([3.0, 2.0, 4.0], [2.0], 3))] == [0, 3.0, 1.5]
