"""One container: started, probed, started again when it ends, ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from pdmesh.platform import parent_death
from tests.cluster.agent.api import Object
from tests.cluster.agent.images import CHECKOUT, Image, needed_folders
from tests.cluster.agent.probes import Probe, probes_of
from tests.cluster.agent.sandbox import Sandbox
from tests.cluster.agent.volumes import expanded, mounts
from tests.cluster.leftovers import MARK

FIRST_BACKOFF_S = 2.0
MAX_BACKOFF_S = 60.0
HEALTHY_S = 60.0
"""Who ran so long starts without delay again (the kubelet: 10 s, doubled up to 5 min, forgotten after 10 min)."""


@dataclass
class Surroundings:
    """What a container gets from its pod."""

    pod: Object
    folder: Path
    sandbox: Sandbox
    image: Image
    environment: Mapping[str, str]
    volumes: Mapping[str, Path]
    resolv_conf: Path


@dataclass
class State:
    """As a pod's status shows it."""

    started: bool = False
    ready: bool = False
    restarts: int = 0
    waiting: tuple[str, str] | None = ("ContainerCreating", "")
    running_since: str | None = None
    exit_code: int | None = None
    last: Object = field(default_factory=dict)


class Container:
    """`run` returns when it has ended for good: by `stop`, or with a code where its pod starts nothing again."""

    def __init__(self, spec: Object, around: Surroundings, on_change: Callable[[], None]) -> None:
        self.spec = spec
        self.state = State()
        self._around = around
        self._on_change = on_change
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._log = around.folder / f"{spec['name']}.log"

    async def run(self, policy: str) -> int:
        """With the pod's restartPolicy; the last exit code."""
        delay_s = FIRST_BACKOFF_S
        while True:
            began = time.monotonic()
            code = await self._once()
            if self._stopping.is_set() or policy == "Never" or (policy == "OnFailure" and code == 0):
                return code
            if time.monotonic() - began > HEALTHY_S:
                delay_s = FIRST_BACKOFF_S
            await self._back_off(delay_s)
            delay_s = min(2 * delay_s, MAX_BACKOFF_S)
            if self._stopping.is_set():
                return code

    async def _once(self) -> int:
        self._process = await self._start()
        (self._around.folder / f"{self.spec['name']}.pid").write_text(str(self._process.pid), encoding="ascii")
        self.state.waiting, self.state.exit_code, self.state.running_since = None, None, now()
        probing = asyncio.create_task(self._probe(self._process))
        self._on_change()
        try:
            code = await self._process.wait()
        finally:
            probing.cancel()
        self._kill_group()
        self.state.ready = self.state.started = False
        self.state.exit_code = code if code >= 0 else 128 - code
        self.state.last = self.terminated()
        self._on_change()
        return self.state.exit_code

    async def _back_off(self, delay_s: float) -> None:
        text = f"back-off {delay_s:.0f}s restarting failed container={self.spec['name']}"
        self.state.waiting, self.state.running_since = ("CrashLoopBackOff", text), None
        self._on_change()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay_s)
        self.state.restarts += 1

    async def _start(self) -> asyncio.subprocess.Process:
        layer = self._around.folder / f"{self.spec['name']}.layer"
        layer.mkdir(exist_ok=True)
        path = self._around.folder / f"{self.spec['name']}.json"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(self._specification(layer), file)
        command = parent_death.tied([sys.executable, "-S", "-m", "tests.cluster.agent.container", str(path)]).argv
        environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "PYTHONDONTWRITEBYTECODE": "1"}
        with self._log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def _specification(self, layer: Path) -> Object:
        around, image = self._around, self._around.image
        environment = {**image.environment, **around.environment, MARK: os.environ.get(MARK, "")}
        words = [*(self.spec.get("command") or ()), *(self.spec.get("args") or ())]
        bound = [{"source": str(path), "target": target, "read_only": True} for target, path in image.folders.items()]
        own = {"source": str(around.resolv_conf), "target": os.path.realpath("/etc/resolv.conf"), "read_only": True}
        return {
            "sandbox": around.sandbox.pid,
            "hostname": around.pod["metadata"]["name"],
            "layer": str(layer),
            "mounts": [*bound, *mounts(self.spec, around.volumes), own],
            "host": [{"source": path, "target": path, "read_only": True} for path in needed_folders()],
            "working_folder": self.spec.get("workingDir") or image.working_folder,
            "read_only_root": bool((self.spec.get("securityContext") or {}).get("readOnlyRootFilesystem")),
            "environment": environment,
            "command": [expanded(word, environment) for word in words],
        }

    async def _probe(self, process: asyncio.subprocess.Process) -> None:
        """From its start to its end: whether it started, is ready, lives."""
        probes = probes_of(self._around.pod, self.spec, self._around.sandbox.address, self.execute)
        if "startupProbe" in probes and not await _until_passed(probes["startupProbe"]):
            self._end(process, "startup")
            return
        self.state.started = True
        self.state.ready = "readinessProbe" not in probes
        self._on_change()
        following = [self._follow_readiness(probe) for kind, probe in probes.items() if kind == "readinessProbe"]
        watching = [self._watch_life(probe, process) for kind, probe in probes.items() if kind == "livenessProbe"]
        await asyncio.gather(*following, *watching)

    async def _follow_readiness(self, probe: Probe) -> None:
        await asyncio.sleep(probe.initial_delay_s)
        failures = 0
        while True:
            passed = await probe.passes()
            failures = 0 if passed else failures + 1
            ready = passed or (self.state.ready and failures < probe.failure_threshold)
            if ready != self.state.ready:
                self.state.ready = ready
                self._on_change()
            await asyncio.sleep(probe.period_s)

    async def _watch_life(self, probe: Probe, process: asyncio.subprocess.Process) -> None:
        await asyncio.sleep(probe.initial_delay_s)
        failures = 0
        while failures < probe.failure_threshold:
            await asyncio.sleep(probe.period_s)
            failures = 0 if await probe.passes() else failures + 1
        self._end(process, "liveness")

    def _end(self, process: asyncio.subprocess.Process, probe: str) -> None:
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"agent: the {probe} probe failed; the container is ended\n")
        # Not by asyncio's `kill`: it may reap a child that has just died, and the exit code is lost.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)

    async def execute(self, command: list[str]) -> int:
        """A command in the running container; its exit code, 1 when none runs."""
        if self._process is None or self._process.returncode is not None:
            return 1
        inside = ["nsenter", f"--target={self._process.pid}", "--mount", "--net", "--uts", "--root", "--wd", *command]
        environment = {**self._around.image.environment, **self._around.environment}
        # nsenter itself is looked for outside.
        full = {"PATH": os.environ["PATH"], **environment}
        null = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(*inside, stdin=null, stdout=null, stderr=null, env=full)
        try:
            return await process.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            raise

    async def stop(self, deadline: float) -> None:
        """preStop, SIGTERM; SIGKILL at `deadline` (on the monotonic clock)."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._before_stop()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
                await process.wait()
        self._kill_group()

    async def _before_stop(self) -> None:
        match self.spec.get("lifecycle"):
            case {"preStop": {"exec": {"command": command}}}:
                await self.execute(command)

    def _kill_group(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def terminated(self) -> Object:
        """How it ended, for a status."""
        reason = "Completed" if self.state.exit_code == 0 else "Error"
        message = _tail(self._log) if self.state.exit_code else ""
        return {"exitCode": self.state.exit_code, "reason": reason, "finishedAt": now(), "message": message}

    def status(self) -> Object:
        """Its part of the pod's status."""
        state = self.state
        if state.waiting is not None:
            shown: Object = {"waiting": {"reason": state.waiting[0], "message": state.waiting[1]}}
        elif state.exit_code is not None:
            shown = {"terminated": state.last}
        else:
            shown = {"running": {"startedAt": state.running_since}}
        return {
            "name": self.spec["name"],
            "image": self.spec["image"],
            "imageID": f"local://{self.spec['image']}",
            "ready": state.ready,
            "started": state.started,
            "restartCount": state.restarts,
            "state": shown,
            "lastState": {"terminated": state.last} if state.last and state.exit_code is None else {},
        }


async def _until_passed(probe: Probe) -> bool:
    await asyncio.sleep(probe.initial_delay_s)
    for _ in range(probe.failure_threshold):
        if await probe.passes():
            return True
        await asyncio.sleep(probe.period_s)
    return False


def _tail(path: Path, size: int = 1000) -> str:
    return path.read_bytes()[-size:].decode("utf-8", errors="replace")


def now() -> str:
    """As the API writes times."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
