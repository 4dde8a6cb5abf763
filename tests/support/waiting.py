"""Waiting for conditions instead of for time."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


MOST_OF_A_LOOK_S = 0.25


async def eventually(condition: Callable[[], object], *, timeout_s: float = 15.0, period_s: float = 0.01) -> None:
    """Returns once `condition()` is true; AssertionError after `timeout_s` seconds in which it was looked at. While this process
    is stopped, or gets no processor, nothing happens that could be waited for: of a look that takes long only so much counts."""
    left_s = timeout_s
    while not condition():
        assert left_s > 0, f"not within {timeout_s} s"
        looked_at = time.monotonic()
        await asyncio.sleep(period_s)
        left_s -= min(time.monotonic() - looked_at, max(period_s, MOST_OF_A_LOOK_S))


def slowly(call: Callable[P, T], seconds: float) -> Callable[P, T]:
    """`call`, which begins so much later."""

    def later(*args: P.args, **kwargs: P.kwargs) -> T:
        time.sleep(seconds)
        return call(*args, **kwargs)

    return later


def alive(pid: int) -> bool:
    """Whether process `pid` exists and is no zombie."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
