"""Places where a test makes a process pause, die, wait or fail.

PDMESH_FAILPOINTS="name=action[@N][,name=action[@N]]...". Actions: `pause` (SIGSTOP to itself), `kill` (SIGKILL to itself),
`delay:MS` (wait), `error` (raise FailpointError). With `@N` only the N-th hit of the name acts (from 1); without, every hit
does. When the variable is unset, a hit costs one look at an empty dictionary. Never set in production.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass

VARIABLE = "PDMESH_FAILPOINTS"
_ENTRY = re.compile(r"(?P<name>[a-z0-9_.]+)=(?P<action>pause|kill|error|delay:(?P<delay_ms>\d{1,9}))(?:@(?P<nth>[1-9]\d{0,8}))?")

logger = logging.getLogger(__name__)


class FailpointError(RuntimeError):
    """What the action `error` raises."""


@dataclass(frozen=True)
class Action:
    """What a failpoint does: `kind` pause, kill, delay (`delay_s` seconds) or error; only at its `nth` hit, None: at every
    one."""

    kind: str
    delay_s: float = 0.0
    nth: int | None = None


def parse(text: str) -> dict[str, tuple[Action, ...]]:
    """Actions by name. Raises ValueError, naming the variable and the entry, for what cannot be read."""
    actions: dict[str, tuple[Action, ...]] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(f"{VARIABLE}: cannot read {entry!r}; write name=pause|kill|error|delay:MS, optionally with @N")
        nth = int(match["nth"]) if match["nth"] else None
        action = Action(match["action"].split(":")[0], int(match["delay_ms"] or 0) / 1000, nth)
        actions[match["name"]] = (*actions.get(match["name"], ()), action)
    return actions


_actions = parse(os.environ.get(VARIABLE, ""))
_hits: Counter[str] = Counter()


def install(text: str) -> None:
    """Replaces the failpoints of this process and forgets former hits; "" removes all. For tests in one process."""
    global _actions
    _actions = parse(text)
    _hits.clear()


def hit(name: str) -> None:
    """Acts if `name` is armed. `delay` blocks the calling thread: on an event loop use `hit_async`."""
    if _actions:
        time.sleep(_act(name))


async def hit_async(name: str) -> None:
    """Acts if `name` is armed. `delay` lets other tasks run."""
    if _actions:
        await asyncio.sleep(_act(name))


def _act(name: str) -> float:
    """Does what is due at this hit of `name`; returns the seconds that the caller has to wait."""
    armed = _actions.get(name, ())
    if not armed:
        return 0.0
    _hits[name] += 1
    due = [action for action in armed if action.nth in (None, _hits[name])]
    for action in due:
        logger.warning("failpoint %s: %s at hit %d", name, action.kind, _hits[name])
        _strike(name, action.kind)
    return sum(action.delay_s for action in due)


def _strike(name: str, kind: str) -> None:
    if kind == "error":
        raise FailpointError(f"failpoint {name}")
    if kind in ("pause", "kill"):
        os.kill(os.getpid(), signal.SIGSTOP if kind == "pause" else signal.SIGKILL)
