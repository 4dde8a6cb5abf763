"""How many sequences decode at once, as they come and go by chance. Pure.

A pool whose sequences share its steps evenly is a processor-sharing queue: with N of them, each gets a token every step(N /
workers) seconds. In such a queue the long-run share of time with N sequences depends on the mean output alone, not on how outputs
are spread (Cohen, "The multiple phase service network with generalized processor sharing", Acta Informatica, 1979; Kelly,
"Reversibility and Stochastic Networks", 1979, §3.3):

    p(N) = p(N - 1) · arrivals a second · tokens of an output · step(N / workers) / N

With steps of one length that is Poisson, whose spread is √N: small pools need relatively more room, which is square-root
staffing; steps that grow with the batch widen it. Arrivals that come in bursts are counted in clumps as large as their peakedness
(Hayward's approximation: Fredericks, "Congestion in blocking systems", Bell System Technical Journal, 1980).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Concurrency:
    """Of one pool. `batches` [n]: sequences of one worker when so many clumps are there and one more arrives; `shares` [n] of
    arrivals that find that; `beyond`: of those that find no room. Together 1."""

    batches: Array
    shares: Array
    beyond: float

    def within(self, batch: float) -> float:
        """The share of arrivals after which a worker has at most `batch` sequences."""
        return float(self.shares[self.batches <= batch + 1e-9].sum())

    @property
    def mean_batch(self) -> float:
        """Of a worker, as arrivals find it with themselves."""
        return float(self.batches @ self.shares) + self.beyond * float(self.batches[-1])

    def quantile(self, share: float) -> float:
        """The batch that is not exceeded for this share of arrivals; the largest that there is room for, where it is."""
        reached = int(np.searchsorted(self.shares.cumsum(), share - 1e-12))
        return float(self.batches[min(reached, len(self.batches) - 1)])


def concurrency(
    tokens_per_s: float, num_workers: int, max_batch: int, step_s: Callable[[Array], Array], burstiness: float = 1.0
) -> Concurrency | None:
    """`tokens_per_s` asked of the pool; `step_s`: of batches. None: it cannot bear that many, however long they wait.

    `max_batch`: sequences that there is room for on a worker; more wait until one ends."""
    clump = max(1e-3, (1 + burstiness) / 2)
    num_clumps = max(1, int(num_workers * max_batch / clump))
    clumps = np.arange(num_clumps + 1, dtype=np.float64)
    batches = np.maximum(1.0, clumps * clump / num_workers)
    if tokens_per_s <= 0:
        return Concurrency(batches[:1], np.ones(1), 0.0)
    growth = tokens_per_s / clump * step_s(batches[1:]) / clumps[1:]
    if growth[-1] >= 1:
        return None
    with np.errstate(divide="ignore"):  # hardly any load: nobody ever meets anybody
        logs = np.concatenate(([0.0], np.log(growth).cumsum()))
    weights = np.exp(logs - logs.max())
    # Beyond the room the pool is as fast as with all of it full: each further clump is as much rarer than the one before.
    waiting = float(weights[-1] * growth[-1] / (1 - growth[-1]))
    total = float(weights.sum()) + waiting
    found = weights[:-1] / total
    return Concurrency(batches[1:], found, float(weights[-1]) / total + waiting / total)
