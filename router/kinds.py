"""How many workers of each kind there are in each role, and which one a worker is of: kept up to date, not counted anew."""

from collections import Counter

from router.health import Peers, Role
from router.views import WorkerKey, WorkerView


class Kinds:
    """Of the workers that take work, by address."""

    def __init__(self) -> None:
        self._views: dict[str, WorkerView] = {}
        self._sizes: Counter[tuple[Role, Peers]] = Counter()

    def put(self, address: str, view: WorkerView | None) -> None:
        """The view of the worker at `address` is this now; None: it takes no work."""
        before = self._views.pop(address, None)
        if view is not None:
            self._views[address] = view
        if before is None or view is None or not _alike(before, view):
            self._count(before, -1)
            self._count(view, 1)

    def peers(self, worker: WorkerKey, role: Role) -> tuple[Peers, int] | None:
        """What it is of, and how many of that there are, itself among them; None if it has no work in that role."""
        view = self._views.get(worker[0])
        if view is None or view.epoch != worker[1] or not _has(view, role):
            return None
        return view.kind, self._sizes[role, view.kind]

    def _count(self, view: WorkerView | None, sign: int) -> None:
        for role in Role:
            if view is not None and _has(view, role):
                self._sizes[role, view.kind] += sign
                if not self._sizes[role, view.kind]:
                    del self._sizes[role, view.kind]


def _alike(one: WorkerView, other: WorkerView) -> bool:
    same_roles = (one.prefill, one.decode) == (other.prefill, other.decode)
    return same_roles and (one.identity is other.identity or one.identity == other.identity) and one.layout == other.layout


def _has(view: WorkerView, role: Role) -> bool:
    return view.decode if role is Role.DECODE else view.prefill
