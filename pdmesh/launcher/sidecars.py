"""Provides the registry of a local mesh: a supervised embedded Redis, or a check of the user's own."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from pdmesh.launcher.member import STABLE_AFTER_S, OnEvent, backoff_s, how_it_ended
from pdmesh.runtime import ports
from pdmesh.runtime.addresses import join_address
from pdmesh.runtime.child import StartFailed
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from pdmesh.runtime.telemetry.config import TelemetryConfig

_RETRY_PERIOD_S = 0.2


class RedisMember:
    """Supervise a Redis that restarts on the same port when it dies, empty: workers and routers register again by themselves.

    It owns its EmbeddedRedis: nothing else starts or stops it. A restart makes a new one."""

    def __init__(self, on_event: OnEvent, *, restart: bool) -> None:
        self.num_restarts = 0
        self._on_event = on_event
        self._restart = restart
        self._redis = EmbeddedRedis()
        self._watch: asyncio.Task[None] | None = None
        self._started_at = 0.0
        self._num_failures = 0

    @property
    def url(self) -> str:
        """Return the URL, which stays over restarts."""
        return self._redis.url

    @property
    def pid(self) -> int | None:
        """Return the id of the process that runs now; None between two."""
        return self._redis.pid if self._redis.running else None

    async def start(self) -> str:
        """Start it and watch it from then on; return the URL. Raises StartFailed."""
        await self._start_process()
        self._watch = asyncio.create_task(self._supervise(), name="supervise redis")
        return self.url

    async def stop(self) -> None:
        """End it for good; idempotent."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
            self._watch = None
        await self._redis.stop()

    async def _start_process(self) -> None:
        self._started_at = time.monotonic()
        await self._redis.start()

    async def _supervise(self) -> None:
        while True:
            pid, code = self._redis.pid, await self._redis.wait()
            report = f"redis (pid {pid}) {how_it_ended(code)}; the mesh continues with what it knows"
            if not self._restart:
                self._on_event(report)
                return
            self._num_failures = 0 if time.monotonic() - self._started_at >= STABLE_AFTER_S else self._num_failures + 1
            await self._start_again(report)

    async def _start_again(self, report: str) -> None:
        self._redis = EmbeddedRedis(self._redis.port)
        while True:
            delay_s = backoff_s(self._num_failures)
            self._on_event(f"{report}; starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            try:
                await self._start_process()
            except StartFailed as error:
                report = str(error)
                self._num_failures += 1
                continue
            self.num_restarts += 1
            self._on_event(f"redis is back (pid {self._redis.pid}, {self._redis.url})")
            return


async def require_redis(url: str, timeout_s: float) -> None:
    """Wait until the user's Redis answers. Raises StartFailed with the reason for an invalid URL, or after `timeout_s`."""
    from pdmesh.runtime.registry.redis_link import (  # needs the package redis; the embedded server does not
        why_silent,
        without_password,
    )

    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    try:
        while (reason := await why_silent(url)) is not None:
            if loop.time() >= deadline:
                remedy = "start it, or leave out --redis for an embedded one"
                raise StartFailed(f"Redis at {without_password(url)} does not answer ({reason}); {remedy}")
            await asyncio.sleep(_RETRY_PERIOD_S)
    except ConfigError as error:
        raise StartFailed(str(error)) from None


# Holds the port to which the processes of a local mesh send their traces when it has a console.


HOST = "127.0.0.1"
VARIABLE = "PDMESH_OTLP_ENDPOINT"


@dataclass(frozen=True)
class Traces:
    """Hold a bound socket that never listens: no other process gets the port while the console is not running.

    `given`: the environment that processes get anyway; `forward`: the user's own collector, to which the console forwards
    everything, "" without one."""

    held: socket.socket
    given: Mapping[str, str]
    forward: str

    @classmethod
    def reserve(cls, env: Mapping[str, str], otlp_endpoint: str = "") -> Traces:
        """Bind the port. `env`: added to every process's environment; `otlp_endpoint`: the user's collector, "" for the
        environment's. Raises StartFailed."""
        forward = collector_of(env, otlp_endpoint)
        try:
            return cls(ports.reserve(HOST, 0, "--otlp-port"), env, forward)
        except ConfigError as error:
            raise StartFailed(f"console: {error}") from None

    @property
    def address(self) -> str:
        """Return the address of the console's OTLP."""
        return join_address(HOST, self.held.getsockname()[1])

    @property
    def env(self) -> dict[str, str]:
        """Return the environment of all processes."""
        return {**self.given, VARIABLE: self.address}

    def release(self) -> Mapping[str, str]:
        """Release the port; return the environment that was given."""
        self.held.close()
        return self.given


def require_free(host: str, port: int) -> None:
    """Check the page's port before models are loaded in vain. Raises StartFailed when it is taken; 0 never is."""
    if not port:
        return
    try:
        ports.reserve(host, port, "--console-port").close()
    except ConfigError as error:
        raise StartFailed(f"console: {error}; --no-console leaves it out") from None


def collector_of(env: Mapping[str, str], otlp_endpoint: str = "") -> str:
    """Return where a process with this environment sends traces and metrics, by `env`, else `otlp_endpoint`, else our own
    environment: a URL, "" for nowhere. Raises StartFailed."""
    known = {**os.environ, **({VARIABLE: otlp_endpoint} if otlp_endpoint else {}), **env}
    try:
        endpoint = TelemetryConfig(otlp_endpoint=known.get(VARIABLE, "")).endpoint(known)
    except ValueError as error:
        raise StartFailed(f"traces cannot be sent on: {error}") from None
    if endpoint is None:
        return ""
    return f"{'https' if endpoint.encrypted else 'http'}://{endpoint.target}"
