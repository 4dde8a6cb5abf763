"""How fast a pool's workers are taken to be."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.autoscaler.policy.sizing import Speed
from pdmesh.planning.capacity_load import Worker
from pdmesh.planning.latency_model import Drafts
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


def test_only_the_least_speculation_of_a_minute_is_counted_on() -> None:
    """A moment of copying, whose drafts nearly all fit, tells nothing about the next minute."""
    speed, usual, copying = Speed(), Drafts(1.3, 2.0), Drafts(3.0, 4.0)
    for now_s, drafts in ((0.0, usual), (10.0, copying), (20.0, copying)):
        speed.observe(now_s, Worker(MODEL, LIMITS, drafts=drafts))
    assert speed.latest == Worker(MODEL, LIMITS, drafts=usual)
    speed.observe(61.0, Worker(MODEL, LIMITS, drafts=copying))
    assert speed.latest == Worker(MODEL, LIMITS, drafts=copying)
    speed.observe(62.0, Worker(MODEL, LIMITS))
    assert speed.latest == Worker(MODEL, LIMITS)
