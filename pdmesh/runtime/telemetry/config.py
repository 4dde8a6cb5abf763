"""Settings of traces and metrics, which the configuration of every process of the mesh holds (flattened)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata

from pdmesh.runtime.telemetry.spans import Attributes, Value

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_ENDPOINT = re.compile(r"(?P<scheme>https?://)?(?P<target>(\[[0-9A-Fa-f:.]+\]|[^:/\s\[\]]+):[0-9]{1,5})/?")


@dataclass(frozen=True)
class Endpoint:
    """Name a collector: "host:port" of OTLP over gRPC, and whether the connection is encrypted."""

    target: str
    encrypted: bool


@dataclass(frozen=True)
class TelemetryConfig:
    """Configure the destinations of traces and metrics. `metrics_port` None: no endpoint for scrapers."""

    otlp_endpoint: str = field(
        default="",
        metadata={
            "help": "collector that gets traces and metrics by OTLP over gRPC, host:port or https://host:port; empty: what "
            "OTEL_EXPORTER_OTLP_ENDPOINT says, else nothing is sent"
        },
    )
    trace_requests: bool = field(default=True, metadata={"help": "send traces of requests where there is a collector"})
    trace_share: float = field(
        default=1.0,
        metadata={
            "help": "share of requests whose trace is sent; those that fail or miss an objective always are, and a caller's own "
            "trace is sent if the caller sends it"
        },
    )
    trace_held_spans: int = field(
        default=8192, metadata={"help": "spans of other requests that are held for a while, in case that their trace is wanted"}
    )
    metrics_port: int | None = field(
        default=None,
        metadata={
            "help": "port of /metrics for Prometheus; router processes (--processes) take the next ones; 0: any free, empty: none"
        },
    )
    metrics_host: str = field(default="", metadata={"help": "address to listen on for /metrics; empty: --host"})

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        if self.otlp_endpoint:
            parse_endpoint(self.otlp_endpoint)
        if not 0 <= self.trace_share <= 1:
            raise ValueError("trace_share: must be between 0 and 1")
        if self.trace_held_spans < 0:
            raise ValueError("trace_held_spans: must not be negative")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise ValueError("metrics_port: must be between 0 and 65535")

    def endpoint(self, env: Mapping[str, str]) -> Endpoint | None:
        """Return the collector, ours or OpenTelemetry's own setting in `env`; None: nothing is sent. Raises ValueError, naming
        the variable, for one that cannot be read."""
        if self.otlp_endpoint:
            return parse_endpoint(self.otlp_endpoint)
        for name in ENDPOINT_VARIABLES:
            if env.get(name) and _speaks_grpc(env):
                return parse_endpoint(env[name], name)
        return None


def parse_endpoint(text: str, name: str = "otlp_endpoint") -> Endpoint:
    """Parse an endpoint. Raises ValueError that begins with `name`."""
    match = _ENDPOINT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{name}: {text[:100]!r} is no collector; give host:port, http://host:port or https://host:port")
    return Endpoint(match["target"], match["scheme"] == "https://")


def _speaks_grpc(env: Mapping[str, str]) -> bool:
    """Return whether the endpoint in the environment applies to us: other programs may use OTLP over HTTP, which has another
    port."""
    protocol = next((env[name] for name in PROTOCOL_VARIABLES if env.get(name)), "grpc")
    return protocol == "grpc" and env.get("OTEL_SDK_DISABLED", "").lower() != "true"


# The identity of the process on every span and metric that it sends.


def resource_of(instance_id: str, mesh: str, roles: Sequence[str], epoch: int | None = None) -> Attributes:
    """Return the resource attributes. `instance_id` is the name of the router, worker or autoscaler; `epoch` tells its
    incarnations apart."""
    attributes: dict[str, Value] = {
        "service.instance.id": instance_id,
        "service.namespace": "pdmesh",
        "service.version": _version(),
        "pdmesh.mesh": mesh,
        "pdmesh.roles": list(roles),
    }
    if epoch is not None:
        attributes["pdmesh.epoch"] = f"{epoch:016x}"
    return attributes


@cache
def _version() -> str:
    try:
        return metadata.version("pdmesh")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "unknown"
