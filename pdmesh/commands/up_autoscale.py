"""`pdmesh up --autoscale`: keeps the objectives with as few worker processes as possible."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pdmesh.autoscaler.collect.collect import Collector
from pdmesh.autoscaler.config import goals_of, objective_of, promise
from pdmesh.autoscaler.loop import Listener, Loop, LoopSettings, Parts
from pdmesh.autoscaler.loop_history import DecisionSpans, Entry, History, append_to
from pdmesh.autoscaler.metrics import SERVICE, AutoscalerMetrics
from pdmesh.autoscaler.policy.policy import Policy
from pdmesh.autoscaler.roles import RoleChanger
from pdmesh.autoscaler.settings import AutoscalerSettings, PoolSettings
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.launcher.scale import LocalPlatform
from pdmesh.launcher.sidecars import collector_of
from pdmesh.planning.objectives import load as load_objectives
from pdmesh.platform.fallbacks import cores_to_share
from pdmesh.runtime.rpc.mesh_secret import open_secret
from pdmesh.runtime.rpc.tls import open_tls
from pdmesh.runtime.telemetry.config import TelemetryConfig, resource_of
from pdmesh.runtime.telemetry.open_metrics import open_metrics
from pdmesh.runtime.telemetry.tracing import OFF, Tracing, open_tracing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

DECISIONS_FILE = "decisions.jsonl"
OBJECTIVES_FILE = "objectives.toml"
PERIOD_S, WINDOW_S = 1.0, 10.0
TRANSIT_MS = 10.0
START_MARGIN = 1.5
"""A worker that starts beside busy ones takes longer than the first ones did."""


@dataclass(frozen=True)
class AutoscaleOptions:
    """Configure the scaling of `pdmesh up`."""

    autoscale: bool = field(default=False, metadata={"help": "start and stop workers by load"})
    max_workers: int = field(default=0, metadata={"help": "with --autoscale: most workers of all kinds; 0: two for each core"})
    min_workers: int = field(default=1, metadata={"help": "with --autoscale: fewest workers of each kind"})
    objectives: str = field(default="", metadata={"help": "TOML or JSON file with what models promise; empty: the next three"})
    ttft_ms: int = field(default=1000, metadata={"help": "with --autoscale: time to the first token that is promised"})
    tpot_ms: int = field(default=100, metadata={"help": "with --autoscale: time per further token that is promised"})
    quantile: float = field(default=0.9, metadata={"help": "with --autoscale: share of requests that are to keep both"})
    cool_down_s: float = field(
        default=20.0, metadata={"help": "with --autoscale: how long fewer must have been enough before workers go"}
    )
    stale_after_s: float = field(
        default=8.0, metadata={"help": "with --autoscale: after how long without news of all routers nothing changes any more"}
    )
    zero_after_s: float = field(
        default=0.0,
        metadata={"help": "with --autoscale: after so long without a request all workers go, until the next one; 0: never"},
    )

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        for name, least in (
            ("max_workers", 0),
            ("min_workers", 1),
            ("ttft_ms", 1),
            ("tpot_ms", 1),
            ("cool_down_s", 1.0),
            ("stale_after_s", 2.0),
            ("zero_after_s", 0.0),
        ):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name}: {getattr(self, name):g} is less than {least:g}")
        if not 0.5 <= self.quantile < 1:
            raise ValueError(f"quantile: {self.quantile:g} is not in [0.5, 1)")
        if self.zero_after_s and not self.autoscale:
            raise ValueError(f"zero_after_s: {self.zero_after_s:g} is given without --autoscale, and nothing would stop workers")
        if 0 < self.zero_after_s < self.cool_down_s:
            raise ValueError(f"zero_after_s: {self.zero_after_s:g} is less than cool_down_s, {self.cool_down_s:g}")

    def check_objectives(self, model: str) -> None:
        """Check the objectives file, if one was given, as its readers do. Raises ConfigError."""
        if self.objectives and self.autoscale:
            goals_of(objective_of(self.objectives, model), TRANSIT_MS)
        elif self.objectives:
            load_objectives(self.objectives)

    def prepared(self, config: LocalMeshConfig) -> LocalMeshConfig:
        """Return the configuration of a mesh that this can scale. Raises ValueError that names the field."""
        if config.num_both and config.num_prefill + config.num_decode:
            raise ValueError("both: --autoscale keeps workers with both roles, or prefill and decode workers, not all three")
        if not config.num_both and not config.num_prefill:
            raise ValueError("prefill: --autoscale needs at least one to begin with, or only --both")
        most = self.max_workers or 2 * len(cores_to_share())
        most = max(most, config.num_workers) if not self.max_workers else most
        if most < config.num_workers:
            raise ValueError(f"max_workers: {most} is less than the {config.num_workers} to begin with")
        if most < self.min_workers * (1 if config.num_both else 2):
            raise ValueError(f"min_workers: {self.min_workers} of each kind are more than max_workers, {most}")
        config = replace(config, max_workers=most, drain_grace_s=30.0)
        if self.zero_after_s:  # a request that finds no worker waits for one, and several tries to start it
            patience = ("--wake-timeout-s", f"{2 * config.start_timeout_s:g}")
            config = replace(config, router_args=(*patience, *config.router_args))
        return config

    def scaling(self, config: LocalMeshConfig, start_s: float) -> AutoscalerSettings:
        """Return the settings for a mesh whose workers take `start_s` to start."""
        pool = PoolSettings(
            min_replicas=self.min_workers,
            max_replicas=config.max_workers,
            start_s=max(1.0, START_MARGIN * start_s),
            allow_zero=self.zero_after_s > 0,
        )
        return AutoscalerSettings(
            prefill=pool,
            decode=pool,
            both=pool,
            max_gpus=config.max_workers,
            cool_down_s=self.cool_down_s,
            zero_after_s=self.zero_after_s or max(600.0, self.cool_down_s),
            stale_after_s=self.stale_after_s,
            drain_s=max(10.0, self.cool_down_s),
            step_period_s=2 * PERIOD_S,
            # A worker serves within seconds: current traffic predicts that time better than a trend does.
            forecast="last",
        )

    def objectives_file(self, config: LocalMeshConfig, folder: Path) -> Path:
        """Return the given file, or one in `folder` with the same content as the flags. Raises OSError."""
        if self.objectives:
            return Path(self.objectives)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / OBJECTIVES_FILE
        bounds = f"ttft_ms = {self.ttft_ms}\ntpot_ms = {self.tpot_ms}\nquantile = {self.quantile}\n"
        path.write_text(f'["{config.name_of_model}"]\n{bounds}', encoding="utf-8")
        return path

    def summary(self, config: LocalMeshConfig, folder: Path) -> list[str]:
        """Return lines for the terminal about the scaling; decisions go to `folder`. Nothing unless it is on. Raises
        ConfigError."""
        if not self.autoscale:
            return []
        objective = objective_of(str(self.objectives_file(config, folder)), config.name_of_model)
        return [
            f"autoscaling is on: {self._bounds(config)}",
            f"objectives: {promise(goals_of(objective, TRANSIT_MS))}",
            f"decisions: {folder / DECISIONS_FILE}",
        ]

    def _bounds(self, config: LocalMeshConfig) -> str:
        """Return the bounds of each kind, leaving the other kind its minimum."""
        least, most = self.min_workers, config.max_workers
        idle = f"; none after {self.zero_after_s:g} s without a request" if self.zero_after_s else ""
        if config.num_both:
            return f"{least}–{most} workers{idle}"
        return f"{least}–{most - least} prefill and {least}–{most - least} decode workers, at most {most} in all{idle}"


def local_loop(
    mesh: LocalMesh,
    options: AutoscaleOptions,
    objectives: Path,
    say: Callable[[str], None],
    settings: LoopSettings | None = None,
    listeners: Iterable[Listener] = (),
    shown: Shown | None = None,
) -> Loop:
    """Return the loop for a mesh that is ready; its actions are reported, and written beside the logs; `listeners` receive each
    decision, and `shown` exports telemetry. Raises ConfigError."""
    shown = shown or Shown()
    objective = objective_of(str(objectives), mesh.config.name_of_model)
    goals, tls = goals_of(objective, TRANSIT_MS), open_tls(mesh.tls)
    scaling = options.scaling(mesh.config, max(worker.start_s for worker in mesh.workers))
    write = append_to(mesh.log_dir / DECISIONS_FILE)

    def tell(entry: Entry) -> None:
        say(f"{entry.kind}: {entry.text}")
        write(entry)
        shown.metrics.happened(entry)

    parts = Parts(
        policy=Policy(scaling, goals),
        collector=Collector(mesh.router_addresses, objective.model, window_s=WINDOW_S, tls=tls),
        platform=LocalPlatform(mesh, say),
        roles=RoleChanger(drain_timeout_s=30.0, tls=tls, secret=open_secret(mesh.config.mesh_secret)),
        scaling=scaling,
        history=History(tell),
        spans=DecisionSpans(shown.tracing),
        on_decision=[*listeners, shown.metrics.decided],
    )
    loop = Loop(parts, settings or LoopSettings(period_s=PERIOD_S))
    shown.metrics.watch(loop)
    return loop


@dataclass(frozen=True)
class Shown:
    """Export the telemetry of the scaling."""

    metrics: AutoscalerMetrics = field(default_factory=AutoscalerMetrics)
    tracing: Tracing = OFF

    @classmethod
    def of(cls, config: LocalMeshConfig) -> Shown:
        """Return the exports that the mesh's processes use, by their environment. Raises ConfigError, StartFailed."""
        collector = collector_of(config.env, config.otlp_endpoint)
        telemetry = TelemetryConfig(otlp_endpoint=collector, metrics_port=config.autoscaler_metrics_port)
        resource, env = resource_of("autoscaler", config.mesh, ("autoscaler",)), {**os.environ, **config.env}
        metrics = open_metrics(telemetry, SERVICE, resource, env, host=config.host)
        return cls(AutoscalerMetrics(metrics), open_tracing(telemetry, SERVICE, resource, env))

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Yield the URL of its metrics, "" without one; at the end send the rest. Raises ConfigError."""
        try:
            yield await self.metrics.metrics.start()
        finally:
            await self.metrics.metrics.stop()
            await asyncio.to_thread(self.tracing.close)


@asynccontextmanager
async def scaled(loop: Loop) -> AsyncIterator[Loop]:
    """Run the loop; after the end no worker is started or drained."""
    rounds = asyncio.create_task(loop.run(), name="autoscaler")
    try:
        yield loop
    finally:
        rounds.cancel()
        await asyncio.gather(rounds, return_exceptions=True)
        await loop.close()
