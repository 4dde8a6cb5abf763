"""Configuration of an autoscaler process: flags, environment and `--help` come from this dataclass."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from pdmesh.autoscaler.kubernetes.settings import KubernetesSettings, MetricsSettings
from pdmesh.autoscaler.settings import AutoscalerSettings
from pdmesh.planning import objectives
from pdmesh.planning.capacity_load import Goals
from pdmesh.planning.objectives import ModelObjective
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.rpc.mesh_secret import MeshSecretConfig
from pdmesh.runtime.rpc.tls import TlsConfig
from pdmesh.runtime.telemetry.config import TelemetryConfig

_TARGET = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\s]+):([0-9]{1,5})")
_SIZED_FOR = tuple(priority for name, priority in objectives.PRIORITIES.items() if name != "batch")


@dataclass(frozen=True)
class AutoscalerConfig:
    """Keep a model's objectives with as few workers as possible: python -m pdmesh.autoscaler --routers … --objectives FILE."""

    routers: tuple[str, ...] = field(
        default=(), metadata={"help": "routers, host:port, comma separated; a name stands for all of its addresses"}
    )
    objectives: str = field(
        default="", metadata={"help": "TOML or JSON file with objectives per model, the one that routers read"}
    )
    model: str = field(default="", metadata={"help": "model whose workers these are; empty: the only one in --objectives"})
    platform: Literal["dry-run", "kubernetes"] = field(
        default="dry-run", metadata={"help": "what starts and stops workers; dry-run only logs the decisions"}
    )
    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on, for health"})
    port: int = field(default=50061, metadata={"help": "port to listen on; 0 picks a free one"})
    period_s: float = field(default=2.0, metadata={"help": "between two decisions"})
    window_s: float = field(default=15.0, metadata={"help": "period over which rates and latencies are measured"})
    transit_ms: float = field(default=10.0, metadata={"help": "part of TTFT outside the workers: router, reservation, way back"})
    role_drain_s: float = field(
        default=30.0, metadata={"help": "how long a worker that takes another role may finish what it had in the former"}
    )
    api_key: str = field(default="", metadata={"help": "API key of an admin, for routers that require one", "secret": True})
    tls: TlsConfig = field(default_factory=TlsConfig, metadata={"flatten": True})
    mesh_secret: MeshSecretConfig = field(default_factory=MeshSecretConfig, metadata={"flatten": True})
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig, metadata={"flatten": True})
    scaling: AutoscalerSettings = field(default_factory=AutoscalerSettings, metadata={"flatten": True})
    kubernetes: KubernetesSettings = field(default_factory=KubernetesSettings)
    external_metrics: MetricsSettings = field(default_factory=MetricsSettings)
    exit_with_parent: bool = field(default=False, metadata={"help": "end when the process that started this one ends"})

    def validate(self) -> None:
        """Raise ConfigError for invalid settings."""
        if not self.routers:
            raise ConfigError("routers", "is empty", "name at least one, such as pdmesh-router:8100")
        for target in self.routers:
            _check_target(target)
        if not 0 <= self.port <= 65535:
            raise ConfigError("port", f"{self.port} is not a port", "give 0 to 65535")
        for name, least in (("period_s", 0.1), ("window_s", 1.0), ("transit_ms", 0.0), ("role_drain_s", 0.1)):
            if not getattr(self, name) >= least:
                raise ConfigError(name, f"{getattr(self, name):g} is less than {least:g}", f"give {least:g} or more")
        if self.window_s < 2 * self.period_s:
            raise ConfigError("window_s", f"{self.window_s:g} is less than two periods of {self.period_s:g}", "raise it")
        if self.scaling.stale_after_s < 2 * self.period_s:
            problem = f"{self.scaling.stale_after_s:g} is less than two periods of {self.period_s:g}"
            raise ConfigError("scaling.stale_after_s", problem, "figures are never younger: raise it")
        if not self.objectives:
            raise ConfigError("objectives", "is empty", "give the file with what the model promises")
        if not self.api_key.isascii() or not self.api_key.isprintable() or " " in self.api_key:
            raise ConfigError("api_key", "contains characters that no key has", "give it as `pdmesh keys new` has shown it")


def objective_of(path: str, model: str) -> ModelObjective:
    """Return the objective of `model`, or the only one. Raises ConfigError."""
    known = {objective.model: objective for objective in objectives.load(path)}
    if not model and len(known) == 1:
        return next(iter(known.values()))
    if model not in known:
        problem = f"{path} says nothing of {model!r}" if model else f"{path} names {len(known)} models"
        raise ConfigError("--model", problem, f"give one of {', '.join(sorted(known)) or '(none)'}")
    return known[model]


def goals_of(objective: ModelObjective, transit_ms: float) -> Goals:
    """Return the goals for capacity planning: the tightest bounds of all priorities, because one pool serves them all. Batch
    requests never tighten them: they wait for capacity. Raises ConfigError for an unsupported quantile."""
    if objective.quantile < 0.5:
        raise ConfigError("--objectives", f"{objective.model}.quantile: {objective.quantile:g} is less than a half", "raise it")
    promised = [objective.bounds(priority) for priority in _SIZED_FOR]
    ttft_s, tpot_s = (_tightest_s(getattr(bounds, name) for bounds in promised) for name in ("ttft_ms", "tpot_ms"))
    return Goals(ttft_s, tpot_s, objective.quantile, transit_ms / 1000)


def promise(goals: Goals) -> str:
    """Describe the goals in words."""
    bounds = [f"{name} {1000 * bound_s:.0f} ms" for name, bound_s in (("TTFT", goals.ttft_s), ("TPOT", goals.tpot_s)) if bound_s]
    return f"{', '.join(bounds) or 'queues that do not grow'} for {100 * goals.quantile:g} % of requests"


def _tightest_s(bounds_ms: Iterable[int | None]) -> float | None:
    return min((bound / 1000 for bound in bounds_ms if bound is not None), default=None)


def _check_target(target: str) -> None:
    found = _TARGET.fullmatch(target)
    if found is None:
        raise ConfigError("routers", f"{target!r} is not host:port")
    if not 1 <= int(found[2]) <= 65535:
        raise ConfigError("routers", f"{target!r}: {found[2]} is not a port", "give 1 to 65535")
