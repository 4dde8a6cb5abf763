"""Checks of what a machine has and lacks for a mesh: each is a function to a `Check`; none raises or makes lasting changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """Name the outcome of a check. MISSING: something is not there; whether that stops the mesh is `Check.required`."""

    OK = "OK"
    WARN = "WARN"
    MISSING = "MISSING"


@dataclass(frozen=True)
class Check:
    """Hold one finding: its subject, what was found, what its lack costs and what to do about it."""

    name: str
    state: State
    found: str
    cost: str = ""
    remedy: str = ""
    required: bool = False  # without it no mesh runs on this machine

    @property
    def blocks(self) -> bool:
        """Return whether the mesh cannot run because of it."""
        return self.required and self.state is State.MISSING


def ok(name: str, found: str) -> Check:
    """Return a check that found all it needs."""
    return Check(name, State.OK, found)


def warn(name: str, found: str, cost: str, remedy: str) -> Check:
    """Return a check that found something that makes the mesh worse."""
    return Check(name, State.WARN, found, cost, remedy)


def missing(name: str, found: str, cost: str, remedy: str, *, required: bool = False) -> Check:
    """Return a check that did not find what it looks for."""
    return Check(name, State.MISSING, found, cost, remedy, required)


def examine(checks: Iterable[tuple[str, Callable[[], Check]]]) -> list[Check]:
    """Run checks in order. One that fails unexpectedly is a finding itself, not the end of the examination."""
    return [_examined(name, check) for name, check in checks]


def _examined(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # noqa: BLE001  # a failing check must not end the others; the finding names the error
        return warn(
            name, f"could not be checked: {type(error).__name__}: {error}", "it is not known whether this works", "report this"
        )
