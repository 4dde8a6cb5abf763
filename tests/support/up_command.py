"""`pdmesh up` as people start it: by its command, in a process of its own, whose processes and files are counted afterwards."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

LIMIT_S = 150.0
END_S = 60.0
GONE_S = 10.0
READY = "in another terminal: export "
"""What `pdmesh up` prints when everything has started."""
MARK = "TESTED_UP"
"""In the environment of every process of the mesh."""


class UpCommand:
    """Run `PROGRAM up` with one thread a worker. Temporary files go to a folder of their own, logs to another."""

    def __init__(
        self, program: Sequence[str], *, cwd: Path, folder: Path, env: Mapping[str, str], arguments: Sequence[str] = ()
    ) -> None:
        """`folder`: where folders for temporary files and logs are made."""
        self._program, self._cwd = list(program), cwd
        self.port = _free_port()
        self.temporary, self._logs = folder / "temporary", folder / "logs"
        self.temporary.mkdir()
        self._mark = f"{MARK}={secrets.token_hex(8)}"
        name, _, value = self._mark.partition("=")
        self._env = {**env, "TMPDIR": str(self.temporary)}
        flags = ("--port", str(self.port), "--http-port", "", "--no-console", "--threads", "1", "--log-dir", str(self._logs))
        self._output = (folder / "output.txt").open("w+")
        self.process = subprocess.Popen(
            [*self._program, "up", *flags, *arguments],
            cwd=cwd,
            env={**self._env, name: value},
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave nothing behind, whatever has failed."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        self._output.close()

    @property
    def output(self) -> str:
        """Return what it has printed."""
        self._output.seek(0)
        return self._output.read()

    def pids(self) -> list[int]:
        """Return the processes of the mesh that run, those that watch over others included."""
        return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit() and self._is_ours(folder)]

    def _is_ours(self, folder: Path) -> bool:
        """Redis writes its title over its environment, and is known by the folder in which it runs."""
        try:
            marked = self._mark.encode() in (folder / "environ").read_bytes().split(b"\0")
            return marked or (b"redis-server" in (folder / "cmdline").read_bytes() and (folder / "cwd").readlink() == self._cwd)
        except OSError:  # another user's, or it has ended
            return False

    def wait_listening(self) -> None:
        """Wait until the router listens, which it does before its workers are ready."""
        ends = time.monotonic() + LIMIT_S
        while time.monotonic() < ends and self.process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.2)
        raise AssertionError(f"no router listens: {self.output}")

    def wait_ready(self) -> None:
        """Wait until all of it has started: stopped before that it ends with another code, though a worker may answer by then."""
        ends = time.monotonic() + LIMIT_S
        while time.monotonic() < ends and self.process.poll() is None:
            if READY in self.output:
                return
            time.sleep(0.1)
        raise AssertionError(f"it does not start: {self.output}")

    def run(self, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run another command of the program against the mesh, with `text` as its standard input."""
        command = [*self._program, *arguments, "--router", f"127.0.0.1:{self.port}"]
        return subprocess.run(
            command, cwd=self._cwd, env=self._env, input=text, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )

    def answer(self, question: str) -> str:
        """Return the answer of `pdmesh chat`, as soon as there are workers."""
        ends = time.monotonic() + LIMIT_S
        while True:
            done = self.run("chat", question, "--temperature", "0", "--max-tokens", "16")
            if done.returncode == 0:
                return done.stdout
            assert time.monotonic() < ends and self.process.poll() is None, f"{done.stderr}\n{self.output}"
            time.sleep(0.5)

    def end(self, number: signal.Signals) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(END_S)

    def leftovers(self) -> list[str]:
        """Return the processes and temporary files that are left some seconds after the end."""
        ends = time.monotonic() + GONE_S
        while (left := self.pids()) and time.monotonic() < ends:
            time.sleep(0.05)
        return [*(f"process {pid}" for pid in left), *(str(path) for path in self.temporary.iterdir())]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
