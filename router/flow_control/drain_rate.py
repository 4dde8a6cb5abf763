"""How fast places come free while somebody needs one. Pure: seconds are passed in."""

from collections import deque

MIN_RETRY_DELAY_S = 0.1
MAX_RETRY_DELAY_S = 30.0
UNKNOWN_RETRY_DELAY_S = 1.0
RATE_WINDOW = 32


def retry_delay_s(seconds: float | None) -> float:
    """What a client is told: within bounds, a default while nothing is known."""
    if seconds is None:
        return UNKNOWN_RETRY_DELAY_S
    return min(MAX_RETRY_DELAY_S, max(MIN_RETRY_DELAY_S, seconds))


class BusyClock:
    """Seconds in which somebody needed a place. What comes free meanwhile says how fast it can, an idle hour says nothing."""

    def __init__(self) -> None:
        self.now = 0.0
        self._looked_at: float | None = None
        self._busy = False

    def advance(self, now: float, *, busy: bool) -> float:
        """`busy`: from `now` on. Returns the clock's own time, which stands still while nobody is busy."""
        if self._busy and self._looked_at is not None:
            self.now += max(0.0, now - self._looked_at)
        self._looked_at, self._busy = now, busy
        return self.now


class DrainRate:
    """How much comes free in a second, over the last releases. `now` is seconds of a BusyClock, amounts are the caller's."""

    def __init__(self) -> None:
        self._releases: deque[tuple[float, float]] = deque(maxlen=RATE_WINDOW)
        self._total = 0.0

    def record(self, now: float, amount: float = 1.0) -> None:
        """So much came free."""
        if len(self._releases) == RATE_WINDOW:
            self._total -= self._releases[0][1]
        self._releases.append((now, amount))
        self._total += amount

    def seconds_for(self, amount: float, now: float) -> float | None:
        """Until `amount` and one release more have come free; None while nothing is known.

        The window ends now, not at the last release, so that a mesh that stands still promises nothing soon.
        """
        if len(self._releases) < 2:
            return None
        spent_s = now - self._releases[0][0]
        return (amount + self._total / len(self._releases)) * spent_s / self._total
