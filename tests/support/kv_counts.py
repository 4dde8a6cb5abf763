"""What the workers of a mesh of processes count of KV that they restored from tiers and fetched from each other."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping

from pdmesh.launcher.member import Member

RESTORED, FETCHED = "restored tokens", "fetched tokens"
HOST, DISK = "blocks read from host memory", "blocks read from disk"
WRITTEN, CORRUPT, REFUSED = "blocks written", "blocks corrupt", "reads and writes refused"
LATE = "restores given up"

Counts = Mapping[tuple[str, int], Counter[str]]
"""By name and process id of a worker: a process that was started again counts from zero."""

_LINE = re.compile(r"(?P<name>pdmesh_kv_\w+?)_total(?:\{(?P<labels>[^}]*)\})? (?P<value>[0-9.e+]+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_BLOCKS = {"written": WRITTEN, "corrupt": CORRUPT, "failed": REFUSED}
_TIMEOUT_S = 5.0


def parse(text: str) -> Counter[str]:
    """Return the counts of one worker's metrics (Prometheus' text)."""
    counts = Counter[str]()
    for match in _LINE.finditer(text):
        labels, value = dict(_LABEL.findall(match["labels"] or "")), int(float(match["value"]))
        if match["name"] == "pdmesh_kv_restored_tokens":
            counts[RESTORED] += value
        elif match["name"] == "pdmesh_kv_pulled_tokens":
            counts[FETCHED] += value
        elif match["name"] == "pdmesh_kv_restores" and labels["result"] == "late":
            counts[LATE] += value
        elif match["name"] == "pdmesh_kv_tier_blocks":
            event, tier = labels["event"], labels["tier"]
            counts[_BLOCKS.get(event) or (HOST if tier == "host" else DISK)] += value
    return counts


async def read_counts(workers: Iterable[Member]) -> dict[tuple[str, int], Counter[str]]:
    """Return the counts of the workers that run and answer; the mesh is started with `metrics_port=0`."""
    found: dict[tuple[str, int], Counter[str]] = {}
    for worker in workers:
        for url in worker.metrics_urls:
            try:
                found[worker.name, worker.pid] = parse(await asyncio.to_thread(_get, url))
            except OSError:  # it has just ended
                continue
    return found


def since(before: Counts, now: Counts) -> Counter[str]:
    """Return what all workers counted in between; less where one of them has ended meanwhile."""
    total = Counter[str]()
    for worker, counts in now.items():
        total.update({name: value - before.get(worker, Counter())[name] for name, value in counts.items()})
    return total


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        return str(answer.read().decode())
