"""Ranks that die, stop or cannot start: the engine fails loudly, in time, and leaves no process."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.loader.loader import load_model
from pdmesh.engine.parallel.tp_protocol import RankFailed
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams
from tests.engine.parallel.conftest import config_of, is_alive, pids_of, running
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="not tried elsewhere yet")
REQUEST = EngineRequest("r", tuple(range(40)), SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine(tiny: Path) -> Iterator[Engine]:
    """Two ranks in the middle of an answer."""
    with running(config_of(tiny, 2, tensor_parallel_timeout_s=2.0)) as engine:
        assert engine.add(REQUEST)
        for _ in range(3):
            assert engine.step() is not None
        yield engine


def until_it_fails(engine: Engine) -> tuple[RankFailed, float]:
    started = time.monotonic()
    with pytest.raises(RankFailed) as raised:
        while True:
            engine.step()
    return raised.value, time.monotonic() - started


def test_a_killed_rank_ends_the_next_step(engine: Engine) -> None:
    [pid] = pids_of(engine)
    os.kill(pid, signal.SIGKILL)
    failure, _ = until_it_fails(engine)
    assert str(failure) == f"tensor_parallel: rank 1 (process {pid}) ended with signal 9"
    with pytest.raises(RankFailed):  # and every later one, at once
        engine.step()


def test_a_rank_killed_within_a_step_ends_it(engine: Engine) -> None:
    [pid] = pids_of(engine)
    killer = threading.Timer(0.2, os.kill, (pid, signal.SIGKILL))
    killer.start()
    failure, _ = until_it_fails(engine)
    killer.join()
    assert "ended with signal 9" in str(failure)


def test_who_watches_hears_of_it_without_a_step(engine: Engine) -> None:
    heard: queue.SimpleQueue[RankFailed] = queue.SimpleQueue()
    engine.watch_ranks(heard.put)
    os.kill(pids_of(engine)[0], signal.SIGKILL)
    assert "ended with signal 9" in str(heard.get(timeout=30))


def test_a_silent_rank_ends_the_step_in_time(engine: Engine) -> None:
    """It is paused, and goes all the same when the engine is closed."""
    os.kill(pids_of(engine)[0], signal.SIGSTOP)
    failure, seconds = until_it_fails(engine)
    assert "did not take part in a step" in str(failure)
    assert 2.0 <= seconds < 30


def test_signals_that_ask_to_stop_are_for_rank_0(engine: Engine) -> None:
    """It drains first."""
    [pid] = pids_of(engine)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(pid, number)
    assert all(engine.step() is not None for _ in range(5))
    assert is_alive(pid)


def test_a_rank_that_cannot_load_says_why(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process alone finds no model: the folder is named relative to where rank 0 was."""
    before = processes()
    monkeypatch.setattr("pdmesh.engine.parallel.tp_group.TensorParallelGroup.tell_settings", _elsewhere)
    with pytest.raises(ValueError, match=r"tensor_parallel: rank 1: ValueError: model: .*nowhere does not exist"):
        load_model(config_of(tiny, 2))
    assert processes() == before


def _elsewhere(self: object, settings: dict[str, dict[str, object]]) -> None:
    from pdmesh.engine.parallel import tp_protocol

    for rank in self._ranks:  # type: ignore[attr-defined]
        wrong = {**settings, "rank": rank.number, "engine": {**settings["engine"], "model": "/nowhere"}}
        tp_protocol.send(rank.sock, tp_protocol.Kind.SETTINGS, tp_protocol.as_json(wrong))


def test_an_engine_that_does_not_fit_leaves_no_process(tiny: Path) -> None:
    before = processes()
    config = config_of(tiny, 2, num_blocks=2**34)
    with pytest.raises(ValueError, match="KV pool"):
        _open(config)
    assert processes() == before


def _open(config: EngineConfig) -> None:
    Engine(config, hash_block=lambda parent, tokens: b"", loaded=load_model(config))


def test_degrees_that_do_not_fit_start_nothing(tiny: Path) -> None:
    before = processes()
    with pytest.raises(ValueError, match="tensor_parallel: 4 does not divide the model's 2 KV heads; give one of 1, 2"):
        load_model(config_of(tiny, 4))
    assert processes() == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_a_killed_engine(tiny: Path, number: signal.Signals) -> None:
    """Also a rank that is paused."""
    program = (
        "import sys, time\n"
        "from tests.engine.parallel.conftest import config_of, pids_of\n"
        "from pdmesh.engine.engine import Engine\n"
        "from pathlib import Path\n"
        "if __name__ == '__main__':\n"
        "    engine = Engine(config_of(Path(sys.argv[1]), 2), hash_block=lambda parent, tokens: b'')\n"
        "    print(pids_of(engine)[0], flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tiny)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        if number is signal.SIGKILL:
            os.kill(pid, signal.SIGSTOP)
        process.send_signal(number)
        process.wait(60)
    deadline = time.monotonic() + 30
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)


def processes() -> set[int]:
    """Children of this process."""
    found = set()
    for folder in Path("/proc").iterdir():
        try:
            status = (folder / "stat").read_text().rpartition(")")[2].split()
        except (OSError, NotADirectoryError):
            continue
        if int(status[1]) == os.getpid():
            found.add(int(folder.name))
    return found
