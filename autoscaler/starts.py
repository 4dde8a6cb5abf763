"""Which replicas are on their way: asked for, and not serving yet, whoever has failed to create them so far. Pure.

Who comes, came for the oldest request. One that has been awaited for too long has failed (`plan.py` counts it for nothing, and
asks for another); when such another has failed as well, asking for more has not helped, and the pool is not to grow until
somebody comes.
"""

from collections import deque


class Starts:
    """Of one pool."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: after which a start has failed."""
        self.patience_s = patience_s
        self._since_s: deque[float] = deque()
        self._num_asked = self._num_serving = 0
        self._gave_up_s: float | None = None  # when the first was given up of those that are awaited still

    def update(self, now_s: float, num_asked: int, num_serving: int) -> None:
        """`num_serving` of the `num_asked` that were asked for last are there."""
        missing = max(0, num_asked - num_serving)
        if num_serving > self._num_serving:
            self._gave_up_s = None
        for _ in range(min(self._num_asked - num_asked, len(self._since_s))):
            self._since_s.pop()  # whoever is asked for no more is the one that was asked for last
        self._num_asked, self._num_serving = num_asked, num_serving
        while len(self._since_s) > missing:
            self._since_s.popleft()
        self._since_s.extend([now_s] * (missing - len(self._since_s)))
        if not self._is_late(now_s):
            self._gave_up_s = None
        elif self._gave_up_s is None:
            self._gave_up_s = now_s

    def ages_s(self, now_s: float) -> tuple[float, ...]:
        """Of all that are awaited, the oldest first."""
        return tuple(max(0.0, now_s - since_s) for since_s in self._since_s)

    def num_failed(self, now_s: float) -> int:
        """Those that have been awaited for too long."""
        return sum(age_s > self.patience_s for age_s in self.ages_s(now_s))

    def is_hopeless(self, now_s: float) -> bool:
        """Whether one has failed that was asked for after another had: more of the same will not help."""
        gave_up_s = self._gave_up_s
        return gave_up_s is not None and any(
            since_s >= gave_up_s and now_s - since_s > self.patience_s for since_s in self._since_s
        )

    def _is_late(self, now_s: float) -> bool:
        return self.num_failed(now_s) > 0
