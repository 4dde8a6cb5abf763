"""Rollouts: which share of a model's new requests goes to which revision of its workers.

SetTrafficSplit(blue 90, green 10) ─► this router at once ─► Redis ─► the others within a second
new request ─► its session, else its id ─► revisions in the order of this key (router/routing/revisions.py) ─► the policy
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict, deque
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import grpc

from pdmesh.runtime.errors import InvalidArgument, MeshError
from pdmesh.runtime.registry import records
from pdmesh.runtime.registry.shared_settings import SharedSettings
from pdmesh.runtime.rpc.mesh_secret import MeshSecret
from pdmesh.v1 import mesh_pb2
from router.fleet.registry import FleetRegistry
from router.routing.revisions import Weights
from router.routing.worker_snapshot import WorkerKey, WorkerSnapshot

MAX_REVISIONS = 64

logger = logging.getLogger(__name__)


class TrafficSplits(SharedSettings[str, Weights]):
    """Hold the weights by model; `refresh` exchanges them with Redis."""

    def __init__(self, url: str = "", mesh: str = "default", secret: MeshSecret | None = None) -> None:
        """As SharedSettings: who may write to Redis could send all traffic anywhere, so entries are sealed."""
        super().__init__(url, mesh, "rollouts", secret)

    def _dump(self, key: str, value: Weights) -> tuple[str, str]:
        return key, json.dumps(value)

    def _load(self, field: bytes, value: bytes) -> tuple[str, Weights] | None:
        entries = json.loads(value)
        if not all(isinstance(each, list) and [type(part) for part in each] == [str, int] for each in entries):
            return None
        return field.decode(), checked((revision, weight) for revision, weight in entries)


def checked(weights: Iterable[tuple[str, int]]) -> Weights:
    """Return the weights by name. Raises ValueError that says what is wrong."""
    found = dict[str, int]()
    for revision, weight in weights:
        if revision:  # empty: workers that name none
            records.check_revision(revision)
        if revision in found:
            raise ValueError(f"revision {revision!r} is named twice")
        if not 0 <= weight <= records.MAX_REVISION_WEIGHT:
            raise ValueError(f"the weight of {revision!r} is {weight}, and not 0 to {records.MAX_REVISION_WEIGHT}")
        found[revision] = weight
    if len(found) > MAX_REVISIONS:
        raise ValueError(f"{len(found)} revisions are more than {MAX_REVISIONS}")
    if found and not any(found.values()):
        raise ValueError("all weights are 0; give one above it, or an empty list to end the split")
    return tuple(sorted(found.items()))


_FAULTS = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""Codes with which the mesh fails a request, where a client has done nothing wrong."""

LATEST, MAX_SEEN = 256, 256


@dataclass
class Seen:
    """Count what became of requests on one revision; times in seconds, of the latest ones."""

    num_ended: int = 0
    num_failed: int = 0
    num_lost: int = 0
    ttft_s: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    tpot_s: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))


class Rollouts:
    """Know and change the splits of all models, from `start` to `stop`."""

    def __init__(self, fleet: FleetRegistry, splits: TrafficSplits) -> None:
        self._fleet = fleet
        self._splits = splits
        self._seen: OrderedDict[tuple[str, str], Seen] = OrderedDict()
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read what is known, for a moment, and begin to follow what other routers are told."""
        await self._splits.read_first()
        self._keeper = asyncio.create_task(self._splits.refresh_forever(), name="keep traffic splits")

    async def stop(self) -> None:
        """Stop; the splits stay in Redis."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._splits.close()

    def weights(self, model: str) -> Weights:
        """Return the split of a model; empty: none."""
        return self._splits.entries.get(model, ())

    async def set(
        self, model: str, weights: Iterable[tuple[str, int]], failing: Container[WorkerKey] = ()
    ) -> mesh_pb2.TrafficSplit:
        """Split the new requests of a model. `failing`: workers that are ejected for failures. Raises InvalidArgument."""
        try:
            found = checked(weights)
        except ValueError as error:
            raise InvalidArgument("weights", str(error)) from error
        await self._splits.put(model, found)
        shares = ", ".join(f"{revision} {weight}" for revision, weight in found)
        logger.info("new requests to %s are split: %s", model, shares or "no more; the policy chooses")
        return self._described(model, [view for view in self._fleet.views() if view.model == model], failing)

    def ended(
        self, view: WorkerSnapshot, error: BaseException | None, ttft_s: float, tpot_s: float, lost_on: Collection[str] = ()
    ) -> None:
        """Count a request that was last placed on this decode worker; 0: it had no such time. `lost_on`: revisions on which it
        failed, and was tried again there or elsewhere."""
        if not (view.revision or any(lost_on) or self.weights(view.model)):
            return
        seen, has_failed = self._of(view.model, view.revision), isinstance(error, MeshError) and error.code in _FAULTS
        seen.num_ended += 1
        seen.num_failed += has_failed
        if ttft_s:
            seen.ttft_s.append(ttft_s)
        if tpot_s:
            seen.tpot_s.append(tpot_s)
        for revision in lost_on:
            if revision != view.revision or not has_failed:  # one request fails once on a revision
                self._of(view.model, revision).num_lost += 1

    def _of(self, model: str, revision: str) -> Seen:
        seen = self._seen.setdefault((model, revision), Seen())
        self._seen.move_to_end((model, revision))
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return seen

    def described(self, models: Iterable[str], failing: Container[WorkerKey] = ()) -> list[mesh_pb2.TrafficSplit]:
        """Return the splits of the models that have one, or whose workers name revisions. `failing`: workers that are
        ejected for failures."""
        views: Mapping[str, list[WorkerSnapshot]] = {model: [] for model in models}
        for view in self._fleet.views():
            if view.model in views:
                views[view.model].append(view)
        shown = (model for model, here in views.items() if self.weights(model) or any(view.revision for view in here))
        return [self._described(model, views[model], failing) for model in shown]

    def _described(
        self, model: str, views: Sequence[WorkerSnapshot], failing: Container[WorkerKey] = ()
    ) -> mesh_pb2.TrafficSplit:
        weights = dict(self.weights(model))
        shares = {name: mesh_pb2.RevisionShare(revision=name, weight=weight) for name, weight in weights.items()}
        for view in views:
            share = shares.setdefault(view.revision, mesh_pb2.RevisionShare(revision=view.revision))
            share.num_prefill_workers += view.prefill
            share.num_decode_workers += view.decode
            share.num_running += view.num_decoding if view.decode else 0
            share.num_ejected += view.key in failing
        for name, share in shares.items():
            seen = self._seen.get((model, name), Seen())
            share.num_ended, share.num_failed, share.num_lost = seen.num_ended, seen.num_failed, seen.num_lost
            share.ttft_ms = 1e3 * median(seen.ttft_s or (0.0,))
            share.tpot_ms = 1e3 * median(seen.tpot_s or (0.0,))
        return mesh_pb2.TrafficSplit(model=model, revisions=[shares[name] for name in sorted(shares)], is_set=bool(weights))
