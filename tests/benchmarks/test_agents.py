"""The part `agents` of `make bench-clients`: what a program says becomes figures and rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.interop.agents import node, running
from tests.interop.agents.catalogue import LIBRARIES, Library
from tests.interop.agents.checks import Asked, Place, require, serve
from tests.interop.agents.running import Tried, figures_of
from tests.interop.site import Site


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


SITE = Site("127.0.0.1:1", "http://127.0.0.1:1", "m", Path("/nowhere"))


def in_path(monkeypatch: pytest.MonkeyPatch, folder: Path, **programs: str) -> None:
    """Makes these programs of a shell the only ones of their names."""
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("PDMESH_CACHE", str(folder / "cache"))


def test_packages_of_npm_are_installed_once_and_their_program_is_beside_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer = json.dumps([{"asked": "a", "got": "b", "problem": ""}])
    in_path(monkeypatch, tmp_path, npm=f"echo $@ >> {tmp_path}/calls; mkdir node_modules", node=f"test -f $1 && echo '{answer}'")
    (library,) = [each for each in LIBRARIES if each.is_node]
    for _ in range(2):
        assert running.run(library, SITE) == Tried(library.name, (Asked("a", "b"),))
    assert (tmp_path / "calls").read_text() == "ci --ignore-scripts --no-audit --no-fund\n"
    assert library.name == f"ai {json.loads((node.SOURCE / 'package.json').read_text())['dependencies']['ai']} (npm)"


def test_a_library_that_cannot_be_installed_is_named_and_others_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_path(monkeypatch, tmp_path, npm="echo no such package; exit 1", node="exit 1")
    monkeypatch.setattr(running, "LIBRARIES", (Library("one", "ai.mjs"), Library("two", "no_such_program")))
    one, two = running.run_all(SITE)
    assert one == Tried("one", problem="not installed: npm ci failed: no such package")
    assert two.name == "two" and "No module named" in two.problem


def test_a_machine_without_node_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert running.run(Library("one", "ai.mjs"), SITE).problem == "needs node and npm (Debian: nodejs, npm)"


def test_the_lock_file_names_no_registry() -> None:
    lock = (node.SOURCE / "package-lock.json").read_text()
    assert "resolved" not in lock and "funding" not in lock and "://" not in lock
