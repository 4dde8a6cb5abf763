"""Which replicas are on their way: asked for, and not serving yet, whoever has failed to create them so far. Pure.

Who comes, came for the oldest request. One that has been awaited for too long has failed (`plan.py` counts it for nothing, and
asks for another); when such another has failed as well, asking for more has not helped, and the pool is not to grow until
somebody comes.

A pool may shrink and grow again before a failed start is known as one. So a start that was withdrawn and is asked for again soon
goes on where it was: withdrawing it has made nobody come.
"""

from collections import deque
from dataclasses import dataclass


@dataclass(eq=False)
class _Start:
    """`since_s`: now less how long it has been awaited. `is_second`: it was asked for after others had failed."""

    since_s: float
    is_second: bool
    withdrawn_s: float = 0.0


class Starts:
    """Of one pool."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: after which a start has failed."""
        self.patience_s = patience_s
        self._awaited: deque[_Start] = deque()  # the oldest first
        self._withdrawn: list[_Start] = []  # the oldest last: it is the first to be awaited again
        self._num_asked = self._num_serving = 0
        self._is_hopeless = False

    def update(self, now_s: float, num_asked: int, num_serving: int) -> None:
        """`num_serving` of the `num_asked` that were asked for last are there."""
        missing = max(0, num_asked - num_serving)
        if num_serving > self._num_serving:
            self._somebody_came()
        self._withdraw(now_s, min(self._num_asked - num_asked, len(self._awaited)))
        self._num_asked, self._num_serving = num_asked, num_serving
        while len(self._awaited) > missing:
            self._awaited.popleft()
        for _ in range(missing - len(self._awaited)):
            self._awaited.append(self._next(now_s))
        self._judge(now_s)

    @property
    def is_hopeless(self) -> bool:
        """Whether one has failed that was asked for after another had, and nobody has come since: more will not help."""
        return self._is_hopeless

    @property
    def num_serving(self) -> int:
        """Those that are there."""
        return self._num_serving

    def ages_s(self, now_s: float) -> tuple[float, ...]:
        """For how long those have been awaited that are awaited now, the oldest first."""
        return tuple(max(0.0, now_s - start.since_s) for start in self._awaited)

    def num_failed(self, now_s: float) -> int:
        """Those that have been awaited for too long."""
        return sum(age_s > self.patience_s for age_s in self.ages_s(now_s))

    def is_failing(self, now_s: float) -> bool:
        """Whether one has failed, be it asked for at the moment or withdrawn a moment ago, and nobody has come in its place."""
        withdrawn = any(start.withdrawn_s - start.since_s > self.patience_s for start in self._withdrawn)
        return withdrawn or self.num_failed(now_s) > 0

    def _somebody_came(self) -> None:
        """So those who are awaited still may come as well."""
        self._is_hopeless = False
        self._withdrawn.clear()
        for start in self._awaited:
            start.is_second = False

    def _withdraw(self, now_s: float, num: int) -> None:
        """Whoever is asked for no more is the one that was asked for last."""
        self._withdrawn = [start for start in self._withdrawn if now_s - start.withdrawn_s <= self.patience_s]
        for _ in range(num):
            start = self._awaited.pop()
            start.withdrawn_s = now_s
            self._withdrawn.append(start)

    def _next(self, now_s: float) -> _Start:
        if not self._withdrawn:
            return _Start(now_s, is_second=self.num_failed(now_s) > 0)
        start = self._withdrawn.pop()
        start.since_s += now_s - start.withdrawn_s
        return start

    def _judge(self, now_s: float) -> None:
        if any(start.is_second and now_s - start.since_s > self.patience_s for start in self._awaited):
            self._is_hopeless = True
        elif not self._awaited and not self._withdrawn:
            self._is_hopeless = False
