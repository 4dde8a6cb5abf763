"""How long requests wait for one of several servers. Pure; seconds.

Allen and Cunneen's approximation of G/G/n (A. O. Allen, "Probability, Statistics, and Queueing Theory", 2nd edition, 1990, §5.7):

    mean wait = P(all busy) · service / (n · (1 - utilization)) · (variation of gaps² + variation of service²) / 2

P(all busy) is Erlang's C, that of M/M/n with the same load. Exact for M/M/n and for M/G/1 (Pollaczek-Khinchine). Whoever waits is
taken to wait for an exponential time, as is exact for M/M/n and as Kingman's heavy traffic limit has it for all.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Waiting:
    """`share` of the requests wait at all; what is left of a wait ends at `ends_per_s`."""

    share: float
    ends_per_s: float

    @property
    def mean_s(self) -> float:
        """Of all requests."""
        return self.share / self.ends_per_s

    def within(self, seconds: float) -> float:
        """The share of requests that wait for no longer."""
        return 0.0 if seconds < 0 else 1 - self.share * math.exp(-self.ends_per_s * seconds)


def erlang_c(num_servers: int, offered: float) -> float:
    """The share of arrivals that find `num_servers` busy; `offered`: arrivals a second times seconds each, below `num_servers`.

    By the recursion of Erlang's B, which neither overflows nor loses digits."""
    blocked = 1.0
    for number in range(1, num_servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
    return blocked / (1 - offered / num_servers * (1 - blocked))


def waiting(offered: float, num_servers: int, service_s: float, service_scv: float, gap_scv: float = 1.0) -> Waiting | None:
    """`*_scv`: squared coefficients of variation. None: the servers cannot bear so much, and waits grow without end."""
    if not offered < num_servers:
        return None
    mean_wait_s = service_s / (num_servers - offered) * (gap_scv + service_scv) / 2
    return Waiting(erlang_c(num_servers, offered), 1 / max(mean_wait_s, 1e-9))
