"""What a placement costs beyond the steps of its workers, as learned from requests that have ended. Bounded; pure."""

from collections import OrderedDict

from router.prediction import Overhead
from router.views import WorkerView

UNKNOWN_LOCAL = Overhead(2e-3, 0.0)
UNKNOWN_REMOTE = Overhead(5e-3, 5e-3)
WEIGHT = 0.1
"""Of the newest observation."""

MAX_PAIRS = 4096

_Key = tuple[str, str]


class Overheads:
    """Moving means by the hosts of the pair, LOCAL apart from REMOTE."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[_Key, Overhead] = OrderedDict()

    def between(self, prefill: WorkerView | None, decode: WorkerView) -> Overhead:
        """Of this pair; `prefill` None: LOCAL."""
        known = self._pairs.get(_key(prefill, decode))
        return known or (UNKNOWN_LOCAL if prefill is None else UNKNOWN_REMOTE)

    def observe(self, prefill: WorkerView | None, decode: WorkerView, seen: Overhead) -> None:
        """One request went this way. The first observation replaces what was assumed."""
        key = _key(prefill, decode)
        known = self._pairs.get(key, seen)
        self._pairs[key] = Overhead(_mean(known.before_s, seen.before_s), _mean(known.after_s, seen.after_s))
        self._pairs.move_to_end(key)
        if len(self._pairs) > MAX_PAIRS:
            self._pairs.popitem(last=False)


def _mean(known: float, seen: float) -> float:
    return known + WEIGHT * (seen - known)


def _key(prefill: WorkerView | None, decode: WorkerView) -> _Key:
    return ("" if prefill is None else f"{prefill.host_id}>", decode.host_id)
