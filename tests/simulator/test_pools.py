"""Pods by pool: counted by phase, paid by the second."""

import pytest

from pdmesh.simulator.mesh import BOTH, DECODE, PREFILL, Phase, PodTime, PoolCounts, counts_of, pool_of


def test_roles_are_pools() -> None:
    assert [pool_of(prefill=True, decode=False), pool_of(prefill=False, decode=True)] == [PREFILL, DECODE]
    assert pool_of(prefill=True, decode=True) == BOTH
    with pytest.raises(ValueError, match="at least one"):
        pool_of(prefill=False, decode=False)


def test_counts() -> None:
    pods = [(PREFILL, Phase.READY), (PREFILL, Phase.STARTING), (DECODE, Phase.DRAINING), (PREFILL, Phase.READY)]
    assert counts_of(pods) == {PREFILL: PoolCounts(1, 2, 0), DECODE: PoolCounts(draining=1), BOTH: PoolCounts()}


def test_seconds() -> None:
    time = PodTime()
    time.come(PREFILL, 1.0)
    time.come(PREFILL, 2.0)
    time.go(PREFILL, 5.0)
    time.come(DECODE, 6.0)
    assert time.seconds(10.0) == {PREFILL: 4.0 + 8.0, DECODE: 4.0, BOTH: 0.0}
    assert time.seconds(10.0) == time.seconds(10.0)
