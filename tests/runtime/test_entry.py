"""Programs that are started by name."""

import pkgutil

import pytest

from pdmesh.runtime import entry


@pytest.mark.parametrize("program", sorted(entry.PROGRAMS))
def test_a_program_is_what_stands_under_its_name(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, function = entry.PROGRAMS[program].partition(":")
    assert callable(pkgutil.resolve_name(entry.PROGRAMS[program]))
    started: list[str] = []
    monkeypatch.setattr(f"{module}.{function}", lambda: started.append(program))
    entry.start(program)
    assert started == [program]
