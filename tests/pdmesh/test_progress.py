"""What is shown while a model is fetched, and while a load test runs: on a terminal and in a log."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pdmesh.loadtest.progress import Progress
from pdmesh.loadtest.record import Outcome
from pdmesh.loadtest.runner import RunLog
from pdmesh.models.download import StderrProgress
from tests.pdmesh.loadtest.records import record
from tests.support.terminal import Terminal

STEPS = ("fetching x", "downloading x: 10 of 90 MB", "downloading x: 90 of 90 MB", "converting x: 5 %")


def fetched(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    progress = StderrProgress()
    for message in STEPS:
        progress(message)
        print("elsewhere")
    progress.close()
    return stream.getvalue()


def test_a_log_gets_a_line_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetched(io.StringIO(), monkeypatch).splitlines() == [STEPS[0], STEPS[1], STEPS[3]]


def test_a_terminal_keeps_the_last_line_of_each_step(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown = fetched(Terminal(), monkeypatch)
    assert STEPS[1] in shown
    assert [line for line in STEPS if f"{line}\n" in shown] == [STEPS[0], STEPS[2], STEPS[3]]
    assert capsys.readouterr().out == "elsewhere\n" * len(STEPS)


def stub_runner() -> Any:
    records = [record(0, 0.1, 0.2), record(0.5, outcome=Outcome.TIMEOUT, error="late")]
    return SimpleNamespace(log=RunLog(started_at=1.0, records=records), now_s=lambda: 30.0)


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
async def test_the_last_line_of_a_run_stays(stream: type[io.StringIO]) -> None:
    written = stream()
    async with Progress(written, stub_runner(), 60.0, "label: "):
        pass
    assert written.getvalue().startswith("label: 30/60 s · ") and "1 ok · 1 failed" in written.getvalue()


def test_a_terminal_shows_how_much_of_a_run_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    written = Terminal()
    progress = Progress(written, stub_runner(), 60.0)
    with progress._bar:
        progress._show()
    assert "━━━━━      30/60 s · 0.0 answers/s" in written.getvalue()
