"""Supervises one process of a local mesh: its log file, its restarts."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from pdmesh.launcher.plan import ProcessPlan
from pdmesh.runtime.child import ManagedProcess, StartFailed, restart_delay_s

OnEvent = Callable[[str], None]

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 15.0
# A process that lived this long is restarted quickly again.
STABLE_AFTER_S = 30.0


def backoff_s(num_failures: int) -> float:
    """Return the seconds to wait before the restart that follows `num_failures` short lives in a row; 0 after a long one."""
    return restart_delay_s(num_failures, first_s=FIRST_BACKOFF_S, max_s=MAX_BACKOFF_S)


def how_it_ended(code: int | None) -> str:
    """Return an exit code for people."""
    if code is None:
        return "ended"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"


class Member:
    """Supervise a process. Between `start` and `stop` it runs, or is about to run again.

    It owns its ManagedProcess: nothing else starts or stops it. A restart makes a new one, with the same plan."""

    def __init__(self, plan: ProcessPlan, log_dir: Path, on_event: OnEvent, *, restart: bool, start_timeout_s: float) -> None:
        self.plan = plan
        self.log_path = log_dir / f"{plan.name}.log"
        self.num_restarts = 0
        self.start_s = 0.0  # of the latest start
        self._on_event = on_event
        self._restart = restart
        self._start_timeout_s = start_timeout_s
        self._process: ManagedProcess | None = None
        self._watch: asyncio.Task[None] | None = None
        self._started_at = 0.0
        self._num_failures = 0

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def roles(self) -> tuple[str, ...]:
        return self.plan.roles

    @property
    def running(self) -> bool:
        """Return whether its process lives now."""
        return self._process is not None and self._process.running

    @property
    def given_up(self) -> bool:
        """Return whether it has ended and will not be restarted."""
        return self._watch is not None and self._watch.done() and not self.running

    @property
    def pid(self) -> int:
        """Return the id of the latest process. Raises RuntimeError before the start."""
        return self._latest.pid

    @property
    def address(self) -> str:
        """Return its address. Raises RuntimeError while it is not ready."""
        return self._latest.address

    @property
    def http_url(self) -> str:
        """Return a router's HTTP URL; empty without one. Raises RuntimeError while it is not ready."""
        return str(self._latest.ready_line.get("http_url", ""))

    @property
    def metrics_urls(self) -> tuple[str, ...]:
        """Return the URLs of its processes' metrics; none without them, or while it is not ready."""
        if not self.running or self._process is None:
            return ()
        with contextlib.suppress(RuntimeError):
            return tuple(url for url in str(self._process.ready_line.get("metrics_url", "")).split(",") if url)
        return ()

    @property
    def _latest(self) -> ManagedProcess:
        if self._process is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._process

    async def start(self, on_progress: OnEvent | None = None) -> None:
        """Start it, wait until it is ready, and watch it from then on. Raises StartFailed with the end of its output."""
        await self._start_process(on_progress)
        self._watch = asyncio.create_task(self._supervise(), name=f"supervise {self.name}")

    async def stop(self, grace_s: float) -> None:
        """End it for good: SIGTERM, after `grace_s` seconds SIGKILL. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
            self._watch = None
        if self._process is not None:
            await self._process.stop(grace_s)

    async def restart(self, grace_s: float) -> None:
        """End it and start it again at once; return when it is ready."""
        await self.stop(grace_s)
        self.num_restarts += 1
        await self.start()

    def kill(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self._latest.signal(number)

    async def _start_process(self, on_progress: OnEvent | None) -> None:
        self._process = ManagedProcess(self.name, self.plan.argv, env=self.plan.env, on_line=self._log)
        self._started_at = time.monotonic()
        await self._process.start(self._start_timeout_s, on_progress)
        self.start_s = time.monotonic() - self._started_at

    async def _supervise(self) -> None:
        while True:
            code = await self._latest.wait()
            lifetime_s = time.monotonic() - self._started_at
            self._num_failures = 0 if lifetime_s >= STABLE_AFTER_S else self._num_failures + 1
            report = f"{self.name} (pid {self.pid}) {how_it_ended(code)}"
            if not self._restart:
                self._on_event(f"{report}; its log: {self.log_path}")
                return
            await self._start_again(report)

    async def _start_again(self, report: str) -> None:
        delay_s = backoff_s(self._num_failures)
        self._on_event(f"{report}; starting it again in {delay_s:g} s; its log: {self.log_path}")
        await asyncio.sleep(delay_s)
        self.num_restarts += 1
        try:
            await self._start_process(None)
        except StartFailed as error:
            self._on_event(str(error))
            return
        self._on_event(f"{self.name} is back (pid {self.pid}, {self.address})")

    def _log(self, line: str) -> None:
        # A full disk must not end a mesh.
        with contextlib.suppress(OSError), self.log_path.open("a", encoding="utf-8") as log:
            log.write(line + "\n")


async def start_all(members: Sequence[Member], on_progress: OnEvent) -> None:
    """Start all at once; the first that fails ends the wait for the others."""
    try:
        async with asyncio.TaskGroup() as group:
            for member in members:
                group.create_task(member.start(partial(_named_progress, on_progress, member.name)))
    except* StartFailed as failures:
        raise failures.exceptions[0] from None


def _named_progress(on_progress: OnEvent, name: str, text: str) -> None:
    on_progress(f"{name}: {text}")
