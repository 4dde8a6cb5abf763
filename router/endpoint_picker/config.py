"""Configuration of an endpoint picker: flags, environment and `--help` come from this dataclass."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdmesh.runtime.rpc.tls import TlsConfig
from pdmesh.runtime.telemetry.config import TelemetryConfig
from router.flow_control.slo_admission import BATCH, INTERACTIVE, STANDARD
from router.routing.policy import POLICIES

_ENDPOINT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[0-9]{1,3}(\.[0-9]{1,3}){3}):[0-9]{1,5}")
_POOL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?/[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
_OBJECTIVE = re.compile(r"(?P<name>[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?)=(?P<priority>[+-]?[0-9]{1,9})")
_AT_LEAST_ONE = (
    "max_body_bytes", "max_requests", "max_inflight", "max_queued_bytes", "max_num_seqs", "prefix_block_bytes",
    "prefix_index_blocks", "bytes_per_token",
)  # fmt: skip
_POSITIVE = ("metrics_period_s", "metrics_timeout_s", "pool_period_s", "hold_timeout_s")


@dataclass(frozen=True)
class PickerConfig:
    """Configure an endpoint picker. The endpoints come from an InferencePool (`pool`) or are given (`endpoints`)."""

    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on"})
    port: int = field(default=9002, metadata={"help": "port to listen on; 0 picks a free one"})
    pool: str = field(
        default="", metadata={"help": "InferencePool whose pods are the endpoints, namespace/name; needs a service account"}
    )
    endpoints: tuple[str, ...] = field(default=(), metadata={"help": "model servers instead of a pool, ip:port,ip:port"})
    policy: str = field(default="predict", metadata={"help": "how an endpoint is picked (docs/routing.md)", "choices": POLICIES})
    num_fallbacks: int = field(default=2, metadata={"help": "further endpoints that the gateway may try when the first fails"})
    objectives: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "priorities by the name in x-gateway-inference-objective, name=priority,...: above 0 interactive, below 0 "
            "batch, which is refused first"
        },
    )
    metrics_path: str = field(default="/metrics", metadata={"help": "path of the endpoints' metrics; empty: they are not read"})
    metrics_period_s: float = field(default=1.0, metadata={"help": "seconds between two readings of an endpoint's metrics"})
    metrics_timeout_s: float = field(default=2.0, metadata={"help": "how long an endpoint has to send its metrics"})
    max_failures: int = field(
        default=3, metadata={"help": "an endpoint whose metrics cannot be had so many times in a row gets no requests"}
    )
    pool_period_s: float = field(default=1.0, metadata={"help": "seconds between two looks at the pods of the pool"})
    max_num_seqs: int = field(default=256, metadata={"help": "requests that an endpoint runs at a time, where it does not say"})
    prefix_block_bytes: int = field(
        default=256, metadata={"help": "bytes of a prompt's text that make a block of the prefix index"}
    )
    prefix_index_blocks: int = field(default=1 << 20, metadata={"help": "blocks that the prefix index holds, of all endpoints"})
    bytes_per_token: int = field(default=4, metadata={"help": "bytes of text that count as a token"})
    max_body_bytes: int = field(default=4 << 20, metadata={"help": "bytes of a request's body; more get 413"})
    max_requests: int = field(default=16_384, metadata={"help": "HTTP requests under way at the same time; more are refused"})
    max_inflight: int = field(default=4096, metadata={"help": "requests at endpoints at the same time; more wait"})
    max_queued: int = field(default=1024, metadata={"help": "requests that wait; more get 429"})
    max_queued_bytes: int = field(
        default=64 << 20, metadata={"help": "bytes of bodies that arrive or wait, of all requests together; more get 429"}
    )
    hold_timeout_s: float = field(
        default=5.0, metadata={"help": "how long predictions may hold requests back while nothing moves"}
    )
    drain_grace_s: float = field(default=5.0, metadata={"help": "how long requests under way are followed at the end"})
    secure_serving: bool = field(
        default=False,
        metadata={"help": "serve with a certificate that is made at start, for gateways that encrypt and do not verify"},
    )
    tls: TlsConfig = field(default_factory=TlsConfig, metadata={"flatten": True})
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig, metadata={"flatten": True})
    exit_with_parent: bool = field(default=False, metadata={"help": "stop when the process that started this one is gone"})

    def validate(self) -> None:
        """Check all settings. Raises ValueError that names the field."""
        for name in _AT_LEAST_ONE:
            _require(getattr(self, name) >= 1, name, "must be at least 1")
        for name in _POSITIVE:
            _require(getattr(self, name) > 0, name, "must be positive")
        for name in ("num_fallbacks", "max_queued", "drain_grace_s"):
            _require(getattr(self, name) >= 0, name, "must not be negative")
        _require(self.max_failures >= 1, "max_failures", "must be at least 1")
        _require(0 <= self.port <= 65535, "port", "must be between 0 and 65535")
        _require(bool(self.pool) != bool(self.endpoints), "endpoints", "give these, or --pool, and not both")
        _require(not self.pool or bool(_POOL.fullmatch(self.pool)), "pool", f"{self.pool!r} is not namespace/name")
        for entry in self.endpoints:
            _require(
                is_endpoint(entry), "endpoints", f"{entry!r} is not ip:port; names are not looked up, as the gateway does not"
            )
        _require(not self.metrics_path or self.metrics_path.startswith("/"), "metrics_path", "must begin with a slash")
        _require(self.metrics_path.isascii() and self.metrics_path.isprintable(), "metrics_path", "must be plain text")
        _require(" " not in self.metrics_path, "metrics_path", "must have no space")
        _require(not (self.secure_serving and self.tls.is_set), "secure_serving", "there is a certificate (tls_cert) already")
        for entry in self.objectives:
            _require(bool(_OBJECTIVE.fullmatch(entry)), "objectives", f"{entry!r} is not name=priority")

    def priorities(self) -> Mapping[str, int]:
        """Return the priority of common.proto by the name of an objective."""
        found = [match for match in map(_OBJECTIVE.fullmatch, self.objectives) if match is not None]
        return {match["name"]: rank_of(int(match["priority"])) for match in found}


def rank_of(priority: int) -> int:
    """Return the priority of common.proto for one of the inference extension, where requests below 0 may be dropped."""
    return INTERACTIVE if priority > 0 else STANDARD if priority == 0 else BATCH


def is_endpoint(text: str) -> bool:
    """Return whether `text` is an address and a port, as gateways take them."""
    return bool(_ENDPOINT.fullmatch(text)) and 0 < int(text.rpartition(":")[2]) <= 65535


def _require(condition: bool, name: str, what: str) -> None:
    if not condition:
        raise ValueError(f"{name}: {what}")
