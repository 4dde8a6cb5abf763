"""Meshes as tests need them: one kind of worker, and snapshots of pools of it."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.autoscaler.forecasting.forecast import Expected, LastValue
from pdmesh.autoscaler.policy.policy import Policy
from pdmesh.autoscaler.settings import AutoscalerSettings
from pdmesh.autoscaler.views import PoolName, PoolView, Snapshot, Traffic
from pdmesh.planning.capacity import DecodePool, PrefillPool, fewest
from pdmesh.planning.capacity_load import Goals, Lengths, Limits, Load, Worker
from pdmesh.planning.latency_model import LatencyModel

MODEL = LatencyModel(8e-3, 6e-5, 2e-9, 2e-4, 3e-8)
LIMITS = Limits(2048, 64, 400_000)
LENGTHS = Lengths(1000, 2.0e6, 200)
GOALS = Goals(ttft_s=0.5, tpot_s=0.03, quantile=0.95)
PREFILL, DECODE, BOTH = PoolName.PREFILL, PoolName.DECODE, PoolName.BOTH
SETTINGS = AutoscalerSettings(forecast="last", forecast_sigmas=0.0, flips=False)


def view(name: PoolName, num_ready: int, **fields: object) -> PoolView:
    return replace(PoolView(name, num_ready, latency=MODEL, limits=LIMITS), **fields)  # type: ignore[arg-type]


def traffic(rate: float, **fields: object) -> Traffic:
    """Counted over so long that chance plays no part."""
    return replace(Traffic(rate, LENGTHS, window_s=1e9), **fields)  # type: ignore[arg-type]


def snapshot(now_s: float, rate: float, prefill: PoolView | int, decode: PoolView | int, **fields: object) -> Snapshot:
    pools = (
        view(PREFILL, prefill) if isinstance(prefill, int) else prefill,
        view(DECODE, decode) if isinstance(decode, int) else decode,
    )
    return Snapshot(now_s, traffic(rate, **fields), pools)


class Told(LastValue):
    """A forecaster that is told what comes."""

    def __init__(self, mean: float, spread: float = 0.0) -> None:
        super().__init__()
        self.expected = Expected(mean, spread)

    def at(self, time_s: float) -> Expected:
        return self.expected


def policy(mean: float = 0.0, settings: AutoscalerSettings = SETTINGS, goals: Goals = GOALS) -> Policy:
    """That expects so many requests a second, and no more than it observes where that is 0."""
    return Policy(settings, goals, Told(mean))


def need(rate: float) -> tuple[int, int]:
    """Of prefill and decode, by capacity alone."""
    numbers = [fewest(kind(Worker(MODEL, LIMITS), GOALS), Load(rate, LENGTHS), 999) for kind in (PrefillPool, DecodePool)]
    assert numbers[0] is not None and numbers[1] is not None
    return numbers[0], numbers[1]
