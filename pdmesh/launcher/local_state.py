"""Files by which `pdmesh status` finds the latest scaling decision and the metrics ports of a mesh on this machine.

Routers do not know the autoscaler. So `pdmesh up --autoscale` keeps its latest decision in autoscalers/PID.json of the model
cache, and removes it at its end; `status` of the same user shows the one whose workers its router reports. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdmesh.models.catalogue import cache_folder

if TYPE_CHECKING:
    from pdmesh.autoscaler.views import Decision


FORGOTTEN_S = 86_400.0
"""Seconds after which the file of a killed process is removed."""


def decisions_folder() -> Path:
    """Return the folder, which may not exist. Raises RuntimeError if the user has no home."""
    return cache_folder() / "autoscalers"


class DecisionFile:
    """Write the decisions of one process about the mesh whose workers and routers are at `addresses`. If that fails,
    `pdmesh status` does not show them."""

    def __init__(self, addresses: Callable[[], Collection[str]], folder: Path | None = None) -> None:
        self._addresses = addresses
        self._path: Path | None = None
        with contextlib.suppress(OSError, RuntimeError):
            folder = decisions_folder() if folder is None else folder
            folder.mkdir(parents=True, exist_ok=True)
            _forget_old(folder)
            self._path = folder / f"{os.getpid()}.json"

    def decided(self, decision: Decision, now_s: float) -> None:
        """Receive a decision of the loop; `now_s` is its clock, which is not needed here."""
        if self._path is None:
            return
        pools = [{**asdict(pool), "text": str(pool)} for pool in decision.pools]
        told: dict[str, object] = {"at_s": time.time(), "members": sorted(self._addresses()), "pools": pools}
        whole = self._path.with_suffix(".new")
        with contextlib.suppress(OSError):
            whole.write_text(json.dumps(told), encoding="utf-8")
            whole.replace(self._path)

    def remove(self) -> None:
        """Remove the file: the autoscaler has ended."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)


def latest(members: Collection[str], folder: Path | None = None) -> dict[str, Any] | None:
    """Return the latest decision about a mesh with a worker or a router at one of these addresses, and when (`at_s`, seconds
    since 1970): of each pool its name, replicas `before` and now, reason, and all of it as `text`. None: no local autoscaler
    scales it."""
    about: list[tuple[float, dict[str, Any]]] = []
    with contextlib.suppress(OSError, RuntimeError):
        for path in (decisions_folder() if folder is None else folder).glob("*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # of another version, or gone by now
                told = json.loads(path.read_text(encoding="utf-8"))
                shown = [str(pool["text"]) for pool in told["pools"]]
                if shown and not set(members).isdisjoint(told["members"]):
                    about.append((float(told["at_s"]), told))
    return max(about, key=lambda pair: pair[0])[1] if about else None


def _forget_old(folder: Path) -> None:
    for path in folder.iterdir():
        if path.stat().st_mtime < time.time() - FORGOTTEN_S:
            path.unlink(missing_ok=True)


# The metrics ports of `pdmesh up --metrics-port`, for Prometheus and for `pdmesh status`.
#
# Workers come and go, so two files are rewritten with each change: prometheus-targets.json beside the logs, which Prometheus
# watches (`file_sd_configs`), and metrics/PID.json of the cache, by which `pdmesh status` finds the mesh of its router and of the
# workers that it reports.


TARGETS_FILE = "prometheus-targets.json"
JOB = "pdmesh"
_PERIOD_S = 1.0


@dataclass(frozen=True)
class Target:
    """Name a process and the URLs of its metrics: a router of several processes has several."""

    name: str
    role: str  # router, worker or autoscaler
    urls: tuple[str, ...]


def metrics_folder() -> Path:
    """Return the folder, which may not exist. Raises RuntimeError if the user has no home."""
    return cache_folder() / "metrics"


def discovery(targets: Iterable[Target]) -> list[dict[str, Any]]:
    """Return the targets in Prometheus' form. `instance` is the process's name, which is stable while its port is not."""
    return [
        {
            "targets": [url.removeprefix("http://").partition("/")[0]],
            "labels": {"job": JOB, "role": target.role, "instance": _instance(target, number)},
        }
        for target in targets
        for number, url in enumerate(target.urls)
    ]


def _instance(target: Target, number: int) -> str:
    return target.name if len(target.urls) == 1 else f"{target.name}-{number}"


class MetricsFiles:
    """Write the files of one mesh. If that fails, the ports are not found by them."""

    def __init__(self, log_dir: Path, folder: Path | None = None) -> None:
        self.targets_path = log_dir / TARGETS_FILE
        self._told: tuple[object, ...] = ()
        self._path: Path | None = None
        with contextlib.suppress(OSError, RuntimeError):
            folder = metrics_folder() if folder is None else folder
            folder.mkdir(parents=True, exist_ok=True)
            self._path = folder / f"{os.getpid()}.json"

    def tell(self, targets: Iterable[Target], members: Collection[str]) -> None:
        """Write the current targets. `members`: addresses of workers and routers."""
        now = (tuple(targets), tuple(sorted(members)))
        if now == self._told:
            return
        self._told = now
        found = discovery(now[0])
        _replace(self.targets_path, found)
        if self._path is not None:
            _replace(self._path, {"members": now[1], "targets": found, "file": str(self.targets_path)})

    def remove(self) -> None:
        """Remove the files."""
        for path in (self.targets_path, self._path):
            if path is not None:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)


async def follow(files: MetricsFiles, look: Callable[[], tuple[Iterable[Target], Collection[str]]]) -> None:
    """Follow changes until cancelled. `look()` returns the current targets and the addresses of workers and routers."""
    while True:
        files.tell(*look())
        await asyncio.sleep(_PERIOD_S)


def shown(members: Collection[str], folder: Path | None = None) -> Mapping[str, Any] | None:
    """Return the mesh on this machine that has a worker or a router at one of these addresses: `targets` and the `file` with
    them. None: there is none."""
    with contextlib.suppress(OSError, RuntimeError):
        for path in (metrics_folder() if folder is None else folder).glob("*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # of another version, or gone by now
                told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                if not set(members).isdisjoint(told["members"]) and told["targets"]:
                    return told
    return None


def _replace(path: Path, content: object) -> None:
    whole = path.with_suffix(".new")
    with contextlib.suppress(OSError):
        whole.write_text(json.dumps(content, indent=1), encoding="utf-8")
        whole.replace(path)
