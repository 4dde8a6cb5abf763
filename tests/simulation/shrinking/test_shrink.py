"""A scenario that fails is made smaller as long as it fails in the same way, and a command line names what is left."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.profiles import scenario
from tests.simulation.runs import Case, Ran
from tests.simulation.shrinking.reduction import WHOLE, Reduction, add_options, reduction_of
from tests.simulation.shrinking.shrink import Shrinking, kind_of
from tests.simulation.simulate_all import State


def parsed(arguments: list[str]) -> Reduction:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed")
    add_options(parser)
    return reduction_of(parser.parse_args(arguments))


@pytest.mark.parametrize(
    "reduction",
    [WHOLE, Reduction(asks=(2, 0)), Reduction(asks=(), faults=()), Reduction(None, (1,), ("router-1", "both-0"), 8, 16, 3)],
)
def test_a_command_names_what_is_left(reduction: Reduction) -> None:
    words = shlex.split(Case(17, reduction).command)
    assert words[:3] == ["python", "-m", "tests.simulation.run"]
    assert parsed(words[3:]) == reduction


def test_what_is_taken_away_is_not_there() -> None:
    whole = next(
        each for each in map(scenario, range(1, 100)) if len(each.asks) > 3 and len(each.faults) > 1 and each.routers[1:]
    )
    left = Reduction(asks=(3, 1), faults=(0,), without=("router-1",), max_tokens=2, max_prompt=4, world=5).of(whole)
    assert [ask.at_s for ask in left.asks] == [whole.asks[3].at_s, whole.asks[1].at_s]
    assert all(ask.max_tokens <= 2 and len(ask.prompt) <= 4 for ask in left.asks)
    assert left.routers == whole.routers[:1] and left.seed == 5
    assert left.faults == tuple(fault for fault in whole.faults[:1] if "router-1" not in fault.targets)
    with pytest.raises(ValueError, match="--only-asks 99: the scenario has numbers 0 to"):
        Reduction(asks=(99,)).of(whole)


def test_only_what_the_failure_needs_is_left() -> None:
    whole = next(each for each in map(scenario, range(1, 200)) if len(each.asks) > 4 and len(each.faults) > 2)

    def run(case: Case) -> Ran:
        left = case.reduction.of(scenario(case.seed))
        has_failed = whole.asks[2].at_s in [ask.at_s for ask in left.asks] and whole.faults[1] in left.faults
        return Ran(case, ("decode-0 is not whole: 1",) if has_failed else ("another",))

    search = Shrinking(run(Case(whole.seed)), run)
    small = search.shrink()
    reduction = small.case.reduction
    assert (reduction.asks, reduction.faults) == ((2,), (1,))
    assert (reduction.max_tokens, reduction.max_prompt) == (1, 1)
    assert set(reduction.without).isdisjoint({*whole.spared, *whole.faults[1].targets})
    assert search.num_runs < 300


def test_violations_of_a_kind_differ_in_names_and_numbers_only() -> None:
    first = "decode-0 is not whole: running, waiting, reserved, held are (0, 0, 1, 0), 63 blocks free"
    assert kind_of(first) == kind_of(first.replace("decode-0", "both-1").replace("63", "7"))
    assert kind_of(first) != kind_of("router-0 has 1 requests in flight, 0 queued")
    assert kind_of("Traceback (most recent call last):\n  File\nValueError: x 1") == kind_of("Traceback (most\nValueError: x 2")


def test_a_campaign_goes_on_where_it_was_and_measures_new_code_again(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    state = State(next_seed=501, virtual_s=7.0, cpu_s=1.0, code="one", failed={"3": "bad"}, mutants={"m": 4})
    state.write(path)
    assert State.read(path, "one") == state
    assert State.read(path, "two") == State(next_seed=501, code="two", failed={"3": "bad"})
    assert State.read(tmp_path / "none.json", "one") == State(code="one")
    path.write_text("[")
    with pytest.raises(SystemExit, match="move it away to begin again"):
        State.read(path, "one")


def test_a_bug_is_found_and_made_small_and_the_command_of_what_is_left_replays_it() -> None:
    mutant = ["--mutant", "a_freed_request_keeps_its_blocks"]
    found = _run(["tests.simulation.run", "--seeds", "1-20", "--stop", *mutant])
    small = _run([*_command(found), "--shrink", "12", *mutant])
    words = _command(small)
    assert parsed([word for word in words[1:] if word not in mutant]) != WHOLE
    assert "is not whole" in _run(words)


def _command(output: str) -> list[str]:
    """Return the words of the command that replays a failure, from the module on."""
    [command] = [line.strip() for line in output.splitlines() if line.strip().startswith("python -m")]
    return shlex.split(command)[2:]


def _run(arguments: list[str]) -> str:
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    return done.stdout
