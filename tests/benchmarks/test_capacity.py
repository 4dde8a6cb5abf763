"""Windows are measured once and are the same for all; a system that is stuck is started anew; nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.capacity import probes
from benchmarks.capacity.__main__ import Outcome, confirm, figures, page, search
from benchmarks.capacity.probes import OBJECTIVES, QUICK, Plan, Probes, objectives_for
from benchmarks.peers import keeper
from benchmarks.peers.environments import PeerError
from benchmarks.peers.systems import SYSTEMS, System
from benchmarks.router.mixes import Idle
from pdmesh.loadtest.measure import Trial, window_at
from pdmesh.loadtest.targets.target import Ask, Done, Event, Fleet, Said, Target, TargetInfo, Tokens, conversation
from pdmesh.loadtest.workload import plan as planned
from tests.pdmesh.loadtest.test_compare import measured
from tests.pdmesh.loadtest.test_report import check

SHORT = Plan(duration_s=0.5, warmup_s=0.0, first_rate=20.0, min_rate=15.0, max_rate=40.0, tolerance=0.5)


class Server:
    """Answers at once; after `breaks_after` requests (of any window) it never answers again."""

    def __init__(self, breaks_after: int = 10**9) -> None:
        self.num_asked = 0
        self._breaks_after = breaks_after

    async def check(self) -> TargetInfo:
        return TargetInfo("m")

    def prepare(self, ask: Ask) -> object:
        return ask

    async def stream(self, prepared: object) -> AsyncGenerator[Event, None]:
        self.num_asked += 1
        if self.num_asked > self._breaks_after:
            await asyncio.Event().wait()
        yield Tokens(1)
        yield Done()

    async def fleet(self) -> Fleet | None:
        return None

    async def close(self) -> None:
        return None


class Started:
    """A system of such servers; keeps those that were started."""

    def __init__(self, breaks_after: int = 10**9) -> None:
        self.servers: list[Server] = []
        self.num_running = 0
        self._breaks_after = breaks_after
        self.system = System("test", "test system", "a test", "none", self._start)

    @asynccontextmanager
    async def _start(self) -> AsyncIterator[Target]:
        self.servers.append(Server(self._breaks_after))
        self.num_running += 1
        try:
            yield self.servers[-1]
        finally:
            self.num_running -= 1


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "WARM_UP_RATE", 20.0)
    monkeypatch.setattr(probes, "WARM_UP_S", 0.2)
    monkeypatch.setattr(probes, "WARM_UP_TIMEOUT_S", 0.5)
    monkeypatch.setattr(probes, "SETTLE_S", 0.3)


def test_all_systems_get_the_same_words_at_the_same_times_and_no_two_windows_do() -> None:
    def asked(name: str, rate: float, number: int) -> list[tuple[float, str]]:
        window = window_at(QUICK.measurement(name, "m"), rate, number)
        sessions = planned(window.workload, window.seed, 9.0)
        return [(one.at_s, conversation([Said(one.turns[0].segments)], window.seed)) for one in sessions]

    one = asked("a", 3.5, 0)
    assert one == asked("b", 3.5, 0) and len(one) > 10
    for rate, number in ((3.5, 1), (4.0, 0)):
        assert not {text for _, text in one} & {text for _, text in asked("a", rate, number)}


async def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    first, again = Started(), Started()
    one = await search(first.system, SHORT, tmp_path)
    other = await search(again.system, SHORT, tmp_path)
    assert one.trials == other.trials and one.capacity.rate == 40.0 and one.shown == other.shown
    assert len(first.servers) == 1 and first.num_running == 0 and again.servers == []
    # A window more is measured, and only that.
    confirmed = await confirm(one, tmp_path)
    assert [trial.rate for trial in confirmed.trials] == [20.0, 40.0, 40.0, 46.0]
    assert confirmed.capacity.rate == 40.0 and confirmed.confirmed and confirmed.shown != one.shown


def test_a_rate_whose_confirmation_fails_is_not_the_capacity() -> None:
    tried = outcome("mesh", 2.0)  # 2 held, 4 did not
    assert tried.capacity.rate == 2.0 and not tried.confirmed
    assert any("capacity (not confirmed)" in figure.name for figure in figures([tried]))
    failed = replace(tried, trials=(Trial(1.0, 0.95, 1), *tried.trials, Trial(2.0, 0.5, 1.0)))
    assert (failed.capacity.rate, failed.capacity.failed_rate, failed.confirmed) == (1.0, 2.0, False)
    held = replace(failed, trials=(*failed.trials, Trial(1.0, 0.92, 0.9)))
    assert (held.capacity.rate, held.confirmed) == (1.0, True)
    chance = replace(held, trials=(*held.trials, Trial(1.15, 0.95, 1.1)))
    assert (chance.capacity.rate, chance.confirmed) == (1.0, True)


async def test_a_system_that_is_stuck_is_reported_and_started_anew(tmp_path: Path) -> None:
    started = Started(breaks_after=12)
    found = await search(started.system, SHORT, tmp_path)
    assert found.capacity.rate is None and found.num_stuck == len(started.servers) >= 1
    assert started.num_running == 0 and all(trial.attainment < 0.9 for trial in found.trials)


async def test_a_system_that_never_answers_cannot_take_part(tmp_path: Path) -> None:
    started = Started(breaks_after=0)
    async with Probes(started.system, tmp_path) as unable:
        with pytest.raises(PeerError, match="answers no request"):
            await unable.run(window_at(SHORT.measurement("test", "m"), 20.0, 0))
    assert started.num_running == 0 and unable.num_stuck == 0


def outcome(key: str, rate: float, attainment: float = 0.95) -> Outcome:
    system = next(system for system in SYSTEMS if system.key == key)
    trials = (Trial(rate, attainment, attainment * rate), Trial(2 * rate, 0.2, 0.4 * rate))
    return Outcome(system, replace(QUICK, min_rate=rate), trials, measured(1, num=50))


def test_figures_and_page_say_who_bears_what() -> None:
    outcomes = [outcome("mesh", 3.0), outcome("vllm", 1.5), outcome("smg", 1.0, attainment=0.0)]
    by_name = {figure.name: figure for figure in figures(outcomes)}
    ratio = by_name["pdmesh, separated over vLLM, aggregated: capacity"]
    assert (ratio.value, ratio.goal, ratio.peer) == (2.0, 2.0, "vLLM, aggregated")
    assert by_name["pdmesh, separated over SMG + vLLM, separated: capacity"].value == "3 requests/s against none"
    assert by_name["pdmesh, separated: capacity, 99 % keep their objectives (at least)"].value == 0.0
    assert by_name["SMG + vLLM, separated: capacity, 90 % keep their objectives"].value == 0.0
    shown = page(outcomes, {"pdmesh, aggregated": "there was <none>"}, "make bench-capacity")
    balance = check(shown)
    assert balance.num["svg"] == 4
    for text in ("none (not 1)", "there was &lt;none&gt;", "objective 400 ms", "pdmesh up --prefill 1 --decode 1"):
        assert text in shown


@pytest.mark.parametrize("how", ["asked", "parent dies", "command ends"])
def test_the_keeper_leaves_nothing_behind(how: str, tmp_path: Path) -> None:
    """A command whose child outlives it, as engines of others do."""
    note = tmp_path / "pid"
    lasting = f"import os,time; open({str(note)!r} + '.part', 'w').write(str(os.getpid())); "
    lasting += f"os.rename({str(note)!r} + '.part', {str(note)!r}); time.sleep(600)"
    rest = f"import os, time\nwhile {how != 'command ends'} or not os.path.exists({str(note)!r}): time.sleep(0.02)"
    command = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {lasting!r}]); exec({rest!r})"
    argv = [sys.executable, keeper.__file__, sys.executable, "-c", command]
    if how == "parent dies":
        start = f"import json, subprocess; subprocess.Popen(json.loads({json.dumps(argv)!r}), start_new_session=True).wait()"
        process = subprocess.Popen([sys.executable, "-c", start])
    else:
        process = subprocess.Popen(argv, start_new_session=True)
    try:
        pid = int(wait_for(lambda: note.read_text() if note.exists() else ""))
        if how != "command ends":
            process.send_signal(signal.SIGKILL if how == "parent dies" else signal.SIGTERM)
        wait_for(lambda: not is_running(pid))
    finally:
        process.kill()
        process.wait()


def wait_for(get: Callable[[], object], timeout_s: float = 30.0) -> str:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := get():
            return str(value)
        time.sleep(0.02)
    raise AssertionError("it did not happen")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_what_no_rate_could_keep_is_not_asked() -> None:
    assert objectives_for(Idle(0.25, 0.02)) == OBJECTIVES
    for slow in (Idle(0.26, 0.01), Idle(0.1, 0.021)):
        asked = objectives_for(slow)
        assert asked.quantile == OBJECTIVES.quantile
        assert asked.ttft_ms == pytest.approx(5e3 * slow.ttft_s + 500) and asked.tpot_ms == pytest.approx(3e3 * slow.tpot_s)
