"""What passes only when repeated is shown, and fails the run when it happens twice in three."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import repeat

FLAKY = """
from pathlib import Path
def test_second_time():
    mark = Path({mark!r})
    seen = mark.exists()
    mark.touch()
    assert seen, "the first time"
def test_fine(): pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(FLAKY.format(mark=str(tmp_path / "mark")))
    return tmp_path


def once(folder: Path) -> int:
    (folder / "mark").unlink(missing_ok=True)
    return repeat.main(["it", "-q", "-c", str(folder / "pytest.ini"), "--rootdir", str(folder), str(folder)])


def test_once_is_shown_and_twice_in_three_runs_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert once(folder) == 0
    shown = capsys.readouterr().out
    assert "test_it::test_second_time" in shown and "the first time" in shown
    assert set(repeat.seconds(repeat.history("it").with_suffix(".xml"))) == {"test_it"}
    assert once(folder) == repeat.FAILED
    assert "so broken: test_it::test_second_time" in capsys.readouterr().out


def test_what_fails_twice_fails(folder: Path) -> None:
    (folder / "test_it.py").write_text("def test_wrong(): assert False\n")
    assert once(folder) == repeat.FAILED
    assert repeat.read(repeat.history("it")) == [[]]


def test_the_files_that_took_longest_stand_first(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    cases = [("tests.a", "one", 0.5), ("tests.b", "two", 3.0), ("tests.a", "three", 1.0)]
    listed = "".join(f'<testcase classname="{name}" name="{test}" time="{took}"/>' for name, test, took in cases)
    report.write_text(f"<testsuites><testsuite>{listed}</testsuite></testsuites>")
    assert list(repeat.seconds(report).items()) == [("tests.b", 3.0), ("tests.a", 1.5)]
    assert repeat.slowest(repeat.seconds(report)) == "seconds of 4: b 3, a 2"
    assert repeat.failures(report) == {}
