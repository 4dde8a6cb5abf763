"""Seeds run without a violation, and replay to the same event: alone, or behind others in the same process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from datetime import date, timedelta
from itertools import pairwise
from typing import Any

from tests.simulation.profiles import SHARES, scenario
from tests.simulation.run import seeds_of
from tests.simulation.scenario import Scenario
from tests.simulation.simulate_all import NUM_SEEDS

SEEDS = "1-6"
NUM_SURROUNDED = 5
SHOWN: tuple[Callable[[Scenario], bool], ...] = (
    lambda chosen: chosen.redis != "none" and not chosen.is_static and len(chosen.routers) > 1,
    lambda chosen: any(fault.targets == ("redis",) for fault in chosen.faults),
    lambda chosen: any(fault.kind == "sever transfer" for fault in chosen.faults),
    lambda chosen: any(fault.kind == "power loss" for fault in chosen.faults),
    lambda chosen: any(fault.kind == "wall clock jump" for fault in chosen.faults),
    lambda chosen: "shm" in chosen.transports,
    lambda chosen: chosen.num_blocks < 12,
)


def _shows_all(seeds: range) -> bool:
    """Return whether each of the things around the processes is in one of the scenarios."""
    chosen = [scenario(seed) for seed in seeds]
    return all(any(map(shows, chosen)) for shows in SHOWN)


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


def test_what_surrounds_the_processes_replays_too() -> None:
    first = next(seed for seed in range(1, 1000) if _shows_all(range(seed, seed + NUM_SURROUNDED)))
    seeds = f"{first}-{first + NUM_SURROUNDED - 1}"
    once, again = run("--seeds", seeds), run("--seeds", seeds, "--batch", "1")
    assert len(once) == NUM_SURROUNDED and not any(outcome["violations"] for outcome in once), once
    assert once == again


def test_each_day_has_seeds_of_its_own() -> None:
    first = date(2026, 11, 30)
    days = [seeds_of(first + timedelta(days=number)) for number in range(40)]
    assert days[0].start > NUM_SEEDS
    assert all(before.stop == after.start for before, after in pairwise(days))


def test_a_seed_is_about_one_thing_and_faults_strike_who_is_there() -> None:
    seen = Counter[str]()
    for seed in range(1, 300):
        chosen = scenario(seed)
        seen[chosen.profile] += 1
        there = {*chosen.members, "redis", *(ask.client for ask in chosen.asks)}
        assert all(there.issuperset(fault.targets) for fault in chosen.faults)
        assert chosen.profile != "calm" or {fault.kind for fault in chosen.faults} <= {"wall clock jump"}
    assert seen.keys() == {*SHARES, "mixture"} and min(seen.values()) > 20
