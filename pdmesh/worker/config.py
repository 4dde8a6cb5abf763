"""Configuration of a worker process: flags, environment and `--help` come from these dataclasses. Also binds threads to cores."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from decode_service.ports import DecodeSettings, ReservationSettings, StreamSettings
from kvtransfer.tiers.settings import TierConfig
from kvtransfer.transports.registry import TRANSPORTS, defaults
from pdmesh.engine.config import EngineConfig
from pdmesh.platform import linux
from pdmesh.platform.capabilities import AFFINITY
from pdmesh.platform.fallbacks import usable_cores
from pdmesh.runtime.registry.records import NO_REVISION
from pdmesh.runtime.rpc.mesh_secret import MeshSecretConfig
from pdmesh.runtime.rpc.tls import TlsConfig
from pdmesh.runtime.telemetry.config import TelemetryConfig
from pdmesh.worker.engines.registry import DEFAULT_ENGINE, ENGINE_HELP, ENGINES, check_settings
from pdmesh.worker.engines.vllm_settings import VLLM_ARG_HELP
from pdmesh.worker.kv_events.settings import KVEventSettings
from pdmesh.worker.roles import ROLE_NAMES

# Cores of an engine's threads. Only these are bound; the event loop and gRPC stay where the system puts them.
#
# A thread inherits its creator's cores. So the thread that loads the engine is bound while the kernels start their threads, and
# the engine thread, which computes with them, is bound before its first step.


def problem_with(cpus: Sequence[int], num_threads: int) -> str | None:
    """Return why an engine of `num_threads` (0: one for each core) cannot be bound to `cpus`; None if it can, or if `cpus` is
    empty."""
    if not cpus:
        return None
    if not AFFINITY.is_there:
        return f"this system binds no threads to cores ({AFFINITY.problem}); leave it empty"
    if len(set(cpus)) != len(cpus):
        return f"{_listed(cpus)} names a core twice"
    if strange := sorted(set(cpus).difference(usable_cores())):
        return f"this process may not use {_listed(strange)}; give some of {_listed(usable_cores())}"
    if num_threads > len(cpus):
        return f"{_listed(cpus)} are fewer than num_threads {num_threads}; give a core for each thread"
    return None


@contextlib.contextmanager
def bound(cpus: Sequence[int]) -> Iterator[None]:
    """Bind this thread, and the threads that it starts meanwhile, to `cpus` (none: no change); at the end restore this thread's
    cores."""
    if not cpus:
        yield
        return
    before = linux.allowed_cores()
    linux.bind_thread(cpus)
    try:
        yield
    finally:
        linux.bind_thread(before)


def bind(cpus: Sequence[int]) -> None:
    """Bind this thread to `cpus`; none: leave it unbound."""
    if cpus:
        linux.bind_thread(cpus)


def _listed(cpus: Sequence[int]) -> str:
    return ",".join(map(str, cpus))


_KV_PULL_HELP = (
    "fetch KV that another worker has, such as the decode worker of an earlier turn: where it is quicker, always, never"
)
_WARM_HELP = (
    "share of the block pool that a worker which starts fills with the most used prefixes of others, up to 0.25; 0: nothing"
)
_ROLES_HELP = "services that take requests at start: prefill, decode or both"
_TRANSPORTS_HELP = "KV transports to offer; cuda_ipc: of pools on GPUs; nixl is one more, where its package is installed (RDMA)"
MAX_WARM_SHARE = 0.25
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Configure a worker: an engine with the prefill service, the decode service, or both. Durations in seconds."""

    engine: EngineConfig = field(metadata={"flatten": True})
    engine_name: str = field(default=DEFAULT_ENGINE, metadata={"help": ENGINE_HELP, "flag": "engine", "choices": ENGINES})
    vllm_args: tuple[str, ...] = field(default=(), metadata={"help": VLLM_ARG_HELP, "flag": "vllm_arg", "repeated": True})
    roles: tuple[str, ...] = field(default=("prefill", "decode"), metadata={"help": _ROLES_HELP})
    model_name: str = field(default="", metadata={"help": "name that clients ask for; empty: the model's file or folder name"})
    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on, for gRPC and for KV transfer"})
    port: int = field(default=0, metadata={"help": "gRPC port; 0 picks a free one"})
    http_port: int | None = field(
        default=None,
        metadata={"help": "port of the worker's own HTTP (OpenAI's API), for gateways; 0 picks a free one, empty: no HTTP"},
    )
    http_tokenizer: str = field(default="", metadata={"help": "folder with the tokenizer for --http-port; empty: --model"})
    http_linger_s: float = field(
        default=3.0, metadata={"help": "how long --http-port takes requests after SIGTERM, until gateways have noticed"}
    )
    advertise: str = field(default="", metadata={"help": "host at which others reach the worker; empty: --host"})
    transfer_port: int = field(default=0, metadata={"help": "port of the KV receiver (tcp; nixl takes any); 0 picks a free one"})
    transports: tuple[str, ...] = field(default=defaults(), metadata={"help": _TRANSPORTS_HELP})
    worker_id: str = field(default="", metadata={"help": "name of this worker, stable over restarts; empty: a random one"})
    revision: str = field(
        default="", metadata={"help": "revision of the deployment that it belongs to, for `pdmesh rollout`; empty: none"}
    )
    redis: str = field(
        default="", metadata={"help": "URL of the registry; empty: routers list this worker in --workers", "secret": True}
    )
    mesh: str = field(default="default", metadata={"help": "name of the mesh in the registry"})
    registry_ttl_s: float = field(default=3.0, metadata={"help": "how long a registration lives without renewal"})
    lease_s: float = field(default=5.0, metadata={"help": "how long a reservation lives without progress"})
    stream_timeout_s: float = field(default=1.0, metadata={"help": "silence after which a router's stream counts as broken"})
    grace_s: float = field(default=2.0, metadata={"help": "how long a router may take to attach again"})
    report_period_s: float = field(default=0.2, metadata={"help": "period of load reports to routers"})
    kv_pull: str = field(default="auto", metadata={"help": _KV_PULL_HELP, "choices": ("auto", "always", "off")})
    warm_share: float = field(default=MAX_WARM_SHARE, metadata={"help": _WARM_HELP})
    tiers: TierConfig = field(default_factory=TierConfig, metadata={"flatten": True})
    kv_event_settings: KVEventSettings = field(default_factory=KVEventSettings, metadata={"flatten": True})
    drain_grace_s: float = field(default=30.0, metadata={"help": "how long running requests may finish after SIGTERM"})
    cpus: tuple[int, ...] = field(default=(), metadata={"help": "cores of the engine's threads, such as 0,1; empty: any (Linux)"})
    tls: TlsConfig = field(default_factory=TlsConfig, metadata={"flatten": True})
    mesh_secret: MeshSecretConfig = field(default_factory=MeshSecretConfig, metadata={"flatten": True})
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig, metadata={"flatten": True})
    exit_with_parent: bool = field(default=False, metadata={"help": "end when the process that started this one ends"})

    def validate(self) -> None:
        """Check all settings. Raises ValueError that names the field."""
        _require(bool(self.roles) and set(self.roles) <= set(ROLE_NAMES), "roles", f"give one or more of {', '.join(ROLE_NAMES)}")
        _require(bool(self.transports), "transports", f"give one or more of {', '.join(TRANSPORTS)}")
        unknown = set(self.transports) - set(TRANSPORTS)
        _require(not unknown, "transports", f"{', '.join(sorted(unknown))} unknown; there are {', '.join(TRANSPORTS)}")
        for name in ("worker_id", "revision", "mesh"):
            value = getattr(self, name)
            _require(not value or bool(_ID.fullmatch(value)), name, f"{value[:80]!r} is not 1 to 64 of A-Z a-z 0-9 . _ -")
        _require(self.revision != NO_REVISION, "revision", f"{NO_REVISION} stands for workers that name none")
        for name in ("port", "transfer_port"):
            _require(0 <= getattr(self, name) <= 65535, name, "must be between 0 and 65535")
        _require(self.http_port is None or 0 <= self.http_port <= 65535, "http_port", "must be between 0 and 65535")
        _require(
            self.http_port is None or "decode" in self.roles, "http_port", "needs the role decode; give --roles prefill,decode"
        )
        for name in ("registry_ttl_s", "lease_s", "stream_timeout_s", "grace_s", "report_period_s"):
            value = getattr(self, name)
            _require(math.isfinite(value) and value > 0, name, "must be a positive number of seconds")
        _require(math.isfinite(self.http_linger_s) and self.http_linger_s >= 0, "http_linger_s", "must be 0 or more seconds")
        _require(math.isfinite(self.drain_grace_s) and self.drain_grace_s >= 0, "drain_grace_s", "must be 0 or more seconds")
        problem = problem_with(self.cpus, self.engine.num_threads)
        _require(problem is None, "cpus", problem or "")
        _require(bool(self.host), "host", "give an address to listen on, such as 127.0.0.1 or 0.0.0.0")
        _require(
            bool(self.advertise) or self.host not in ("0.0.0.0", "::", "[::]"),
            "advertise",
            f"host {self.host} is no address that others can connect to; give the one that they can",
        )
        _require(0 <= self.warm_share <= MAX_WARM_SHARE, "warm_share", f"{self.warm_share} is not between 0 and {MAX_WARM_SHARE}")
        self.tiers.validate()
        check_settings(self.engine_name, self)

    @property
    def served_name(self) -> str:
        """Return the model name that clients use."""
        return self.model_name or Path(self.engine.model).resolve().name.removesuffix(".gguf")

    @property
    def engine_config(self) -> EngineConfig:
        """Return the engine's settings. Bound to cores, the engine gets a thread for each unless num_threads is set.

        Only a worker with the prefill role sends from its pool. A worker that gets that role later cannot send through shared
        memory, but through other transports.
        """
        num_threads = self.engine.num_threads or len(self.cpus)
        return replace(self.engine, num_threads=num_threads, kv_shared=self.engine.kv_shared or "prefill" in self.roles)

    @property
    def keep_output_s(self) -> float:
        """Return the time for which finished output is kept: a router needs time to notice a broken stream, and then has the
        grace period to reattach."""
        return 2 * self.stream_timeout_s + self.grace_s

    @property
    def decode_settings(self) -> DecodeSettings:
        """Return the settings of the decode service."""
        return DecodeSettings(
            stream=StreamSettings(self.stream_timeout_s, self.grace_s, self.report_period_s),
            reservation=ReservationSettings(lease_s=self.lease_s, keep_output_s=self.keep_output_s),
        )


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """Configure a worker that prefills, unless roles say otherwise. Durations in seconds."""

    roles: tuple[str, ...] = field(default=("prefill",), metadata={"help": _ROLES_HELP})


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """Configure a worker that decodes, unless roles say otherwise. Durations in seconds."""

    roles: tuple[str, ...] = field(default=("decode",), metadata={"help": _ROLES_HELP})


def _require(condition: bool, name: str, what: str) -> None:
    if not condition:
        raise ValueError(f"{name}: {what}")
