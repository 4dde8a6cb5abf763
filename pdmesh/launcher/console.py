"""Where the processes of a local mesh send their traces when it has a console: a port that is held for it from the beginning."""

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
    """A bound socket that never listens: nobody else gets the port while the console is not there (yet, or for a moment).

    `given`: what processes were to have in their environment anyway; `forward`: the user's own collector, which the console hands
    everything on to, "" without one."""

    held: socket.socket
    given: Mapping[str, str]
    forward: str

    @classmethod
    def reserve(cls, env: Mapping[str, str], otlp_endpoint: str = "") -> Traces:
        """`env`: added to every process's environment; `otlp_endpoint`: the user's collector, "" for what the environment says.
        Raises StartFailed."""
        forward = collector_of(env, otlp_endpoint)
        try:
            return cls(ports.reserve(HOST, 0, "--otlp-port"), env, forward)
        except ConfigError as error:
            raise StartFailed(f"console: {error}") from None

    @property
    def address(self) -> str:
        """Of the console's OTLP."""
        return f"{HOST}:{self.held.getsockname()[1]}"

    @property
    def env(self) -> dict[str, str]:
        """For all processes."""
        return {**self.given, VARIABLE: self.address}

    def release(self) -> Mapping[str, str]:
        """The port is anybody's again; returns the environment that was given."""
        self.held.close()
        return self.given


def require_free(host: str, port: int) -> None:
    """Before models are loaded for nothing. Raises StartFailed when the page's port is taken; 0 never is."""
    if not port:
        return
    try:
        ports.reserve(host, port, "--console-port").close()
    except ConfigError as error:
        raise StartFailed(f"console: {error}; --no-console leaves it out") from None


def collector_of(env: Mapping[str, str], otlp_endpoint: str = "") -> str:
    """Where a process with this environment sends traces and metrics, by `env`, else `otlp_endpoint`, else our own environment: a
    URL, "" for nowhere. Raises StartFailed."""
    known = {**os.environ, **({VARIABLE: otlp_endpoint} if otlp_endpoint else {}), **env}
    try:
        endpoint = TelemetryConfig(otlp_endpoint=known.get(VARIABLE, "")).endpoint(known)
    except ValueError as error:
        raise StartFailed(f"traces cannot be sent on: {error}") from None
    if endpoint is None:
        return ""
    return f"{'https' if endpoint.encrypted else 'http'}://{endpoint.target}"
