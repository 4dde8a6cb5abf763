"""Servers of others as child processes: their output in a file, ready when their address says so, nothing of them left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.harness import say
from benchmarks.peers import keeper
from benchmarks.peers.environments import PeerError, child_environment, last_line, peers_folder
from pdmesh.runtime.child import ChildProcess

START_TIMEOUT_S = 600.0
_POLL_S, _HEARTBEAT_S = 0.5, 20.0
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Server:
    """One process. It is ready when `ready` says so: http://… by status 200, grpc://… by its health service."""

    name: str
    argv: Sequence[str]
    ready: str
    env: Mapping[str, str] = field(default_factory=dict)


@asynccontextmanager
async def serving(servers: Sequence[Server], timeout_s: float = START_TIMEOUT_S) -> AsyncIterator[None]:
    """Runs them, from when all are ready. PeerError says who does not get there, and why."""
    async with contextlib.AsyncExitStack() as stack:
        processes = [await stack.enter_async_context(_running(server)) for server in servers]
        for server, process in zip(servers, processes, strict=True):
            await _wait_ready(server, process, timeout_s)
        yield


@asynccontextmanager
async def _running(server: Server) -> AsyncIterator[ChildProcess]:
    log = log_of(server.name)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        argv = [sys.executable, keeper.__file__, *server.argv]
        process = ChildProcess(server.name, argv, env=server.env, on_line=lambda line: print(line, file=output, flush=True))
        await process.spawn()
        try:
            yield process
        finally:
            # The last words of a dying process belong into its log, so it is open until then.
            await asyncio.shield(process.stop(keeper.ALL_S + 5))


def log_of(name: str) -> Path:
    return peers_folder() / "logs" / f"{name}.log"


async def _wait_ready(server: Server, process: ChildProcess, timeout_s: float) -> None:
    started = said = time.monotonic()
    while not await asyncio.to_thread(_answers, server.ready):
        now = time.monotonic()
        if not process.running:
            raise PeerError(f"{server.name} ended: {last_line(log_of(server.name))}")
        if now - started > timeout_s:
            raise PeerError(f"{server.name} was not ready within {timeout_s:g} s: {last_line(log_of(server.name))}")
        if now - said > _HEARTBEAT_S:
            said = now
            say(f"{server.name}: starting for {now - started:.0f} s")
        await asyncio.sleep(_POLL_S)


def _answers(ready: str) -> bool:
    kind, _, address = ready.partition("://")
    if kind == "grpc":
        return _is_healthy(address)
    try:
        with urllib.request.urlopen(ready, timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _is_healthy(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@contextmanager
def served(servers: Sequence[Server], timeout_s: float = START_TIMEOUT_S) -> Iterator[None]:
    """`serving` for callers without an event loop: one in a thread of its own reads what the servers say."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    running = serving(servers, timeout_s)
    try:
        asyncio.run_coroutine_threadsafe(running.__aenter__(), loop).result()
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(running.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def watched_shared_memory() -> Iterator[None]:
    """Says what came into shared memory meanwhile and no process has mapped. It is not removed: it may be somebody else's, who
    has not opened it yet."""
    before = _shared_memory()
    try:
        yield
    finally:
        if left := sorted(name for name in _shared_memory() - before if not _is_mapped(name)):
            say(f"left in {_SHARED_MEMORY}, by whomever: {', '.join(left)}")


def _shared_memory() -> set[str]:
    return {entry.name for entry in _SHARED_MEMORY.iterdir()} if _SHARED_MEMORY.is_dir() else set()


def _is_mapped(name: str) -> bool:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and str(_SHARED_MEMORY / name) in (entry / "maps").read_text():
                return True
    return False


# Drives one contestant's child process: start, ask, pause, end.
#
# A paused child is stopped by a signal, with all its threads and children: libraries that spin while they wait would otherwise
# take the cores from the one that is measured.


LOAD_TIMEOUT_S, ANSWER_TIMEOUT_S, _END_TIMEOUT_S = 600.0, 900.0, 10.0


@dataclass(frozen=True)
class Reply:
    """`first_seconds`: when the last of the prompts had its first token; None where the library does not show it."""

    seconds: float
    first_seconds: float | None
    token_ids: list[list[int]]


class Child:
    """A process of its own session that serves `child.py`'s protocol; its stderr goes to `log`."""

    def __init__(
        self, python: Path, module: str, options: Mapping[str, object], log: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        """Starts the process and does not wait. `started` is time.monotonic() just before."""
        self._log, self._is_paused = log, False
        self.about: Mapping[str, object] = {}
        self.started = time.monotonic()
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", module, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=child_environment(variables),
                start_new_session=True,
                text=True,
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self, timeout_s: float = LOAD_TIMEOUT_S) -> None:
        """Returns once the model is loaded. PeerError: it ended, or took too long."""
        about = self._next(timeout_s, "loading its model").get("about")
        self.about = about if isinstance(about, dict) else {}

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, timeout_s: float = ANSWER_TIMEOUT_S) -> Reply:
        """Greedy, `max_tokens` for each prompt. PeerError: it ended, refused, or took too long."""
        request = {"op": "generate", "prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens}
        answer = self.ask(request, f"answering {len(prompts)} prompts with {max_tokens} tokens", timeout_s)
        return Reply(answer["seconds"], answer["first_seconds"], answer["token_ids"])  # type: ignore[arg-type]

    def ask(self, request: Mapping[str, object], what: str, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, object]:
        """Its answer to a request of any form. PeerError: it ended, refused, or took too long, doing `what`."""
        assert self._process.stdin
        with suppress(BrokenPipeError, ValueError):  # it has ended, or was closed: the answer says so
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        answer = self._next(timeout_s, what)
        if "error" in answer:
            raise PeerError(f"failed {what}: {answer['error']}")
        return answer

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Runs within, pauses after."""
        self._signal(signal.SIGCONT)
        self._is_paused = False
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)
            self._is_paused = True

    def close(self, patience_s: float = _END_TIMEOUT_S) -> None:
        """Ends the process and what it started: the end of stdin asks it to, a signal sees to it. Safe to call twice."""
        if self._process.returncode is not None:
            return
        if self._is_paused:
            self._signal(signal.SIGCONT)
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._reader.join(patience_s)
        self._signal(signal.SIGKILL)  # before wait(): until then nobody else's group can have this id
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        """To the child's whole session: its group has the child's pid as id, and that is ours until wait()."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _by_signal(self) -> str:
        """Which signal ended the process, if one did, without a wait() that would free its id."""
        if self._process.returncode is not None:
            return ""  # it was ended here
        time.sleep(_POLL_S)  # its output has ended, and so will it
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if ended is None or ended.si_code == os.CLD_EXITED:
            return ""
        return f"by {signal.Signals(ended.si_status).name} "

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _next(self, timeout_s: float, what: str) -> dict[str, object]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self.close(patience_s=0.0)
            raise PeerError(f"no answer after {timeout_s:.0f} s of {what}") from None
        if line is None:
            self._lines.put(None)  # whoever asks next is told at once, too
            raise PeerError(f"ended {self._by_signal()}while {what}: {last_line(self._log)}")
        answer: dict[str, object] = json.loads(line)
        return answer
