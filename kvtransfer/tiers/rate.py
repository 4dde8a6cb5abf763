"""How fast a tier gives blocks back, learned from what it gave, and whether that beats computing them. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

FORGOTTEN_S = 60.0
"""Time in which a learned rate goes two thirds of its way back to the assumed one: a disk that was busy is asked again."""
MIN_BYTES_TO_LEARN = 1 << 20
FIXED_S = 0.001
"""What a restore costs beside its bytes."""
WORTH = 0.8
"""A restore has to be predicted to take less than this share of the computation that it saves."""
PATIENCE = 4.0
"""A tier is waited for so many times as long as predicted, or half of what the computation takes where that is more; and no
longer than all of it."""
LEAST_LIMIT_S, FORCED_LIMIT_S = 0.1, 20.0
ASK_S = 0.05
"""How long a tier that is asked over a network may take to say what it has, where the computation is longer."""
LEFT_OUT_S, MOST_LEFT_OUT_S = 5.0, 60.0
"""How long a tier is not read that was too slow, twice as long each time."""


@dataclass
class ReadRate:
    """Learn a tier's rate. Times in monotonic seconds, passed in."""

    assumed_bytes_per_s: float
    not_before: float = float("-inf")
    num_late: int = 0  # in a row
    _learned: float = field(default=0.0)
    _learned_at: float = float("-inf")

    def bytes_per_s(self, now: float) -> float:
        """Return the expected rate: what was learned, as far as it is not forgotten."""
        kept = math.exp((self._learned_at - now) / FORGOTTEN_S)
        return self.assumed_bytes_per_s + (self._learned - self.assumed_bytes_per_s) * kept

    def came(self, num_bytes: int, seconds: float, now: float) -> None:
        """Learn from a read that took so long; a small one says little about the rate."""
        self.num_late = 0
        if num_bytes >= MIN_BYTES_TO_LEARN:
            self._learned = 0.7 * self.bytes_per_s(now) + 0.3 * num_bytes / max(1e-4, seconds)
            self._learned_at = now

    def was_late(self, num_bytes: int, seconds: float, now: float) -> None:
        """Learn from a read that was given up after so long."""
        self._learned, self._learned_at = min(self.bytes_per_s(now), num_bytes / max(1e-4, seconds)), now
        self.leave_out(now)

    def leave_out(self, now: float) -> None:
        """Leave the tier out for a while, since it was late with an answer."""
        self.num_late += 1
        self.not_before = now + min(MOST_LEFT_OUT_S, LEFT_OUT_S * 2 ** (self.num_late - 1))


TOLD_CHANGE = 1.25
"""A time that others are told is told anew once it has grown, or shrunk, by this factor."""


class ToldTime:
    """Keep what was said of a measured time, in seconds, while that changes little."""

    def __init__(self) -> None:
        self._told_s = 0.0

    def told(self, measured_s: float) -> float:
        """Return what to say: what was said before, unless the measured time is quite another one. 0 is told at once."""
        least_s, most_s = sorted((self._told_s, measured_s))
        if most_s > TOLD_CHANGE * least_s:
            self._told_s = measured_s
        return self._told_s


def is_worth(restore_s: float, saved_s: float) -> bool:
    """Return whether to restore."""
    return restore_s < WORTH * saved_s


def limit_s(restore_s: float, saved_s: float) -> float:
    """Return how long to wait for a restore that should take `restore_s` and saves `saved_s` of computation."""
    return max(LEAST_LIMIT_S, min(saved_s, max(PATIENCE * restore_s, saved_s / 2)))
