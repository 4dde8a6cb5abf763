"""Seeds run without a violation, replay to the same event, and a bug that is put in is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation.scenario import Scenario, scenario

SEEDS = "1-6"


def run(*arguments: str) -> list[dict[str, Any]]:
    """Run seeds in a process of their own, in which the machine is a simulated one; return an outcome for each."""
    command = [sys.executable, "-m", "tests.simulation.run", "--json", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONHASHSEED": "0"}, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_nothing_is_violated_and_a_seed_replays_to_the_same_event() -> None:
    first = run("--seeds", SEEDS)
    assert len(first) == 6 and not any(outcome["violations"] for outcome in first), first
    assert all(outcome["num_events"] > 1000 for outcome in first)
    again = run("--seeds", "3-4")
    assert [outcome["digest"] for outcome in again] == [outcome["digest"] for outcome in first[2:4]]
    assert len({outcome["digest"] for outcome in first}) == len(first)


SHOWN_SCENARIOS: dict[str, Callable[[Scenario], bool]] = {
    "redis": lambda chosen: chosen.redis != "none" and not chosen.is_static and len(chosen.routers) > 1,
    "tcp": lambda chosen: chosen.transports == ("tcp",) and any(fault.kind == "sever" for fault in chosen.faults),
    "shm": lambda chosen: "shm" in chosen.transports and any(fault.kind == "power loss" for fault in chosen.faults),
    "small pools": lambda chosen: chosen.num_blocks < 12,
    "clocks": lambda chosen: any(fault.kind == "wall clock jump" for fault in chosen.faults),
}


@pytest.mark.parametrize("shown", SHOWN_SCENARIOS)
def test_what_surrounds_the_processes_replays_too(shown: str) -> None:
    seed = next(seed for seed in range(1, 1000) if SHOWN_SCENARIOS[shown](scenario(seed)))
    [first], [again] = run("--seeds", str(seed)), run("--seeds", str(seed))
    assert not first["violations"]
    assert first["digest"] == again["digest"] and first["num_events"] == again["num_events"]


def test_a_bug_is_found() -> None:
    [outcome] = run("--seeds", "1", "--mutant", "a_freed_request_keeps_its_blocks")
    assert any("is not whole" in violation for violation in outcome["violations"])
