"""What the router learns from requests that have ended: the time of a placement beyond the steps of its workers, and how many
tokens outputs have. Bounded; pure."""

from collections import OrderedDict
from typing import NamedTuple

from router.routing.cost_model import Overhead
from router.routing.worker_snapshot import WorkerSnapshot

UNKNOWN_LOCAL = Overhead(2e-3, 0.0)
UNKNOWN_REMOTE = Overhead(5e-3, 5e-3)
MIN_WEIGHT = 0.1
"""Least weight of the newest observation: the first replaces the assumed value, the second weighs a half, and so on."""

MAX_JUMP = 4.0
"""An observation counts as at most this many times the mean: a process may be starting up, or a machine stall."""

LEAST_S = 1e-3
"""Added to that limit, so that a mean near zero can grow."""

MAX_PAIRS = 4096

MIN_STRETCH, MAX_STRETCH = 0.8, 4.0
STRETCH_STEP, FIRST_STRETCH_STEP = 0.03, 0.5
"""Largest change by one request: so the value follows the median, which few requests beside a long prompt do not shift. The first
requests of a load may change it by the latter over their number, so that a few of them are enough to know a machine."""

FRESH_S, FADE_S = 30.0, 60.0
"""A stretch holds for so long after the latest request, and then half of it is left after FADE_S."""
CACHED_FOR_S = 5.0

FEW_ROWS, MANY_ROWS, NUM_LOAD_CLASSES = 2, 6, 4

_Key = tuple[str | None, str]


def load_class(decode: WorkerSnapshot) -> int:
    """Return the class of a worker by the sequences that decode there or soon will: beside few of them more come than end while
    a request runs, beside many more end than come."""
    rows = decode.num_decoding + decode.num_starting + decode.dispatched_decodes
    return 0 if rows <= 0 else 1 if rows <= FEW_ROWS else 2 if rows <= MANY_ROWS else 3


class Stretch(NamedTuple):
    """Hold the middle of what was seen, of how many requests, and when the latest of them was."""

    value: float
    num_seen: int
    seen_at: float = 0.0

    def at(self, now: float) -> float:
        """Return what is left of it. One that was high while something was wrong keeps requests away, and none would show that it
        is over."""
        age_s = now - self.seen_at
        return self.value if age_s <= FRESH_S else 1 + (self.value - 1) * 0.5 ** ((age_s - FRESH_S) / FADE_S)

    def followed(self, seen: float, now: float) -> "Stretch":
        """Return it with one request more."""
        step, value = max(STRETCH_STEP, FIRST_STRETCH_STEP / (self.num_seen + 1)), self.at(now)
        value += min(step, max(-step, seen - value))
        return Stretch(min(MAX_STRETCH, max(MIN_STRETCH, value)), self.num_seen + 1, now)


class Stretches:
    """Keep the stretch of each load class, and that of all for classes that are not known yet; of the latest MAX_PAIRS keys."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[_Key, list[Stretch]] = OrderedDict()  # by load class; the last is that of all

    def get(self, key: _Key, place: int, now: float) -> float:
        """Return the stretch of a load class; 1 before anything was seen."""
        known = self._by_key.get(key)
        if known is None:
            return 1.0
        return (known[place] if known[place].num_seen else known[NUM_LOAD_CLASSES]).at(now)

    def observe(self, key: _Key, place: int, seen: float, now: float) -> _Key | None:
        """Record that of one request; return a key that was forgotten for it."""
        known = self._by_key.setdefault(key, [Stretch(1.0, 0)] * (NUM_LOAD_CLASSES + 1))
        if not known[place].num_seen:
            known[place] = Stretch(known[NUM_LOAD_CLASSES].at(now), 0, now)
        for each in (place, NUM_LOAD_CLASSES):
            known[each] = known[each].followed(seen, now)
        self._by_key.move_to_end(key)
        return self._by_key.popitem(last=False)[0] if len(self._by_key) > MAX_PAIRS else None


class Overheads:
    """Keep moving means by the hosts of a pair, LOCAL apart from REMOTE. Stretches of TPOT are those of the decode worker's host,
    by its load class; those of TTFT are of a pair, by the load class of the worker that computes the prompt: of one that decodes,
    too, since only sequences that come later take of a prompt's time. `_cached`: by decode host, then by both load classes and
    the prefill host."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[_Key, tuple[Overhead, int]] = OrderedDict()
        self._tpot, self._ttft = Stretches(), Stretches()
        self._cached: dict[str, dict[tuple[int, int | None, str | None], Overhead]] = {}
        self._cached_until = 0.0

    def between(self, prefill: WorkerSnapshot | None, decode: WorkerSnapshot, now: float = 0.0) -> Overhead:
        """Return the overhead of this pair; `prefill` None: LOCAL. `now`: monotonic seconds, as in all calls."""
        if now >= self._cached_until:
            self._cached.clear()
            self._cached_until = now + CACHED_FOR_S
        host, other = decode.host_id, None if prefill is None else prefill.host_id
        cached = self._cached.get(host)
        if cached is None:
            cached = self._new_cache(host)
        place = load_class(decode)
        key = (place, place if prefill is None else _prompt_class(prefill), other)
        known = cached.get(key)
        if known is None:
            known = cached[key] = self._look_up(other, host, key, now)
        return known

    def observe_tpot(self, decode: WorkerSnapshot, steps_tpot_s: float, seen_tpot_s: float, now: float = 0.0) -> None:
        """Record the observed TPOT of a request on this worker, and `steps_tpot_s`, that of the steps alone. `decode`: as it was
        when the request was placed."""
        if steps_tpot_s <= 0:
            return
        forgotten = self._tpot.observe((None, decode.host_id), load_class(decode), seen_tpot_s / steps_tpot_s, now)
        self._changed(decode.host_id, forgotten)

    def observe_ttft(
        self, prefill: WorkerSnapshot | None, decode: WorkerSnapshot, plain_ttft_s: float, seen_ttft_s: float, now: float = 0.0
    ) -> None:
        """Record the observed TTFT of a request on this pair, and `plain_ttft_s`, which was predicted of what was there. Both
        snapshots: as they were when the request was placed."""
        place = _prompt_class(decode if prefill is None else prefill)
        if plain_ttft_s > 0 and place is not None:
            forgotten = self._ttft.observe(_key(prefill, decode), place, seen_ttft_s / plain_ttft_s, now)
            self._changed(decode.host_id, forgotten)

    def observe(self, prefill: WorkerSnapshot | None, decode: WorkerSnapshot, seen: Overhead) -> None:
        """Record the overhead of one request on this pair."""
        key = _key(prefill, decode)
        known, count = self._pairs.get(key, (_unknown(key[0]), 0))
        weight = max(MIN_WEIGHT, 1 / (count + 1))
        before_s, after_s = _moved(known.before_s, seen.before_s, weight), _moved(known.after_s, seen.after_s, weight)
        self._pairs[key] = (Overhead(before_s, after_s), count + 1)
        self._pairs.move_to_end(key)
        self._cached.pop(key[1], None)
        if len(self._pairs) > MAX_PAIRS:
            (_, host), _ = self._pairs.popitem(last=False)
            self._cached.pop(host, None)

    def _look_up(self, prefill: str | None, decode: str, places: tuple[int, int | None, str | None], now: float) -> Overhead:
        """Return the overhead between two hosts, at the load classes of decode and prompt."""
        key, (place, prompt_place, _) = (prefill, decode), places
        known = self._pairs.get(key)
        over = known[0] if known is not None else _unknown(prefill)
        ttft = 1.0 if prompt_place is None else self._ttft.get(key, prompt_place, now)
        return Overhead(over.before_s, over.after_s, self._tpot.get((None, decode), place, now), ttft)

    def _changed(self, decode: str, forgotten: _Key | None) -> None:
        self._cached.pop(decode, None)
        if forgotten is not None:
            self._cached.pop(forgotten[1], None)

    def _new_cache(self, host: str) -> dict[tuple[int, int | None, str | None], Overhead]:
        """Return an empty cache for this decode host: until a request ends, decisions ask for the same dozens of pairs."""
        if len(self._cached) >= MAX_PAIRS:
            self._cached.clear()
        cached = self._cached[host] = {}
        return cached


def _prompt_class(computing: WorkerSnapshot) -> int | None:
    return load_class(computing) if computing.decode else None


def _moved(known: float, seen: float, weight: float) -> float:
    return known + weight * (min(seen, MAX_JUMP * known + LEAST_S) - known)


def _unknown(prefill: str | None) -> Overhead:
    return UNKNOWN_LOCAL if prefill is None else UNKNOWN_REMOTE


def _key(prefill: WorkerSnapshot | None, decode: WorkerSnapshot) -> _Key:
    return (None if prefill is None else prefill.host_id, decode.host_id)


# The expected output length of a request: the mean of its tenant's requests to its model. Bounded; pure.


UNKNOWN = 128.0
MAX_KEYS = 4096
MEMORY = 64
"""The mean is over about this many requests."""


class OutputLengths:
    """Keep moving means by model and tenant."""

    def __init__(self) -> None:
        self._means: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def expected(self, model: str, tenant: str, max_tokens: int) -> float:
        """Return the expected tokens of each choice: at least one, at most `max_tokens`."""
        mean, _ = self._means.get((model, tenant)) or self._means.get((model, "")) or (UNKNOWN, 0)
        return max(1.0, min(mean, max_tokens))

    def observe(self, model: str, tenant: str, num_tokens: int) -> None:
        """Record that a choice has ended after `num_tokens`."""
        mean, count = self._means.pop((model, tenant), (0.0, 0))
        count = min(count + 1, MEMORY)
        self._means[(model, tenant)] = (mean + (num_tokens - mean) / count, count)
        if len(self._means) > MAX_KEYS:
            self._means.popitem(last=False)
