"""What `make bench-clients` makes of outcomes and records; the children's own protocol, with a child of this Python."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.harness import Figure
from benchmarks.peers.environments import Environment
from pdmesh.launcher.plan import LocalMeshConfig, router_plans, worker_plans
from tests.interop import loading
from tests.interop.asking import Run, figures_of
from tests.interop.cases import Case, Outcome, Stopwatch, serve
from tests.interop.catalogue import GENERATORS
from tests.interop.load.generator import LoadGenerator, Report, Task
from tests.interop.recording_router import FILE_VARIABLE
from tests.interop.records import Record, Records, recording
from tests.interop.site import Site

TTFT, TPOT = (f"{name}: difference from the mesh's own record" for name in ("TTFT", "TPOT"))
CASE = Case("Hallo", 4, 1, 0.5)


def _run(*texts: str, first_s: float = 0.1, error: str = "") -> Run:
    outcomes = tuple(Outcome(text, 5, first_s, 0.4, error if number == 0 else "") for number, text in enumerate(texts))
    return Run(outcomes, tuple(Record(0.09, 0.1) for _ in texts))


def _by_name(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.name.removeprefix("x: "): figure for figure in figures}


def test_figures() -> None:
    figures = _by_name(figures_of("x", [_run("a", "b"), _run("a", "c")], ["a", "b"]))
    assert (figures["requests completed"].value, figures["requests completed"].goal) == (4, 4)
    assert figures["answers equal to those of pdmesh's client"].value == 3
    assert (figures[TTFT].value, figures[TTFT].goal) == (10.0, 4.5)  # 5 %
    assert (figures[TPOT].value, figures[TPOT].goal) == (0.0, 5.0)
    assert figures[TTFT].peer == "seen: 100.0 ms; the mesh's own record of it: 90.0 ms"
    quick = Run((Outcome("a", 5, 0.001, 0.4),), (Record(0.01, 0.01),))
    seen = _by_name(figures_of("x", [quick], ["a"]))[TTFT]
    assert (seen.value, seen.goal) == (9.0, 2.0)  # far too low a reading fails the goal of 2 ms


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
    assert recorded.argv[:4] == (sys.executable, "-P", "-m", "tests.interop.recording_router")
    assert recorded.argv[4:] == router.argv[4:] and recorded.env[FILE_VARIABLE] == "/records"
    for worker in worker_plans(config, "redis://", [0, 1]):
        assert recording(worker, Path("/records")) is worker


SITE = Site("here:1", "http://here:2", "m", Path("/models/m"))


def _generator(tmp_path: Path, code: str, num_warm_up: int = 1) -> LoadGenerator:
    """A tool that is this Python: `code` writes records and a report."""
    environment = Environment("python", ())
    return LoadGenerator(
        "tool",
        environment,
        lambda python, task: [str(python), "-c", code, str(tmp_path / "records"), str(task.folder / "report")],
        lambda folder: Report(*json.loads((folder / "report").read_text())),
        tpot="TPOT",
        num_warm_up=num_warm_up,
    )


_TOOL = """
import json, sys
rows = [{"ttft_s": number, "tpot_s": number / 10} for number in (9, 1, 2, 3)]
open(sys.argv[1], "a").write("".join(json.dumps(row) + "\\n" for row in rows))
open(sys.argv[2], "w").write("[3, 2.05, 0.5]")
"""


@pytest.fixture
def this_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Instead of environments of their own."""
    monkeypatch.setattr(loading, "ensure_environment", lambda environment, say: Path(sys.executable))
    monkeypatch.setattr(loading, "peers_folder", lambda: tmp_path)


@pytest.mark.usefixtures("this_python")
def test_a_load_generators_report_is_compared_with_the_requests_that_it_counts(tmp_path: Path) -> None:
    records = Records(tmp_path / "records")
    (tmp_path / "records").write_text(json.dumps({"ttft_s": 50, "tpot_s": 50}) + "\n")  # of somebody before
    generator = _generator(tmp_path, _TOOL)
    figures = loading.figures_of(generator, loading.run(generator, SITE, records))
    completed, ttft, tpot = figures
    assert (completed.value, completed.goal) == (3, len(loading.PROMPTS))
    assert (ttft.name, ttft.value, ttft.goal) == (f"tool: {TTFT}", 50.0, 100.0)
    assert (tpot.name, tpot.value, tpot.goal) == (f"tool: {TPOT}", 300.0, 10.0)


@pytest.mark.usefixtures("this_python")
@pytest.mark.parametrize(
    ("code", "num_warm_up", "problem"),
    [
        (_TOOL, 0, "reports 3 requests after 0 to warm up; the mesh completed 4"),
        ("import sys; sys.exit('out of order')", 1, "ended with code 1: out of order"),
        ("pass", 1, "report"),
    ],
)
def test_a_load_generator_that_fails_says_why(tmp_path: Path, code: str, num_warm_up: int, problem: str) -> None:
    generator = _generator(tmp_path, code, num_warm_up)
    (figure,) = loading.figures_of(generator, loading.run(generator, SITE, Records(tmp_path / "records")))
    assert str(figure.value).startswith("none: ") and problem in str(figure.value)


@pytest.mark.usefixtures("this_python")
def test_a_load_generator_that_hangs_ends_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "RUN_TIMEOUT_S", 1.0)
    left = tmp_path / "left"
    hanging = replace(
        _generator(tmp_path, ""), command=lambda python, task: ["/bin/sh", "-c", f"sleep 60 & echo $! > '{left}'; wait"]
    )
    load = loading.run(hanging, SITE, Records(tmp_path / "records"))
    assert "had not ended after 1 s" in load.problem
    child = Path(f"/proc/{left.read_text().strip()}/stat")
    for _ in range(500):
        if not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.01)
    raise AssertionError("its child lives on")


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda generator: generator.name)
def test_commands_name_the_mesh_and_the_numbers(generator: LoadGenerator, tmp_path: Path) -> None:
    task = Task(SITE, ("a", "b", "c"), generator.num_warm_up, 48, tmp_path)
    command = " ".join(generator.command(Path("/env/bin/python"), task))
    assert command.startswith("/env/bin/") and "48" in command and "3" in command
    assert SITE.http in command or SITE.router in command
