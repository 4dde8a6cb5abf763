"""Programs that are started by name."""

import pkgutil

import pytest

from pdmesh.runtime import process


@pytest.mark.parametrize("program", sorted(process.PROGRAMS))
def test_a_program_is_what_stands_under_its_name(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, function = process.PROGRAMS[program].partition(":")
    assert callable(pkgutil.resolve_name(process.PROGRAMS[program]))
    started: list[str] = []
    monkeypatch.setattr(f"{module}.{function}", lambda: started.append(program))
    process.start(program)
    assert started == [program]
