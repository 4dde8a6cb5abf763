"""Holds an operator's scaling settings: flags, environment and `--help` come from these dataclasses. Durations in seconds."""

import math
from dataclasses import dataclass, field
from typing import Literal

from pdmesh.autoscaler.views import PoolName
from pdmesh.runtime.config import ConfigError


@dataclass(frozen=True)
class PoolSettings:
    """Configure one pool."""

    min_replicas: int = field(default=1, metadata={"help": "fewest replicas, but for a pool that may go to zero and is idle"})
    max_replicas: int = field(default=64, metadata={"help": "most replicas"})
    gpus_per_replica: int = field(default=1, metadata={"help": "GPUs (or whatever --max-gpus counts) of one replica"})
    start_s: float = field(default=60.0, metadata={"help": "from asking for a pod until it serves"})
    allow_zero: bool = field(
        default=False, metadata={"help": "let an idle pool go to zero; the first request then waits for a start"}
    )

    def check(self, name: str) -> None:
        """Raise ConfigError naming the field of the pool `name`."""
        if self.min_replicas < 1:
            raise ConfigError(f"{name}_min_replicas", f"{self.min_replicas} is less than 1", "allow_zero lets it go to zero")
        if self.max_replicas < self.min_replicas:
            problem = f"{self.max_replicas} is less than min_replicas, {self.min_replicas}"
            raise ConfigError(f"{name}_max_replicas", problem, "raise it, or lower min_replicas")
        if self.gpus_per_replica < 1:
            raise ConfigError(f"{name}_gpus_per_replica", f"{self.gpus_per_replica} is less than 1", "count at least one")
        _check_number(f"{name}_start_s", self.start_s, least=0.0)


@dataclass(frozen=True)
class AutoscalerSettings:
    """Configure everything that decisions depend on besides the objectives."""

    prefill: PoolSettings = field(default_factory=PoolSettings)
    decode: PoolSettings = field(default_factory=PoolSettings)
    both: PoolSettings = field(default_factory=PoolSettings)
    max_gpus: int | None = field(default=None, metadata={"help": "of all pools, draining pods included; empty: any number"})
    cool_down_s: float = field(
        default=120.0,
        metadata={
            "help": "how long fewer must have been enough, and none added, before a pool shrinks; 2.5 times that beside bursts"
        },
    )
    headroom: float = field(
        default=0.1,
        metadata={"help": "a pool shrinks only if the rest bears this share more; beside uneven arrivals twice that"},
    )
    drain_s: float = field(default=120.0, metadata={"help": "time to drain a backlog"})
    stale_after_s: float = field(default=30.0, metadata={"help": "older figures are not used"})
    zero_after_s: float = field(default=600.0, metadata={"help": "without any request before an idle pool goes to zero"})
    max_step_up: int = field(default=64, metadata={"help": "replicas added to a pool within --step-period-s"})
    max_step_down: int = field(default=64, metadata={"help": "replicas taken from a pool within --step-period-s"})
    step_period_s: float = field(default=15.0, metadata={"help": "over which steps are counted"})
    max_kv_occupancy: float = field(default=0.9, metadata={"help": "of the KV of workers that decode; more, and the pool grows"})
    forecast: Literal["kalman", "holt-winters", "last"] = field(default="kalman", metadata={"help": "how arrivals are forecast"})
    season_s: float = field(default=86400.0, metadata={"help": "after which arrivals repeat, for holt-winters"})
    forecast_sigmas: float = field(default=0.5, metadata={"help": "standard deviations of the forecast that are added to it"})
    flips: bool = field(default=True, metadata={"help": "let idle workers take the other role before pods are asked for"})

    def validate(self) -> None:
        """Raise ConfigError for invalid settings."""
        for name in PoolName:
            self.of(name).check(name.value)
        for name_, least in _LEAST.items():
            _check_number(name_, getattr(self, name_), least)
        if not 0 < self.max_kv_occupancy <= 1:
            raise ConfigError("max_kv_occupancy", f"{self.max_kv_occupancy} is not a share", "set one in (0, 1]")
        if self.zero_after_s < self.cool_down_s:
            problem = f"{self.zero_after_s:g} is less than cool_down_s, {self.cool_down_s:g}"
            raise ConfigError("zero_after_s", problem, "raise it, or lower cool_down_s")

    def of(self, name: PoolName) -> PoolSettings:
        """Return the settings of one pool."""
        return {PoolName.PREFILL: self.prefill, PoolName.DECODE: self.decode, PoolName.BOTH: self.both}[name]


_LEAST = {
    "max_gpus": 1, "cool_down_s": 0, "headroom": 0, "drain_s": 1, "stale_after_s": 0.1, "zero_after_s": 0, "max_step_up": 1,
    "max_step_down": 1, "step_period_s": 0, "season_s": 1, "forecast_sigmas": 0,
}  # fmt: skip


def _check_number(name: str, value: float | None, least: float) -> None:
    if value is not None and not (math.isfinite(value) and value >= least):
        raise ConfigError(name, f"{value} is not a number from {least:g} up", f"set it to {least:g} or more")
