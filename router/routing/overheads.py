"""What a placement costs beyond the steps of its workers, as learned from requests that have ended. Bounded; pure."""

from collections import OrderedDict

from router.routing.cost_model import Overhead
from router.routing.worker_snapshot import WorkerView

UNKNOWN_LOCAL = Overhead(2e-3, 0.0)
UNKNOWN_REMOTE = Overhead(5e-3, 5e-3)
MIN_WEIGHT = 0.1
"""Of the newest observation, once there are some: the first replaces what was assumed, the second counts half, and so on."""

MAX_JUMP = 4.0
"""So many times what is known, and no more, counts of one observation: a process that starts up or a machine that stalls."""

LEAST_S = 1e-3
"""Below this, a jump is none."""

MAX_PAIRS = 4096

MIN_STRETCH, MAX_STRETCH = 0.8, 4.0
STRETCH_STEP = 0.03
"""One request moves what is known by no more: so it follows the middle, which the few that met a long prompt do not shift."""

_Key = tuple[str | None, str]


class Overheads:
    """Moving means by the hosts of the pair, LOCAL apart from REMOTE."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[_Key, tuple[Overhead, int]] = OrderedDict()
        self._stretches: OrderedDict[str, float] = OrderedDict()
        self._answers: dict[str, dict[str | None, Overhead]] = {}  # by decode's host, then prefill's

    def between(self, prefill: WorkerView | None, decode: WorkerView) -> Overhead:
        """Of this pair; `prefill` None: LOCAL."""
        host, other = decode.host_id, None if prefill is None else prefill.host_id
        answers = self._answers.get(host)
        if answers is None:
            answers = self._new_answers(host)
        answer = answers.get(other)
        if answer is None:
            answer = answers[other] = self._look_up(other, host)
        return answer

    def observe_tpot(self, decode: WorkerView, steps_tpot_s: float, seen_tpot_s: float) -> None:
        """A request on this worker got its tokens this far apart, where the steps alone would have taken `steps_tpot_s`."""
        if steps_tpot_s <= 0:
            return
        known, seen = self._stretches.get(decode.host_id, 1.0), seen_tpot_s / steps_tpot_s
        stretch = known + min(STRETCH_STEP, max(-STRETCH_STEP, seen - known))
        self._stretches[decode.host_id] = min(MAX_STRETCH, max(MIN_STRETCH, stretch))
        self._stretches.move_to_end(decode.host_id)
        self._answers.pop(decode.host_id, None)
        if len(self._stretches) > MAX_PAIRS:
            host, _ = self._stretches.popitem(last=False)
            self._answers.pop(host, None)

    def observe(self, prefill: WorkerView | None, decode: WorkerView, seen: Overhead) -> None:
        """One request went this way."""
        key = _key(prefill, decode)
        known, count = self._pairs.get(key, (_unknown(key[0]), 0))
        weight = max(MIN_WEIGHT, 1 / (count + 1))
        before_s, after_s = _moved(known.before_s, seen.before_s, weight), _moved(known.after_s, seen.after_s, weight)
        self._pairs[key] = (Overhead(before_s, after_s), count + 1)
        self._pairs.move_to_end(key)
        self._answers.pop(key[1], None)
        if len(self._pairs) > MAX_PAIRS:
            (_, host), _ = self._pairs.popitem(last=False)
            self._answers.pop(host, None)

    def _look_up(self, prefill: str | None, decode: str) -> Overhead:
        """By hosts."""
        known, stretch = self._pairs.get((prefill, decode)), self._stretches.get(decode)
        over = known[0] if known is not None else _unknown(prefill)
        return over if stretch is None else Overhead(over.before_s, over.after_s, stretch)

    def _new_answers(self, host: str) -> dict[str | None, Overhead]:
        """An empty place for what is asked of this host: decisions ask the same about dozens of pairs until a request ends."""
        if len(self._answers) >= MAX_PAIRS:
            self._answers.clear()
        answers = self._answers[host] = {}
        return answers


def _moved(known: float, seen: float, weight: float) -> float:
    return known + weight * (min(seen, MAX_JUMP * known + LEAST_S) - known)


def _unknown(prefill: str | None) -> Overhead:
    return UNKNOWN_LOCAL if prefill is None else UNKNOWN_REMOTE


def _key(prefill: WorkerView | None, decode: WorkerView) -> _Key:
    return (None if prefill is None else prefill.host_id, decode.host_id)
