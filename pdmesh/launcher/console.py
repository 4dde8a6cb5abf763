"""Holds the port to which the processes of a local mesh send their traces when it has a console."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from pdmesh.runtime import ports
from pdmesh.runtime.child import StartFailed
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.telemetry.config import TelemetryConfig

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
        return f"{HOST}:{self.held.getsockname()[1]}"

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
