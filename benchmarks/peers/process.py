"""Drives one contestant's child process: start, ask, pause, end.

A paused child is stopped by a signal, with all its threads and children: libraries that spin while they wait would otherwise
take the cores from the one that is measured.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.environments import PeerError, child_environment, last_line

START_TIMEOUT_S, ANSWER_TIMEOUT_S, _END_TIMEOUT_S = 600.0, 900.0, 10.0


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

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Returns once the model is loaded. PeerError: it ended, or took too long."""
        about = self._next(timeout_s, "loading its model").get("about")
        self.about = about if isinstance(about, dict) else {}

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, timeout_s: float = ANSWER_TIMEOUT_S) -> Reply:
        """Greedy, `max_tokens` for each prompt. PeerError: it ended, refused, or took too long."""
        request = {"op": "generate", "prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens}
        assert self._process.stdin
        with suppress(BrokenPipeError, ValueError):  # it has ended, or was closed: the answer says so
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        what = f"answering {len(prompts)} prompts with {max_tokens} tokens"
        answer = self._next(timeout_s, what)
        if "error" in answer:
            raise PeerError(f"failed {what}: {answer['error']}")
        return Reply(answer["seconds"], answer["first_seconds"], answer["token_ids"])  # type: ignore[arg-type]

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
            raise PeerError(f"ended while {what}: {last_line(self._log)}")
        answer: dict[str, object] = json.loads(line)
        return answer
