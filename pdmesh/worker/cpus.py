"""Which cores an engine's threads run on: only theirs, the event loop and gRPC stay where the system puts them.

A thread inherits its creator's cores. So the thread that loads the engine is bound while the kernels start their own, and the
engine thread, which computes with them, before its first step.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence


def problem_with(cpus: Sequence[int], num_threads: int) -> str | None:
    """Why an engine of `num_threads` (0: as many as there are cores) cannot be bound to `cpus`; None if it can, or to none."""
    if not cpus:
        return None
    if not hasattr(os, "sched_setaffinity"):
        return "binding to cores needs Linux; leave it empty"
    if len(set(cpus)) != len(cpus):
        return f"{_listed(cpus)} names a core twice"
    if strange := sorted(set(cpus) - os.sched_getaffinity(0)):
        return f"this process may not use {_listed(strange)}; give some of {_listed(sorted(os.sched_getaffinity(0)))}"
    if num_threads > len(cpus):
        return f"{_listed(cpus)} are fewer than num_threads {num_threads}; give a core for each thread"
    return None


@contextlib.contextmanager
def bound(cpus: Sequence[int]) -> Iterator[None]:
    """This thread, and those that it starts meanwhile, run on `cpus` (none: anywhere); this one only until the end."""
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def bind(cpus: Sequence[int]) -> None:
    """This thread runs on `cpus` from now on; none: where it does."""
    if cpus:
        os.sched_setaffinity(0, cpus)


def _listed(cpus: Sequence[int]) -> str:
    return ",".join(map(str, cpus))
