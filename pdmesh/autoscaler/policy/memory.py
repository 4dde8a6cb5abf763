"""What the policy remembers of one pool: what it changed, and what would have been enough of late. Pure, saved as JSON."""

from collections import deque

from pdmesh.autoscaler.forecasting.forecast import State, number

Pairs = deque[tuple[float, int]]


class PoolMemory:
    """`changes`: (time, replicas added). `enough`: (time, replicas that would have borne the load with headroom)."""

    def __init__(self) -> None:
        self.changes: Pairs = deque()
        self.enough: Pairs = deque()
        self.idle_since_s: float | None = None

    def changed(self, now_s: float, num_added: int) -> None:
        """A decision, not what became of it."""
        if num_added:
            self.changes.append((now_s, num_added))

    def remember(self, now_s: float, num_enough: int, cool_down_s: float, step_period_s: float) -> None:
        """And forgets what no rule asks about any more; of `enough` one entry from before the cool-down stays, to span it."""
        self.enough.append((now_s, num_enough))
        while len(self.enough) > 1 and self.enough[1][0] <= now_s - cool_down_s:
            self.enough.popleft()
        while self.changes and self.changes[0][0] < now_s - max(cool_down_s, step_period_s):
            self.changes.popleft()

    def interrupt(self) -> None:
        """Nobody knows what would have been enough just now: being idle has to be shown anew."""
        self.enough.clear()
        self.idle_since_s = None

    def most_enough(self, now_s: float, seconds: float) -> int | None:
        """The most that was needed at any time of the latest `seconds`, at most a cool-down; None while it has not been watched
        for so long."""
        known = [place for place, (time_s, _) in enumerate(self.enough) if time_s <= now_s - seconds]
        return max(num for _, num in list(self.enough)[known[-1] :]) if known else None

    def grew_within(self, now_s: float, seconds: float) -> float | None:
        """How long ago it grew, None if not within `seconds`."""
        ages = [now_s - time_s for time_s, num in self.changes if num > 0 and now_s - time_s < seconds]
        return min(ages, default=None)

    def shrank_within(self, now_s: float, seconds: float) -> float | None:
        """How long ago it shrank, None if not within `seconds`."""
        ages = [now_s - time_s for time_s, num in self.changes if num < 0 and now_s - time_s < seconds]
        return min(ages, default=None)

    def stepped(self, now_s: float, period_s: float, sign: int) -> int:
        """Replicas added (`sign` 1) or taken (-1) within the period."""
        return sum(num * sign for time_s, num in self.changes if num * sign > 0 and now_s - time_s < period_s)

    def idle_s(self, now_s: float, is_idle: bool) -> float | None:
        """How long nobody has asked for anything; None: somebody does."""
        if not is_idle:
            self.idle_since_s = None
            return None
        if self.idle_since_s is None:
            self.idle_since_s = now_s
        return now_s - self.idle_since_s

    def save(self) -> State:
        """What `restore` of a new one takes."""
        return {"changes": list(self.changes), "enough": list(self.enough), "idle_since_s": self.idle_since_s}

    def restore(self, state: State) -> None:
        """Raises ValueError."""
        self.changes, self.enough = _pairs(state, "changes"), _pairs(state, "enough")
        self.idle_since_s = None if state.get("idle_since_s") is None else number(state, "idle_since_s")


def _pairs(state: State, name: str) -> Pairs:
    pairs = state.get(name)
    if not isinstance(pairs, list):
        raise ValueError(f"{name}: a saved state holds a list there, not {pairs!r}")
    try:
        return deque((float(time_s), int(num)) for time_s, num in pairs)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: a saved state holds pairs of a time and a number there") from error
