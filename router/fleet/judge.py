"""What requests tell of the workers they met: evidence for `router.fleet.circuit_breaker`, with this process's clock and log."""

import asyncio
import logging
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import islice

from router.fleet.circuit_breaker import Health, Role, State
from router.routing.fleet_snapshot import Roster
from router.routing.worker_snapshot import WorkerKey, WorkerView

PEERS_FOR_S = 2.0
"""How long a list of peers is good enough to compare with: to make it takes a look at every worker."""

logger = logging.getLogger(__name__)


class Judge:
    """One for each router. Everybody reports here; the placer asks whom to leave out."""

    def __init__(self, views: Callable[[], Iterable[WorkerView]]) -> None:
        """`views`: the workers as they are now."""
        self.health = Health(jitter=random.random, on_change=_log)
        self._views = views
        self._peers: dict[tuple[WorkerKey, Role], Iterable[WorkerKey]] = {}
        self._peers_until = 0.0

    def ejected(self, roster: Roster, role: Role) -> frozenset[WorkerKey]:
        """Whom of `roster` to leave out for now, in this role: of each kind at most a share, and never the last."""
        if not self.health.suspects:
            return frozenset()
        now = _now()
        engines = (roster.get(address) for address, _ in self.health.suspects_of(role))
        views = [engine.view for engine in engines if engine is not None]
        groups = [self._with_peers(suspects, roster, role) for suspects in _groups(views, role)]
        return frozenset[WorkerKey]().union(*(self.health.ejected(role, group, now) for group in groups))

    def _with_peers(self, suspects: dict[WorkerKey, WorkerView], roster: Roster, role: Role) -> list[WorkerKey]:
        """With so many others of their kind that more would change nothing: there may be thousands, and every request asks."""
        share = self.health.limits.max_share
        enough = math.ceil(len(suspects) / share) + 1 if share else None
        peers = roster.peers(next(iter(suspects.values())), prefill=role is Role.PREFILL)
        return list(suspects | {peer.key: peer for peer in islice(peers, enough)})

    def chosen(self, worker: WorkerKey, role: Role) -> None:
        """A request is sent there."""
        self.health.chosen(worker, role, _now())

    def succeeded(self, worker: WorkerKey, role: Role) -> None:
        """It did its part."""
        self.health.succeeded(worker, role, _now())

    def took(self, worker: WorkerKey, role: Role, slowness: float) -> None:
        """How slow it was: observed ÷ expected, or seconds; of one unit for all workers of a role."""
        self.health.measured(worker, role, slowness, self._peers_of(worker, role), _now())

    def failed(self, worker: WorkerKey, role: Role, reason: str) -> None:
        """It did not do its part, and the request is not to blame."""
        self.health.failed(worker, role, _now(), reason)

    def _peers_of(self, worker: WorkerKey, role: Role) -> Iterable[WorkerKey]:
        now = _now()
        if now >= self._peers_until:
            views = list(self._views())
            self._peers = {(key, each): group for each in Role for group in _groups(views, each) for key in group}
            self._peers_until = now + PEERS_FOR_S
        return self._peers.get((worker, role), ())


def _groups(views: Iterable[WorkerView], role: Role) -> list[dict[WorkerKey, WorkerView]]:
    """Workers that can stand in for each other."""
    groups: dict[tuple[object, ...], dict[WorkerKey, WorkerView]] = defaultdict(dict)
    for view in views:
        if view.decode if role is Role.DECODE else view.prefill:
            groups[view.kind][view.key] = view
    return list(groups.values())


def _now() -> float:
    return asyncio.get_running_loop().time()


def _log(worker: WorkerKey, role: Role, state: State, reason: str) -> None:
    level = logging.WARNING if state is State.OPEN else logging.INFO
    logger.log(level, "%s worker %s (epoch %016x) is %s: %s", role.value, worker[0], worker[1], state.value, reason)
