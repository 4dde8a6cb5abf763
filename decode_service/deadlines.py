"""Time travels as time left and becomes a deadline on this worker's own monotonic clock."""

from __future__ import annotations


def deadline_of(time_left_ms: int, now: float) -> float | None:
    """Monotonic seconds at which a request's time is up; None for `time_left_ms` 0, which means no deadline."""
    return now + time_left_ms / 1000 if time_left_ms else None


def has_passed(deadline: float | None, now: float) -> bool:
    return deadline is not None and now >= deadline
