"""The policy against a mesh that answers: a day and its night, a threefold burst within a minute, pods that take a minute."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from benchmarks.autoscale.rivals import Hpa, HpaSettings
from pdmesh.autoscaler.policy.policy import Policy
from pdmesh.autoscaler.settings import AutoscalerSettings
from pdmesh.planning.capacity_load import Load
from tests.autoscaler.fluid import POOLS, Mesh, Scaler, borne, by_policy, needed, oracle_pod_s, run
from tests.autoscaler.scenes import DECODE, GOALS, LENGTHS, PREFILL

DAY_S = 4 * 3600.0
BURSTS_S = (4000.0, 11_000.0)
BURST_S = 600.0
SETTINGS = AutoscalerSettings()


def day(time_s: float) -> float:
    """Requests/s: 20 at night, 80 by day, and three times as many in the bursts, which rise and fall within a minute."""
    calm = 50 - 30 * math.cos(2 * math.pi * time_s / DAY_S)
    rises = [min(1.0, (time_s - since_s) / 60, (since_s + BURST_S - time_s) / 60) for since_s in BURSTS_S]
    return calm * (1 + 2 * max(0.0, *rises))


def start() -> Mesh:
    return Mesh({name: needed(name, 20.0) for name in (PREFILL, DECODE)})


@pytest.fixture(scope="module")
def scaled() -> Mesh:
    return run(day, DAY_S, by_policy(Policy(SETTINGS, GOALS)), start())


def test_objectives_are_kept_at_little_more_than_the_oracles_cost(scaled: Mesh) -> None:
    assert scaled.attainment >= 0.96
    assert scaled.pod_s <= 1.15 * oracle_pod_s(day, DAY_S)


def test_it_costs_far_less_than_the_fewest_that_would_always_do(scaled: Mesh) -> None:
    peak = max(day(time_s) for time_s in range(0, int(DAY_S), 10))
    fixed = sum(needed(name, round(peak, 1)) for name in (PREFILL, DECODE)) * DAY_S
    assert scaled.pod_s < 0.5 * fixed


def test_it_does_not_turn_round_within_a_cool_down(scaled: Mesh) -> None:
    for changes in scaled.changes.values():
        turns = [later_s - earlier_s for (earlier_s, before), (later_s, after) in pairwise(changes) if before * after < 0]
        assert min(turns, default=math.inf) >= SETTINGS.cool_down_s


def test_it_keeps_more_than_kubernetes_autoscaler(scaled: Mesh) -> None:
    """On utilization, 80 % of what a pool bears within the objectives: as good a metric as anybody could give it."""
    hpas = {name: Hpa(HpaSettings(0.8, max_replicas=99)) for name in (PREFILL, DECODE)}

    def decide(mesh: Mesh, now_s: float, rate: float) -> dict[object, int]:
        return {
            name: hpa.by_utilization(
                now_s, min(1.0, rate / borne(name, mesh.ready[name])), mesh.ready[name], len(mesh.starting[name])
            )
            for name, hpa in hpas.items()
        }

    scaler: Scaler = decide  # type: ignore[assignment]
    other = run(day, DAY_S, scaler, start())
    assert scaled.attainment > other.attainment


def test_a_backlog_is_gone_when_it_was_promised() -> None:
    """Nobody is refused: what queued up while pods were starting is served within the drain time after they serve."""
    mesh = Mesh({name: needed(name, 20.0) for name in (PREFILL, DECODE)}, refuses=False)
    scaler = by_policy(Policy(SETTINGS, GOALS))
    rates = [20.0] * 30 + [60.0] * 60
    queued = []
    for number, rate in enumerate(rates):
        mesh.serve(number * 10.0, rate)
        mesh.scale(number * 10.0, scaler(mesh, number * 10.0, rate))
        queued.append(mesh.num_queued)
    assert max(queued) > 1000
    last = max(index for index, num in enumerate(queued) if num > 0)
    assert (last - 30) * 10.0 <= 60 + SETTINGS.drain_s + 60


def test_the_fluid_bears_what_capacity_says() -> None:
    outlook = POOLS[PREFILL].outlook(Load(borne(PREFILL, 5), LENGTHS), 5)
    assert outlook is not None and outlook.attainment >= GOALS.each - 0.02
