"""The latest decision of `pdmesh up --autoscale`, for `pdmesh status` of the same user on the same machine.

Routers know nothing of an autoscaler. So `up` keeps its latest decision in autoscalers/PID.json of the cache
(`model_cache`), and takes that away at its end; `status` shows the one whose workers are those that its router tells of.
Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdmesh.models.model_cache import cache_folder

if TYPE_CHECKING:
    from pdmesh.autoscaler.decision import Decision

FORGOTTEN_S = 86_400.0
"""After which the file of a process that was killed is taken away."""


def decisions_folder() -> Path:
    """Need not exist. Raises RuntimeError where the user has no home."""
    return cache_folder() / "autoscalers"


class DecisionFile:
    """Of one process, about the workers at `addresses`. Where it cannot be written, `pdmesh status` does not show it."""

    def __init__(self, addresses: Callable[[], Collection[str]], folder: Path | None = None) -> None:
        self._addresses = addresses
        self._path: Path | None = None
        with contextlib.suppress(OSError, RuntimeError):
            folder = decisions_folder() if folder is None else folder
            folder.mkdir(parents=True, exist_ok=True)
            _forget_old(folder)
            self._path = folder / f"{os.getpid()}.json"

    def decided(self, decision: Decision, now_s: float) -> None:
        """For the loop; `now_s` is its clock, of which nothing is needed here."""
        if self._path is None:
            return
        pools = [{**asdict(pool), "text": str(pool)} for pool in decision.pools]
        told: dict[str, object] = {"at_s": time.time(), "workers": sorted(self._addresses()), "pools": pools}
        whole = self._path.with_suffix(".new")
        with contextlib.suppress(OSError):
            whole.write_text(json.dumps(told), encoding="utf-8")
            whole.replace(self._path)

    def remove(self) -> None:
        """Nobody decides any more."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)


def latest(workers: Collection[str], folder: Path | None = None) -> dict[str, Any] | None:
    """What was last decided about workers at these addresses, and when (`at_s`, seconds since 1970): of each pool its name,
    replicas `before` and now, reason, and all of it as `text`. None: nobody here scales them."""
    about: list[tuple[float, dict[str, Any]]] = []
    with contextlib.suppress(OSError, RuntimeError):
        for path in (decisions_folder() if folder is None else folder).glob("*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # of another version, or gone by now
                told = json.loads(path.read_text(encoding="utf-8"))
                shown = [str(pool["text"]) for pool in told["pools"]]
                if shown and not set(workers).isdisjoint(told["workers"]):
                    about.append((float(told["at_s"]), told))
    return max(about, key=lambda pair: pair[0])[1] if about else None


def _forget_old(folder: Path) -> None:
    for path in folder.iterdir():
        if path.stat().st_mtime < time.time() - FORGOTTEN_S:
            path.unlink(missing_ok=True)
