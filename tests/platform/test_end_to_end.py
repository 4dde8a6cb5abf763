"""What `make demo-without` holds meshes to that lack a capability each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.platform.capabilities import CAPABILITIES
from tests.platform import end_to_end
from tests.platform.end_to_end import NEEDED_BY_SHM, PORTABLE, Failed, Run, differences

WHOLE = Run(((1, 2), (3,)), frozenset({"shm"}), frozenset({"int8-avx2"}), 5)


def test_names_are_those_of_capabilities() -> None:
    assert {each.name for each in CAPABILITIES} > NEEDED_BY_SHM | PORTABLE


@pytest.mark.parametrize(
    ("missing", "found", "problem"),
    [
        ("affinity", WHOLE, ""),
        ("affinity", replace(WHOLE, tokens=((1, 2), (4,))), "other tokens"),
        ("affinity", replace(WHOLE, transports=frozenset({"tcp"})), "KV over tcp in place of shm"),
        ("affinity", replace(WHOLE, modes=frozenset({"int8-portable"})), "computed in int8-portable in place of int8-avx2"),
        ("memfd", WHOLE, "KV over shm in place of tcp"),  # it was not missing
        ("memfd", replace(WHOLE, transports=frozenset({"tcp"})), ""),
        ("parent_death", WHOLE, "5 processes"),
        ("parent_death", replace(WHOLE, num_processes=9), ""),
    ],
)
def test_differences(missing: str, found: Run, problem: str) -> None:
    problems = differences(missing, found, WHOLE)
    assert len(problems) == bool(problem)
    assert all(problem in each for each in problems)


def test_it_fails_for_one_that_differs_and_one_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(missing: str, **_variables: str) -> Run:
        if missing == "memfd":
            raise Failed("it ended with 3")
        return replace(WHOLE, tokens=((9,),)) if missing == "affinity" else WHOLE

    monkeypatch.setattr(end_to_end, "run", run)
    assert end_to_end.main(["cgroups"]) == 0
    assert end_to_end.main(["memfd"]) == end_to_end.main(["affinity", "cgroups"]) == 1
    shown = capsys.readouterr().out
    assert "without cgroups: the same tokens" in shown and "without memfd: it ended with 3" in shown
    with pytest.raises(SystemExit):
        end_to_end.main(["memfs"])
    assert "memfs: no capability; give some of memfd" in capsys.readouterr().err
