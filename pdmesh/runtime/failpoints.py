"""Failpoints: places where a test makes a process pause, die, wait or fail.

PDMESH_FAILPOINTS="name=action[@N][,name=action[@N]]...". Actions: `pause` (SIGSTOP to itself), `kill` (SIGKILL to itself),
`delay:MS` (wait), `error` (raise FailpointError), `full` (raise OSError ENOSPC, as on a full disk). With `@N` only the N-th hit
of the name acts (from 1); without, every hit does. When no variable is set, a hit costs one look-up in an empty dictionary. Never
set in production.

PDMESH_FAILPOINTS_FILE names a file with the same text that is read again whenever it is replaced, so that a test arms and disarms
a running process. Each action is appended as a line to the file of that name plus ".hit" before it takes effect.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "PDMESH_FAILPOINTS"
FILE_VARIABLE = "PDMESH_FAILPOINTS_FILE"
HIT_SUFFIX = ".hit"
_ENTRY = re.compile(
    r"(?P<name>[a-z0-9_.]+)=(?P<action>pause|kill|error|full|delay:(?P<delay_ms>\d{1,9}))(?:@(?P<nth>[1-9]\d{0,8}))?"
)

logger = logging.getLogger(__name__)


class FailpointError(RuntimeError):
    """Raised by the action `error`."""


@dataclass(frozen=True)
class Action:
    """Describe a failpoint's action: `kind` pause, kill, delay (`delay_s` seconds), error or full; only at its `nth` hit, None:
    at every hit."""

    kind: str
    delay_s: float = 0.0
    nth: int | None = None


def parse(text: str) -> dict[str, tuple[Action, ...]]:
    """Return the actions by name. Raises ValueError, naming the variable and the entry, for text that cannot be read."""
    actions: dict[str, tuple[Action, ...]] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(f"{VARIABLE}: cannot read {entry!r}; write name=pause|kill|error|full|delay:MS, optionally with @N")
        nth = int(match["nth"]) if match["nth"] else None
        action = Action(match["action"].split(":")[0], int(match["delay_ms"] or 0) / 1000, nth)
        actions[match["name"]] = (*actions.get(match["name"], ()), action)
    return actions


_actions = parse(os.environ.get(VARIABLE, ""))
_hits: Counter[str] = Counter()
_file = Path(os.environ[FILE_VARIABLE]) if os.environ.get(FILE_VARIABLE) else None
_file_version: tuple[int, int] | None = None  # inode and time of the version read last


def install(text: str) -> None:
    """Replace the failpoints of this process and forget former hits; "" removes all. For tests in one process."""
    global _actions
    _actions = parse(text)
    _hits.clear()


def watch(file: Path | None) -> None:
    """Read the failpoints from `file` from now on, as with PDMESH_FAILPOINTS_FILE; None: no longer."""
    global _file, _file_version
    _file, _file_version = file, None


def hit(name: str) -> None:
    """Act if `name` is armed. `delay` blocks the calling thread: on an event loop use `hit_async`."""
    if _actions or _file:
        time.sleep(_act(name))


async def hit_async(name: str) -> None:
    """Act if `name` is armed. `delay` lets other tasks run."""
    if _actions or _file:
        await asyncio.sleep(_act(name))


def _act(name: str) -> float:
    """Perform the action due at this hit of `name`; return the seconds that the caller must wait."""
    if _file is not None:
        _read_again(_file)
    armed = _actions.get(name, ())
    if not armed:
        return 0.0
    _hits[name] += 1
    due = [action for action in armed if action.nth in (None, _hits[name])]
    for action in due:
        logger.warning("failpoint %s: %s at hit %d", name, action.kind, _hits[name])
        if _file is not None:
            _tell(_file, name)
        _strike(name, action.kind)
    return sum(action.delay_s for action in due)


def _read_again(file: Path) -> None:
    """Read the file again if it was replaced. Tests rename a complete file to this name, so a new version has another inode or
    time."""
    global _file_version
    try:
        status = file.stat()
        version = (status.st_ino, status.st_mtime_ns)
        if version != _file_version:
            install(file.read_text(encoding="ascii"))
            _file_version = version
    except FileNotFoundError:
        if _file_version is not None:
            install("")
            _file_version = None


def _tell(file: Path, name: str) -> None:
    with Path(f"{file}{HIT_SUFFIX}").open("a", encoding="ascii") as hits:
        hits.write(f"{name}\n")


def _strike(name: str, kind: str) -> None:
    if kind == "error":
        raise FailpointError(f"failpoint {name}")
    if kind == "full":
        raise OSError(errno.ENOSPC, f"failpoint {name}: {os.strerror(errno.ENOSPC)}")
    if kind in ("pause", "kill"):
        for handler in logging.root.handlers:
            handler.flush()  # what says why comes first
        os.kill(os.getpid(), signal.SIGSTOP if kind == "pause" else signal.SIGKILL)
