"""Pods by pool, and what they cost: seconds that each was there, from its start to its end. Pure."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass

PREFILL, DECODE, BOTH = POOLS = ("prefill", "decode", "both")


class Phase(enum.Enum):
    """A pod's: it starts (loads its model), works, finishes what it has, and is gone."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(frozen=True)
class PoolCounts:
    """Pods of one pool that are there now."""

    starting: int = 0
    ready: int = 0
    draining: int = 0


def pool_of(*, prefill: bool, decode: bool) -> str:
    """The pool of a worker with these roles. Raises ValueError without any."""
    if not (prefill or decode):
        raise ValueError("roles: a worker has at least one of prefill and decode")
    return BOTH if prefill and decode else PREFILL if prefill else DECODE


class PodTime:
    """Seconds by pool. `now` is simulated and never falls."""

    def __init__(self) -> None:
        self._ended: dict[str, float] = dict.fromkeys(POOLS, 0.0)
        self._num: dict[str, int] = dict.fromkeys(POOLS, 0)
        self._at = 0.0

    def come(self, pool: str, now: float) -> None:
        """One more."""
        self._advance(now)
        self._num[pool] += 1

    def go(self, pool: str, now: float) -> None:
        """One less."""
        self._advance(now)
        self._num[pool] -= 1

    def seconds(self, now: float) -> dict[str, float]:
        """Of each pool, until now."""
        self._advance(now)
        return dict(self._ended)

    def _advance(self, now: float) -> None:
        for pool, num in self._num.items():
            self._ended[pool] += num * (now - self._at)
        self._at = now


def counts_of(pods: Iterable[tuple[str, Phase]]) -> dict[str, PoolCounts]:
    """Of each pool, from (pool, phase) of its pods."""
    numbers = {(pool, phase): 0 for pool in POOLS for phase in Phase}
    for pod in pods:
        numbers[pod] += 1
    phases = (Phase.STARTING, Phase.READY, Phase.DRAINING)
    return {pool: PoolCounts(*(numbers[pool, phase] for phase in phases)) for pool in POOLS}
