"""What a user could name before the restructuring can be named after it."""

from __future__ import annotations

import pytest

from pdmesh.cli import COMMANDS, SUBCOMMANDS
from tests.structure import public_names
from tests.structure.public_names import Names, gone, recorded


@pytest.fixture(scope="module")
def now() -> Names:
    return public_names.collect()


@pytest.mark.parametrize("section", recorded())
def test_every_name_is_there(section: str, now: Names) -> None:
    lines = gone({section: recorded()[section]}, now)
    assert not lines, "\n".join(lines)


def test_every_section_holds_names(now: Names) -> None:
    assert [section for section, names in now.items() if not names] == []


def test_flags_of_every_command_are_collected() -> None:
    longer = {f"{name} {word}" for name, words in SUBCOMMANDS.items() for word in words if word != "run"}
    assert set(public_names.COMMANDS) == {*COMMANDS, *longer}


def test_what_is_missing_is_named_and_additions_are_allowed() -> None:
    before: Names = {"flags": {"--port": ["integer", "default 1"], "--old": []}}
    now: Names = {"flags": {"--port": ["integer", "default 2", "choice 3"], "--new": []}, "metrics": {"pdmesh.steps": []}}
    assert gone(before, now) == [
        "flags: --port: was 'default 1', is ['integer', 'default 2', 'choice 3']",
        "flags: --old is gone",
    ]
    assert gone(before, {**now, **before}) == []
