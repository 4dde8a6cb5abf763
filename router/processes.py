"""Several router processes behind one port: `python -m router --processes N`.

    parent ── holds the ports, starts and restarts ──► router-x-0, router-x-1, …  (each listens on the same ports)

The processes are ordinary routers with names of their own. They share state through Redis, and one that dies loses only its own
streams. The parent serves nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from pdmesh.runtime import log, ports
from pdmesh.runtime.addresses import join_address
from pdmesh.runtime.child import ManagedProcess, StartFailed, import_path, python_command, restart_delay_s
from pdmesh.runtime.config import ConfigError, to_env
from pdmesh.runtime.process import Lifecycle
from pdmesh.runtime.telemetry.config import TelemetryConfig
from router.config import RouterConfig

START_TIMEOUT_S = 120.0
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 10.0
STABLE_AFTER_S = 30.0
"""A process that ran for this long is restarted without back-off."""
STOP_MARGIN_S = 10.0
BEAT_PERIOD_S = 1.0
MAX_MISSED = 10
"""After this many periods without a heartbeat a process counts as hung: the kernel still gives it connections, which get no
answer."""
BEAT = '{"alive": true}'

logger = logging.getLogger(__name__)


class Pulse:
    """Detect a process that no longer answers. It counts the parent's own periods, so a parent that was suspended suspects no
    process for that."""

    def __init__(self) -> None:
        self.num_missed = 0

    def beat(self) -> None:
        """Record a heartbeat."""
        self.num_missed = 0

    def is_hung(self) -> bool:
        """Return whether the process is hung. Call it once each period."""
        self.num_missed += 1
        return self.num_missed > MAX_MISSED


async def beat_forever() -> None:
    """Write a line each period, in the child, as long as the event loop runs and stdout is open."""
    while True:
        try:
            print(BEAT, flush=True)
        except OSError:
            return
        await asyncio.sleep(BEAT_PERIOD_S)


class Replica:
    """Run one of the processes; between `start` and `stop` it is restarted when it ends."""

    def __init__(self, config: RouterConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = config.router_id
        self._env = {**to_env(config), **import_path()}
        self._stop_s = config.drain_grace_s + config.linger_s + STOP_MARGIN_S
        self._clock = clock
        self._pulse = Pulse()
        self._process = self._new()
        self._task: asyncio.Task[None] | None = None
        self._num_failures = 0

    @property
    def metrics_url(self) -> str:
        """Return the URL of its metrics; "" where it has none."""
        return str(self._process.ready_line.get("metrics_url", ""))

    async def start(self) -> None:
        """Start the process, and return when it is ready. Raises StartFailed."""
        await self._process.start(START_TIMEOUT_S)
        self._task = asyncio.create_task(self._supervise(), name=f"supervise {self.name}")

    async def stop(self) -> None:
        """Drain the process."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._process.stop(self._stop_s)

    async def _supervise(self) -> None:
        while True:
            began = self._clock()
            code = await self._ended()
            self._num_failures = 0 if self._clock() - began > STABLE_AFTER_S else self._num_failures + 1
            delay_s = restart_delay_s(self._num_failures, first_s=FIRST_BACKOFF_S, max_s=MAX_BACKOFF_S)
            logger.error("%s (pid %d) ended with code %s; starting it again in %g s", self.name, self._process.pid, code, delay_s)
            await asyncio.sleep(delay_s)
            await self._restart()

    async def _ended(self) -> int:
        """Return the exit code when the process has ended; a hung process is killed."""
        self._pulse.beat()
        ended = asyncio.create_task(self._process.wait())
        try:
            while not (await asyncio.wait((ended,), timeout=BEAT_PERIOD_S))[0]:
                if self._pulse.is_hung():
                    logger.error("%s (pid %d) does not answer any more; killing it", self.name, self._process.pid)
                    self._process.kill()
            return ended.result()
        finally:
            ended.cancel()

    async def _restart(self) -> None:
        """Start a new process. One that fails to get ready has ended, which the supervision handles like any other end."""
        self._process = self._new()
        try:
            await self._process.start(START_TIMEOUT_S)
            logger.info("%s is back (pid %d)", self.name, self._process.pid)
        except StartFailed as error:
            logger.error("%s", error)

    def _new(self) -> ManagedProcess:
        return ManagedProcess(self.name, python_command("-m", "router"), env=self._env, on_line=self._heard)

    def _heard(self, line: str) -> None:
        """Print the child's log lines as our own."""
        if line == BEAT:
            self._pulse.beat()
        else:
            log.pass_on(line)


async def serve(config: RouterConfig, life: Lifecycle) -> None:
    """Run all processes until the parent is to stop. Raises ConfigError when a port is taken, StartFailed."""
    if not ports.can_share():
        raise ConfigError("--processes", "this system cannot share a port between processes", "give 1")
    if config.tenants and not config.redis:
        logger.warning(
            "--processes without --redis: each gives out 1/%d of a tenant's limits, wherever it asks", config.processes
        )
    with ExitStack() as held:
        config = _with_ports(config, held)
        base = config.router_id or f"router-{secrets.token_hex(4)}"
        replicas = [Replica(replica_config(config, base, number)) for number in range(config.processes)]
        try:
            await asyncio.gather(*(replica.start() for replica in replicas))
            life.ready(
                join_address(config.host, config.port),
                router_id=base,
                http_url=_http_url(config),
                processes=config.processes,
                metrics_url=",".join(replica.metrics_url for replica in replicas),
            )
            await life.wait_for_stop()
        finally:
            await asyncio.gather(*(replica.stop() for replica in replicas), return_exceptions=True)


def replica_config(config: RouterConfig, base: str, number: int) -> RouterConfig:
    """Return the configuration of one process; `config` has real ports. Limits of the whole router are divided."""
    return replace(
        config,
        processes=1,
        share_ports=True,
        sharers=config.processes,
        exit_with_parent=True,
        heartbeat_on_stdout=True,
        router_id=f"{base}-{number}",
        max_inflight=_part(config.max_inflight, config.processes, number, least=1),
        max_queued=_part(config.max_queued, config.processes, number, least=0),
        max_queued_bytes=_part(config.max_queued_bytes, config.processes, number, least=1),
        max_streams=_part(config.max_streams, config.processes, number, least=1),
        http_max_connections=_part(config.http_max_connections, config.processes, number, least=1),
        tenants_share=config.tenants_share / config.processes,
        telemetry=_telemetry_of(config.telemetry, number),
    )


def _telemetry_of(config: TelemetryConfig, number: int) -> TelemetryConfig:
    """Give each process its own metrics port, because each is scraped."""
    return replace(config, metrics_port=config.metrics_port + number) if config.metrics_port else config


def _part(total: int, num_parts: int, number: int, *, least: int) -> int:
    return max(least, total // num_parts + (number < total % num_parts))


def _with_ports(config: RouterConfig, held: ExitStack) -> RouterConfig:
    config = replace(config, port=_reserved(config.host, config.port, "--port", held))
    if config.http_port is None:
        return config
    host = config.http_host or config.host
    return replace(config, http_port=_reserved(host, config.http_port, "--http-port", held))


def _reserved(host: str, port: int, setting: str, held: ExitStack) -> int:
    kept: socket.socket = held.enter_context(ports.reserve(host, port, setting))
    return int(kept.getsockname()[1])


def _http_url(config: RouterConfig) -> str:
    if config.http_port is None:
        return ""
    host = config.http_host or config.host
    return f"{'https' if config.tls.is_set else 'http'}://{join_address(host, config.http_port)}"
