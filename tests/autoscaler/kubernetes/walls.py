"""A wall clock that tests turn."""

from __future__ import annotations


class Wall:
    """Seconds since 1970."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s
