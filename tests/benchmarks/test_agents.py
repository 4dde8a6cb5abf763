"""The part `agents` of `make bench-clients`: what a program says becomes figures and rows."""

from __future__ import annotations

import json
import sys

import pytest

from tests.interop.agents.checks import Asked, Place, require, serve
from tests.interop.agents.running import Tried, figures_of


def test_a_program_tells_each_check_and_its_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def right(place: Place) -> str:
        return place.model

    def wrong(place: Place) -> None:
        require(place.url == "", "not this address")

    monkeypatch.setattr(sys, "argv", ["program", json.dumps({"url": "http://a:1", "model": "m"})])
    serve({"one": right, "two": wrong})
    one, two = json.loads(capsys.readouterr().out)
    assert one == {"asked": "one", "got": "m", "problem": ""}
    assert two["problem"] == "ValueError: not this address"


def test_figures_count_right_checks_and_a_library_that_failed_has_none() -> None:
    tried = Tried("a 1", (Asked("x", "y"), Asked("z", "", "bad")))
    few, none = figures_of([tried, Tried("b 2", problem="not installed")])
    assert (few.name, few.value, few.unit, few.goal) == ("a 1: checks right", 1, "of 2", 2)
    assert none.value == "none: not installed"
    assert [row["library"] for row in tried.as_rows()] == ["a 1", "a 1"]
