"""What a user could name before the restructuring can be named after it."""

from __future__ import annotations

import pytest

from tests.structure import public_names
from tests.structure.public_names import Names, gone, recorded
from tests.structure.source_names import ROOT


@pytest.fixture(scope="module")
def now() -> Names:
    return public_names.collect()


@pytest.mark.parametrize("section", recorded())
def test_every_name_is_there(section: str, now: Names) -> None:
    lines = gone({section: recorded()[section]}, now)
    assert not lines, "\n".join(lines)


def test_every_section_holds_names(now: Names) -> None:
    assert [section for section, names in now.items() if not names] == []


def test_every_file_that_runs_is_a_command() -> None:
    runs = {file.stem for file in (ROOT / "pdmesh/commands").glob("*.py") if "\ndef run(" in file.read_text(encoding="utf-8")}
    assert {name.replace(" ", "_").replace("-", "_") for name in public_names.COMMANDS} == runs


def test_what_is_missing_is_named_and_additions_are_allowed() -> None:
    before: Names = {"flags": {"--port": ["integer", "default 1"], "--old": []}}
    now: Names = {"flags": {"--port": ["integer", "default 2", "choice 3"], "--new": []}, "metrics": {"pdmesh.steps": []}}
    assert gone(before, now) == [
        "flags: --port: was 'default 1', is ['integer', 'default 2', 'choice 3']",
        "flags: --old is gone",
    ]
    assert gone(before, {**now, **before}) == []
