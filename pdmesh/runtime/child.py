"""Runs child processes that are watched, read and never left behind: for the launcher and for tests with real processes.

worker = ManagedProcess("decode-1", python_command("-m", "decode_service"), env={**import_path(), ...}, on_line=print)
ready = await worker.start(timeout_s=60, on_progress=show)      # {"ready": true, "address": "127.0.0.1:40123", ...}
await worker.stop(grace_s=10)                                    # SIGTERM, then SIGKILL to its own process group
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from pdmesh.platform import parent_death

STDERR_TAIL_LINES = 40
MAX_LINE_BYTES = 1 << 20
OnLine = Callable[[str], None]


def python_command(*arguments: str, python: str = "") -> list[str]:
    """Return the command of a Python process that never looks modules up in the folder it is started in: people have packages
    called `router` of their own. `python`: the interpreter; empty: the one that runs this."""
    return [python or sys.executable, "-P", *arguments]


def import_path(python: str = "") -> dict[str, str]:
    """Return the environment with which a child finds this very code, installed or not. Another interpreter (`python`) gets it
    from a checkout alone: what is installed here is not for that one."""
    root = str(Path(__file__).resolve().parents[2])
    if python not in ("", sys.executable) and Path(root).name in ("site-packages", "dist-packages"):
        return {}
    return {"PYTHONPATH": os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)}


def restart_delay_s(num_failures: int, *, first_s: float, max_s: float) -> float:
    """Return the seconds before the restart that follows `num_failures` short lives in a row; each doubles them. After a long
    life (0) there is nothing to wait for: 0."""
    if num_failures == 0:
        return 0.0
    return float(min(max_s, first_s * 2 ** min(num_failures - 1, 16)))


class StartFailed(RuntimeError):
    """Raised when a child did not get ready; the message holds the reason and the end of its stderr."""


class ChildProcess:
    """Run a process in its own session (a terminal's Ctrl-C does not reach it) that dies with this one; its output is read
    continuously."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        on_line: OnLine | None = None,
    ) -> None:
        """`env` is added to this process's environment. `on_line` gets every line of the child's stderr (and stdout, see
        subclasses)."""
        self.name = name
        self._argv = list(argv)
        # gRPC's core writes its own notes to stderr, among the structured logs; errors are raised anyway.
        self._env = {"GRPC_VERBOSITY": "ERROR", **os.environ, **(env or {})}
        self._cwd = cwd
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._tail: deque[str] = deque(maxlen=STDERR_TAIL_LINES)

    @property
    def pid(self) -> int:
        """Return the child's process id. Raises RuntimeError before `spawn`."""
        return self._started.pid

    @property
    def returncode(self) -> int | None:
        """Return the exit code (minus the signal's number if one ended it); None while it runs or was not started."""
        return None if self._process is None else self._process.returncode

    @property
    def running(self) -> bool:
        """Return whether it was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def output_tail(self) -> str:
        """Return the last lines of its stderr."""
        return "\n".join(self._tail)

    async def spawn(self) -> None:
        """Start the process. Raises StartFailed if the system cannot."""
        tied = parent_death.tied(self._argv)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *tied.argv,
                pass_fds=tied.pass_fds,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._env,
                cwd=self._cwd,
                start_new_session=True,
                limit=MAX_LINE_BYTES,
            )
        except OSError as error:
            raise StartFailed(f"{self.name}: cannot start {self._argv[0]}: {error}") from error
        self._tail.clear()
        self._readers = [asyncio.create_task(self._read_stdout()), asyncio.create_task(self._read_stderr())]

    async def wait(self) -> int:
        """Wait for its end and for the rest of its output; return the exit code."""
        code = await self._started.wait()
        # A grandchild may hold the pipes open: its output is not waited for.
        await asyncio.wait(self._readers, timeout=1.0)
        return code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child alone; do nothing if it has ended."""
        # asyncio's `send_signal` reaps a child that has just died, and the exit code is then lost to the waiting task.
        if self._started.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to the child and all of its process group; do nothing if it has ended."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, grace_s: float = 10.0) -> int | None:
        """Send SIGTERM, then SIGKILL after `grace_s` seconds. Return the exit code; None if it was never started. Idempotent."""
        if self._process is None:
            return None
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)  # a stopped process must receive SIGTERM
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            self.kill()
        code = await self.wait()
        for reader in self._readers:
            reader.cancel()
        return code

    @property
    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._process

    def _handle_stdout(self, line: str) -> None:
        if self._on_line is not None:
            self._on_line(line)

    async def _read_stdout(self) -> None:
        assert self._started.stdout is not None
        async for line in _lines(self._started.stdout):
            self._handle_stdout(line)

    async def _read_stderr(self) -> None:
        assert self._started.stderr is not None
        async for line in _lines(self._started.stderr):
            self._tail.append(line)
            if self._on_line is not None:
                self._on_line(line)


class ManagedProcess(ChildProcess):
    """Run a service process: `start` waits for the JSON ready line that `Lifecycle.ready` prints on stdout."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        on_line: OnLine | None = None,
    ) -> None:
        super().__init__(name, argv, env=env, cwd=cwd, on_line=on_line)
        self._ready: asyncio.Future[dict[str, object]] | None = None
        self._on_progress: OnLine | None = None

    @property
    def address(self) -> str:
        """Return the address in the ready line. Raises RuntimeError before it has come."""
        return str(self.ready_line["address"])

    @property
    def ready_line(self) -> dict[str, object]:
        """Return the content of the ready line. Raises RuntimeError before it has come."""
        if self._ready is None or not self._ready.done():
            raise RuntimeError(f"{self.name} is not ready")
        return self._ready.result()

    async def start(self, timeout_s: float, on_progress: OnLine | None = None) -> dict[str, object]:
        """Start and wait until ready; return the ready line's content. `on_progress` receives the texts of `Lifecycle.progress`.

        Raises StartFailed when the process ends or `timeout_s` seconds pass before; no process is left then."""
        self._on_progress = on_progress
        self._ready = asyncio.get_running_loop().create_future()
        await self.spawn()
        ended = asyncio.create_task(self.wait())
        try:
            await asyncio.wait((self._ready, ended), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._ready.done():
                return self._ready.result()
            reason = f"ended with code {ended.result()}" if ended.done() else f"was not ready within {timeout_s:g} s"
            raise StartFailed(f"{self.name} {reason}; the end of its output:\n{self.output_tail or '(none)'}")
        finally:
            ended.cancel()
            if not self._ready.done():
                self.kill()
                await self.wait()

    def _handle_stdout(self, line: str) -> None:
        content = _json_object(line)
        if content.get("ready") is True and isinstance(content.get("address"), str):
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(content)
        elif "progress" in content:
            if self._on_progress is not None:
                self._on_progress(str(content["progress"]))
        else:
            super()._handle_stdout(line)


def _json_object(line: str) -> dict[str, object]:
    """Return the object on the line; empty for anything else."""
    try:
        content = json.loads(line)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield lines as text without their ends; a line longer than MAX_LINE_BYTES is dropped."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            continue
        if not line:
            return
        yield line.decode("utf-8", "replace").rstrip("\r\n")
