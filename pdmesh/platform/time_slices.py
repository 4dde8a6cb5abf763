"""Time slices: threads that answer requests get a core as soon as they wake, also where every core computes.

A thread that wakes waits until the one on its core has used its slice, up to 3 ms, and a call between two services wakes four
threads or more. So the threads of a service have a short slice, by which they go before those with the system's; those of an
engine keep the system's. Nothing takes more of the cores than before: it comes sooner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pdmesh.platform import linux
from pdmesh.platform.capabilities import TIME_SLICES

SHORT_S = 2e-4


def answer_soon() -> None:
    """Give this thread, and those that it starts, a short slice; without the capability do nothing."""
    _set(SHORT_S)


def compute() -> None:
    """Give this thread, and those that it starts, the system's slice."""
    _set(0.0)


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Do as `compute` meanwhile, and as `answer_soon` afterwards."""
    compute()
    try:
        yield
    finally:
        answer_soon()


def _set(slice_s: float) -> None:
    if TIME_SLICES.is_there:
        with contextlib.suppress(OSError):  # of a thread with another scheduling policy
            linux.set_time_slice(slice_s)
