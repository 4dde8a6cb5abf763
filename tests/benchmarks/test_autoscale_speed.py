"""The simulator's speed: whatever the clock says, equal loads end equally, and what does not is counted."""

from __future__ import annotations

from benchmarks.autoscale.speed import Load, apart, play


def test_equal_loads_end_alike_and_others_are_counted() -> None:
    load = Load(400, rate_per_s=250.0, num_workers=4, max_inflight=40)
    one, other = play(load), play(load)
    assert len(one.ended) == 400 and {how for _, how, *_ in one.ended} == {"COMPLETED", "REFUSED"}
    assert not one.is_compiled and apart(one.ended, other.ended) == 0
    at_s, how, when, ttft_s, tpot_s = other.ended[0]
    late = [(at_s, how, when + 1e-9, ttft_s, tpot_s), *other.ended[2:]]
    assert apart(one.ended, late) == 2  # one later, one never
