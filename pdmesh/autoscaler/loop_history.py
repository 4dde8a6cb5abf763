"""Records what the loop did and why: a line for each change and for the begin and end of each hold, and a trace for each
decision.
"""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from pdmesh.autoscaler.platform import PlatformError
from pdmesh.autoscaler.views import Decision
from pdmesh.runtime.telemetry.spans import Attributes, Span, Value
from pdmesh.runtime.telemetry.tracing import OFF, Tracing

_FIGURES = re.compile(r"[\d.,]+")
MAX_ENTRIES = 1000
REPEAT_S = 60.0
"""Seconds after which a lasting state is reported again, if its text has changed."""
Kind: TypeAlias = Literal["scale", "flip", "hold", "resume", "failed"]

logger = logging.getLogger("autoscaler")


@dataclass(frozen=True)
class Entry:
    """Record what happened at `at_s`, on the loop's clock. `kind`: scale or flip, something changes; hold, nothing may; resume,
    it may again; failed, an attempt failed. `replicas` of each pool from then on."""

    at_s: float
    kind: Kind
    text: str
    replicas: dict[str, int]


@dataclass(frozen=True)
class Held:
    """Describe a hold. `what` identifies it and stays the same while the figures in `text` change."""

    what: str
    text: str


def held_of(decision: Decision) -> Held | None:
    """Return the hold of a decision that is worth an entry; a cool-down is not."""
    pools = [pool for pool in decision.pools if _is_outage(pool.held)]
    if decision.held is not None:
        return Held(decision.held_by, decision.held)
    what = "; ".join(f"{pool.name}: {pool.held}" for pool in pools)
    return Held(what, "; ".join(f"{pool.name}: {pool.reason}" for pool in pools)) if pools else None


def _is_outage(held: str | None) -> bool:
    return held is not None and held not in ("cool-down", "step", "budget") and not held.startswith(("step of", "grew"))


class History:
    """Keep the latest entries; each is logged and passed to the listeners."""

    def __init__(self, on_entry: Callable[[Entry], None] | None = None) -> None:
        self.entries: deque[Entry] = deque(maxlen=MAX_ENTRIES)
        self._on_entry = on_entry
        self._said: Held | None = None  # of the current hold
        self._said_s = self._failed_s = float("-inf")  # when it was last reported
        self._failure = self._failing = ""  # the last reported failure; the current failure

    def changed(self, at_s: float, kind: Kind, text: str, replicas: dict[str, int]) -> None:
        """Record a change."""
        self._add(Entry(at_s, kind, text, replicas))

    def held(self, at_s: float, held: Held | None, replicas: dict[str, int]) -> None:
        """Record what holds everything, None: nothing does. Logged when it begins, when it ends, and rarely in between."""
        before = self._said
        if held is None:
            self._said = None
            if before is not None:
                self._add(Entry(at_s, "resume", "the hold has ended: changes are possible again", replicas))
        elif before is None or before.what != held.what or self._is_news(at_s, before.text, held.text):
            self._said, self._said_s = held, at_s
            self._add(Entry(at_s, "hold", held.text, replicas))

    def failed(self, at_s: float, problem: str | None) -> None:
        """Record a failed attempt, None: there is none. Logged when it begins; rarely if it fails, is not tried and fails
        again."""
        words = "" if problem is None else _words(problem)
        begins, self._failing = words != self._failing, words
        if problem is not None and begins and (words != self._failure or at_s - self._failed_s >= REPEAT_S):
            self._failure, self._failed_s = words, at_s
            self._add(Entry(at_s, "failed", problem, {}))

    def _is_news(self, at_s: float, before: str, now: str) -> bool:
        return at_s - self._said_s >= REPEAT_S and _words(before) != _words(now)

    def _add(self, entry: Entry) -> None:
        self.entries.append(entry)
        level = logging.INFO if entry.kind in ("scale", "flip", "resume") else logging.WARNING
        logger.log(level, "%s: %s", entry.kind, entry.text)
        if self._on_entry is not None:
            self._on_entry(entry)


def _words(text: str) -> str:
    """Return the text without its figures."""
    return _FIGURES.sub("#", text)


def append_to(path: Path) -> Callable[[Entry], None]:
    """Return a listener that writes entries as JSON, one per line. A full disk is logged and ends nothing."""

    def write(entry: Entry) -> None:
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(entry)) + "\n")
        except OSError as error:
            logger.warning("decisions are not written to %s: %s", path, error)

    return write


def read_entries(path: Path) -> list[Entry]:
    """Return the entries that `append_to` wrote. Raises OSError, ValueError."""
    return [Entry(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


# A trace for each decision that changes something: the decision, the reason and the outcome.
#
#     autoscale.decide    from the look at the routers to the last order
#         decided         event: orders follow
#         flip, scale     event for each order that was carried out
#
# A round that changes nothing leaves none, nor does one that repeats the latest trace: orders that are not carried out, as in a
# dry run, or that fail repeatedly.


NAME = "autoscale.decide"
_Told = tuple[list[tuple[str, Attributes]], bool]


class DecisionSpans:
    """Trace the decisions of one loop."""

    def __init__(self, tracing: Tracing = OFF) -> None:
        self._tracing = tracing
        self._told: _Told = ([], False)

    @contextmanager
    def around(self, decision: Decision, began_ns: int) -> Iterator[Span]:
        """Yield the span while the orders are carried out; each is an event of it. `began_ns`: the round's start, monotonic."""
        span = self._tracing.begin(NAME, None, start_ns=began_ns, attributes=_attributes(decision))
        span.event("decided")
        try:
            yield span
        except Exception as error:
            span.fail(type(error).__name__, str(error) if isinstance(error, PlatformError) else "")
            raise
        finally:
            self._tell(span)

    def _tell(self, span: Span) -> None:
        """Export the span, whatever the sampling rate of requests: decisions are few."""
        orders = [(event.name, event.attributes) for event in span.events[1:]]
        is_news = (orders, span.is_failed) not in (([], False), self._told)
        self._told = (orders, span.is_failed)
        if is_news:
            self._tracing.keep((span.context.trace_id,))
            span.end()


def _attributes(decision: Decision) -> Attributes:
    attributes: dict[str, Value] = {}
    for pool in decision.pools:
        prefix = f"pdmesh.autoscale.{pool.name.value}"
        attributes |= {
            f"{prefix}.before": pool.before,
            f"{prefix}.replicas": pool.replicas,
            f"{prefix}.reason": pool.reason,
            f"{prefix}.held": pool.held or "",
        }
    return {**attributes, "pdmesh.autoscale.flips": [str(flip) for flip in decision.flips]}
