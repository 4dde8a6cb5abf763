"""Children of benchmarks: real processes that answer, fail, pause and end."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import environments
from benchmarks.peers.environments import MARKER, Environment, PeerError, ensure_environment
from benchmarks.peers.servers import Child
from tests.benchmarks.echo_child import FATAL, REFUSED, SHORT, SLOW
from tests.support.waiting import eventually


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    started = Child(Path(sys.executable), "tests.benchmarks.echo_child", {"version": "7"}, tmp_path / "log")
    try:
        started.wait_ready(60)
        yield started
    finally:
        started.close()


def state(pid: object) -> str:
    """R, S, T (stopped) … or "" when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_answers_and_keeps_chatter_out(child: Child, tmp_path: Path) -> None:
    reply = child.generate([[8], [9]], 3)
    assert reply.token_ids == [[8] * 3, [9] * 3]
    assert reply.first_seconds is None
    assert child.about["version"] == "7"
    assert "chatter of a library" in (tmp_path / "log").read_text()


def test_survives_a_refusal(child: Child) -> None:
    with pytest.raises(PeerError, match="this prompt is refused"):
        child.generate([[REFUSED]], 3)
    with pytest.raises(PeerError, match="1 answers of \\[2\\] tokens to 1 prompts of 3"):
        child.generate([[SHORT]], 3)
    assert child.generate([[8]], 1).token_ids == [[8]]


def test_tells_how_it_died_every_time(child: Child) -> None:
    for _ in range(2):
        with pytest.raises(PeerError, match="ended while answering 1 prompts with 3 tokens: chatter of a library"):
            child.generate([[FATAL]], 3)


def test_gives_up_on_a_child_that_hangs(child: Child) -> None:
    with pytest.raises(PeerError, match="no answer after 0 s"):
        child.generate([[SLOW]], 3, timeout_s=0.1)
    with pytest.raises(PeerError, match="ended while answering"):
        child.generate([[8]], 1)
    assert not state(child.about["pid"])


async def test_pauses_between_turns_and_ends(child: Child) -> None:
    pid = child.about["pid"]
    for _ in range(2):
        with child.turn():
            assert child.generate([[8]], 1).token_ids == [[8]]
        await eventually(lambda: state(pid) == "T")
    child.close()
    child.close()
    assert not state(pid)


def test_installs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path))

    def run(command: list[str], *_: object) -> None:
        commands.append(command)
        (tmp_path / "peers" / "one").mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(environments, "_run", run)
    one = Environment("one", (("install", "a==1"), ("uninstall", "b")))
    python = ensure_environment(one, lambda _: None)
    assert python == tmp_path / "peers" / "one" / "bin" / "python"
    assert [command[-2:] for command in commands] == [["venv", str(python.parents[1])], ["install", "a==1"], ["uninstall", "b"]]
    ensure_environment(one, lambda _: None)
    assert len(commands) == 3
    ensure_environment(Environment("one", (("install", "a==2"),)), lambda _: None)  # another recipe: made anew
    assert len(commands) == 5


def test_failed_installation_leaves_no_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PeerError, match="not installed: one: virtual environment failed"):
        ensure_environment(Environment("one", ()), lambda _: None)
    assert not (tmp_path / "peers" / "one" / MARKER).exists()


def test_a_step_of_an_installation_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environments, "_HEARTBEAT_S", 0.01)
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen([sys.executable, "-c", "import time; time.sleep(600)"], **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path))
    with pytest.raises(PeerError, match=r"not installed: one: virtual environment had not ended after 0\.05 s"):
        ensure_environment(Environment("one", (), limit_s=0.05), lambda _: None)
    assert [process.poll() is not None for process in started] == [True]
