"""Rank 0's control of the other ranks: it starts their processes, sends commands, is notified of their ends and ends them.

A rank never outlives this process: the kernel ends it with the thread that started it (see rank.py), so each has a thread that
waits for its end; where the kernel cannot, a process watches over each rank.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from pdmesh.engine.parallel import tp_protocol
from pdmesh.engine.parallel.tp_protocol import Kind, RankFailed
from pdmesh.platform import parent_death
from pdmesh.platform.capabilities import PARENT_DEATH
from pdmesh.platform.parent_death import TiedCommand

START_TIMEOUT_S = 1800.0  # for a large model on a slow disk
CLOSE_GRACE_S = 3.0
_NOTICE_S = 2.0  # between the end of a rank's connections and the end of its process

T = TypeVar("T")
OnFailure = Callable[[RankFailed], None]


class TensorParallelGroup:
    """Control ranks 1 to size - 1. Methods are for one thread, except `watch`, `failure`, `fail`, `blame` and `name`."""

    def __init__(self, size: int, timeout_s: float) -> None:
        """Start the processes; they wait for `tell_settings`. `timeout_s` bounds sends to a rank that should read.

        Raises RankFailed when the system cannot start them; no process is left then."""
        self.size = size
        self.failure: RankFailed | None = None
        self._timeout_s = timeout_s
        self._closing = False
        self._lock = threading.Lock()
        self._on_failure: OnFailure = lambda _: None
        self._ranks = [_TensorParallelRank(number, self._note_end) for number in range(1, size)]
        try:
            for rank in self._ranks:
                rank.wait_started()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the process ids of ranks 1, 2, ..."""
        return tuple(rank.process.pid for rank in self._ranks)

    def watch(self, on_failure: OnFailure) -> None:
        """Call `on_failure` at once from now on, from some thread, when a rank ends by itself."""
        with self._lock:
            self._on_failure = on_failure
        if self.failure is not None:
            on_failure(self.failure)

    def tell_settings(self, settings: Mapping[str, object]) -> None:
        """Have every rank begin to load. Raises RankFailed."""
        for rank in self._ranks:
            content = tp_protocol.as_json({"rank": rank.number, **settings})
            self._bounded(rank, partial(tp_protocol.send, kind=Kind.SETTINGS, payload=content))

    def tell(self, kind: Kind, payload: bytes = b"") -> None:
        """Send the same frame to every rank. Raises RankFailed."""
        self.check()
        for rank in self._ranks:
            self._bounded(rank, partial(tp_protocol.send, kind=kind, payload=payload))

    def show_fd(self, fd: int) -> None:
        """Send a descriptor to every rank, behind the frame that announces it. Raises RankFailed."""
        for rank in self._ranks:
            self._bounded(rank, lambda sock: tp_protocol.send_fd(sock, fd))

    def open_channels(self) -> list[socket.socket]:
        """Return one more socket to every rank, sent behind the frame that announces it; the caller closes them. Raises
        RankFailed."""
        ours: list[socket.socket] = []
        try:
            for rank in self._ranks:
                near, far = socket.socketpair()
                ours.append(near)
                with far:
                    self._bounded(rank, partial(tp_protocol.send_fd, fd=far.fileno()))
        except BaseException:
            for sock in ours:
                sock.close()
            raise
        return ours

    def wait_for(self, kind: Kind) -> None:
        """Wait until every rank has sent `kind`, or the reason of its failure. Raises RankFailed."""
        for rank in self._ranks:
            said, payload = self._bounded(rank, lambda sock: tp_protocol.expect(sock, kind, Kind.FAILED), START_TIMEOUT_S)
            if said is Kind.FAILED:
                raise RankFailed(f"tensor_parallel: rank {rank.number}: {payload.decode(errors='replace')}")

    def check(self) -> None:
        """Raise RankFailed if a rank has failed."""
        if self.failure is not None:
            raise self.failure

    def name(self, number: int) -> str:
        """Return the name of rank `number` for messages."""
        return self._ranks[number - 1].name

    def fail(self, failure: RankFailed) -> None:
        """Report a failure to the watcher, from any thread, unless ranks have failed already or are being ended."""
        with self._lock:
            if self._closing or self.failure is not None:
                return
            self.failure = failure
            on_failure = self._on_failure
        on_failure(failure)

    def blame(self, error: BaseException, work: str = "take part in a step") -> RankFailed:
        """Return why `work` of the ranks broke: the rank that ended, known within moments; else one of them is silent."""
        deadline = time.monotonic() + _NOTICE_S
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.failure or RankFailed(f"tensor_parallel: a rank did not {work}: {error}")

    def close(self) -> None:
        """End all ranks and wait until they are gone, whatever state they are in; idempotent."""
        self._closing = True
        for rank in self._ranks:
            rank.sock.close()
        deadline = time.monotonic() + CLOSE_GRACE_S
        for rank in self._ranks:
            rank.end(deadline)

    def _bounded(self, rank: _TensorParallelRank, act: Callable[[socket.socket], T], timeout_s: float | None = None) -> T:
        rank.sock.settimeout(self._timeout_s if timeout_s is None else timeout_s)
        try:
            return act(rank.sock)
        except TimeoutError as error:
            raise RankFailed(f"tensor_parallel: {rank.name} does not listen") from error
        except (OSError, EOFError) as error:
            raise self.blame(error) from error

    def _note_end(self, rank: _TensorParallelRank, code: int) -> None:
        """Report the end of a rank, on the rank's thread."""
        how = f"signal {-code}" if code < 0 else f"code {code}"
        self.fail(RankFailed(f"tensor_parallel: {rank.name} ended with {how}"))


class _TensorParallelRank:
    """Own one process and our end of its socket."""

    def __init__(self, number: int, on_end: Callable[[_TensorParallelRank, int], None]) -> None:
        self.number = number
        self.sock, self._theirs = socket.socketpair()
        self._on_end = on_end
        self._started = threading.Event()
        self._error: OSError | None = None
        self.process: subprocess.Popen[bytes]
        self._thread = threading.Thread(target=self._run, name=f"rank {number}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return f"rank {self.number} (process {self.process.pid})"

    def wait_started(self) -> None:
        """Raise RankFailed when the system could not start it."""
        self._started.wait()
        if self._error is not None:
            raise RankFailed(f"tensor_parallel: rank {self.number} cannot be started: {self._error}") from self._error

    def end(self, deadline: float) -> None:
        """Wait for its end until `deadline` (monotonic), then kill it."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self._thread.join()

    def _run(self) -> None:
        try:
            command = _command(self._theirs.fileno())
            self.process = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # our standard output is for lines of JSON
                pass_fds=command.pass_fds,
                env={**os.environ, "PYTHONPATH": _python_path()},
            )
        except OSError as error:
            self._error = error
            return
        finally:
            self._theirs.close()
            self._started.set()
        self._on_end(self, self.process.wait())


def _command(fd: int) -> TiedCommand:
    """Return the command of a rank. It ties itself to us first of all; where it could only look for us, which a stopped one does
    not, a process watches over it."""
    argv = (sys.executable, "-P", "-m", "pdmesh.engine.parallel.rank", str(fd), str(os.getpid()))
    if PARENT_DEATH.is_there:
        return TiedCommand(argv, (fd,))
    tied = parent_death.tied(argv)
    return TiedCommand(tied.argv, (fd, *tied.pass_fds))


def _python_path() -> str:
    """Return a path on which a rank finds this very code, installed or not."""
    root = str(Path(__file__).resolve().parents[3])
    return os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
