"""How fast a pool's workers are taken to be."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.autoscaler.policy.sizing import Speed
from pdmesh.planning.capacity_load import Worker
from tests.autoscaler.scenes import LIMITS, MODEL


def test_speeds_that_were_measured_count_before_those_that_are_guessed() -> None:
    speed = Speed()
    assert speed.latest is None
    for now_s in range(0, 50, 10):
        speed.observe(now_s, Worker(MODEL, LIMITS))
    measured = Worker(replace(MODEL, fixed_s=0.1, num_steps=3), replace(LIMITS, kv_tokens=99))
    speed.observe(50, measured)
    assert speed.latest == measured
    speed.observe(200, None)
    assert speed.latest == measured, "what was last known holds while nobody is there"
