"""What `make bench-clients` makes of outcomes and records; the children's own protocol, with a child of this Python."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.clients.__main__ import Run, figures_of, recording
from benchmarks.clients.cases import Case, Outcome, Stopwatch, serve
from benchmarks.clients.recording_router import FILE_VARIABLE
from benchmarks.harness import Figure
from pdmesh.launcher_plan import LocalMeshConfig, router_plans, worker_plans

CASE = Case("Hallo", 4, 1, 0.5)


def _run(*texts: str, first_s: float = 0.1, error: str = "") -> Run:
    outcomes = tuple(Outcome(text, 5, first_s, 0.4, error if number == 0 else "") for number, text in enumerate(texts))
    return Run(outcomes, tuple({"ttft_s": 0.09, "tpot_s": 0.1} for _ in texts))


def _by_name(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.name.removeprefix("x: "): figure for figure in figures}


def test_figures() -> None:
    figures = _by_name(figures_of("x", [_run("a", "b"), _run("a", "c")], ["a", "b"]))
    assert (figures["requests completed"].value, figures["requests completed"].goal) == (4, 4)
    assert figures["answers equal to those of pdmesh's client"].value == 3
    assert (figures["TTFT"].value, figures["TTFT"].goal) == (100.0, 94.5)  # 5 %
    assert (figures["TPOT"].value, figures["TPOT"].goal) == (100.0, 105.0)
    quick = Run((Outcome("a", 5, 0.001, 0.4),), ({"ttft_s": 0.01, "tpot_s": 0.01},))
    assert _by_name(figures_of("x", [quick], ["a"]))["TTFT"].goal == 12.0  # 2 ms


def test_a_character_that_was_cut_may_be_left_out() -> None:
    figures = _by_name(figures_of("x", [_run("a", "b\ufffd", "c\ufffdd")], ["a\ufffd", "b", "cd"]))
    assert figures["answers equal to those of pdmesh's client"].value == 2


def test_failures_are_counted_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    figures = _by_name(figures_of("x", [_run("a", "b", error="it broke")], ["a", "b"]))
    assert figures["requests completed"].value == 1
    assert "it broke" in capsys.readouterr().err
    absent = _by_name(figures_of("x", [Run(problem="not installed")], ["a"]))
    assert absent["requests completed"].value == "none: not installed"


def test_a_childs_protocol(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"address": "here:1", "model": "m", "cases": [asdict(CASE), asdict(Case("b", 4, 2, 0.5))]}
    monkeypatch.setattr(sys, "argv", ["child", json.dumps(options)])
    asked: list[str] = []

    def ask(address: str, model: str, case: Case) -> Outcome:
        assert (address, model) == ("here:1", "m")
        asked.append(case.content)
        if case.content == "b":
            raise ValueError("no")
        return Outcome(case.content, 1)

    serve(ask)
    outcomes = [Outcome(**json.loads(line)) for line in capsys.readouterr().out.splitlines()]
    assert asked == ["Hallo", "Hallo", "b"]
    assert [outcome.error for outcome in outcomes] == ["", "", "ValueError: no"]


def test_stopwatch() -> None:
    times: Iterator[float] = iter([10.0, 10.5, 11.0, 12.5])
    watch = Stopwatch(CASE, lambda: next(times))
    for _ in range(3):
        watch.piece()
    outcome = watch.outcome("abc", 5)
    assert (outcome.first_s, outcome.rest_s, outcome.tpot_s) == (0.5, 2.0, 0.5)


def test_only_routers_are_replaced() -> None:
    config = LocalMeshConfig(model="/models/router")
    (router,) = router_plans(config, "redis://")
    recorded = recording(router, Path("/records"))
    assert recorded.argv[:3] == (sys.executable, "-m", "benchmarks.clients.recording_router")
    assert recorded.argv[3:] == router.argv[3:] and recorded.env[FILE_VARIABLE] == "/records"
    for worker in worker_plans(config, "redis://", [0, 1]):
        assert recording(worker, Path("/records")) is worker
