"""Seeds run without a violation, and replay to the same event: alone, or behind others in the same process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

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
    again = run("--seeds", "3-4", "--batch", "1")
    assert [outcome["digest"] for outcome in again] == [outcome["digest"] for outcome in first[2:4]]
    assert len({outcome["digest"] for outcome in first}) == len(first)
