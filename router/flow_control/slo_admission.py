"""Admission by objectives: what a forecast means for a request, and the values that flow control passes around. Pure.

An objective is met or missed as a whole: a request that is bound to miss its own only takes from those that could meet theirs. So
it is refused at once as long as the mesh has other work; a request that would be alone is always admitted.
"""

import enum
from bisect import insort
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol

from router.routing.cost_model import MAX_AHEAD_S, Prediction, is_saturated
from router.tokenization.prepared_request import PreparedRequest

# The retry delay that a refused request gets. How soon slots come free is measured by `DrainRate` (`capacity.py`).

MIN_RETRY_DELAY_S = 0.1
MAX_RETRY_DELAY_S = 30.0
UNKNOWN_RETRY_DELAY_S = 1.0


def retry_delay_s(seconds: float | None) -> float:
    """Return the retry delay that a client gets: within bounds, and a default while nothing is known."""
    if seconds is None:
        return UNKNOWN_RETRY_DELAY_S
    return min(MAX_RETRY_DELAY_S, max(MIN_RETRY_DELAY_S, seconds))


@dataclass(frozen=True)
class Forecast:
    """Hold the prediction for the best placement: `ttft_s` from the moment of placement, `tpot_s` of the request's own tokens.

    `has_room`: some worker could hold it now. `ahead_s`: the part of `ttft_s` that other requests' prompts take. `idle_tpot_s`:
    the TPOT on the fastest worker with no other load; None: not computed, or not known. `elsewhere`: where it would begin at
    once, and have its first token later, as less of it is cached there; None: nowhere, or it begins at once anyway.
    """

    ttft_s: float
    tpot_s: float
    has_room: bool
    ahead_s: float = 0.0
    idle_tpot_s: float | None = None
    elsewhere: Prediction | None = None


class Forecaster(Protocol):
    """Predict from the fleet as it is now."""

    def forecast(self, prepared: PreparedRequest) -> Forecast | None:
        """Return the forecast; None while nothing is known: no worker, or none that reports its speed."""


INTERACTIVE, STANDARD, BATCH = RANKS = (1, 2, 3)
"""Ranks in order, numbered as the priorities of common.proto."""


def nothing_known() -> Forecast | None:
    """Return the forecast of a mesh about which nothing is known."""
    return None


@dataclass(frozen=True, eq=False)
class FlowItem:
    """Hold one request as flow control sees it.

    `priority` is that of common.proto. `started`: the client resumes a stream and has tokens of it. `lane`: requests of different
    lanes run on different workers, and do not wait for each other. `ttft_s` and `tpot_s` are its objectives, `guard_ttft_s` and
    `guard_tpot_s` those of other requests that it must not spoil (batch); None: there is none. `deadline` is on the clock that
    admission is given. `num_bytes`: the memory that it holds while it waits. `hint` orders it among the waiting requests of its
    tenant and priority, higher ones first. `foresee` returns a forecast for the fleet as it is now.
    """

    tenant: str = ""
    priority: int = STANDARD
    started: bool = False
    prompt_tokens: int = 1
    output_tokens: int = 0
    num_bytes: int = 0
    lane: Hashable = ""
    ttft_s: float | None = None
    tpot_s: float | None = None
    guard_ttft_s: float | None = None
    guard_tpot_s: float | None = None
    deadline: float | None = None
    hint: int = 0
    foresee: Callable[[], Forecast | None] = nothing_known

    @property
    def rank(self) -> int:
        """Return its priority. A resumed stream gets no other rank, because any client can claim to resume."""
        return self.priority

    @property
    def cost(self) -> float:
        """Return the tokens that it is expected to take: prompt and output."""
        return float(self.prompt_tokens + self.output_tokens)


class TicketState(enum.Enum):
    """Name the state of a ticket: WAITING in the queue, ADMITTED (holds a slot), REFUSED while it waited, or RELEASED. The last
    two hold nothing."""

    WAITING = "waiting"
    ADMITTED = "admitted"
    REFUSED = "refused"
    RELEASED = "released"


@dataclass(frozen=True)
class Refusal:
    """Hold why a request is refused. `reason` is for programs (`queue_full`, `share`, `priority`, `rate`, `objective`,
    `deadline`), `message` for people; `retry_delay_s`: when a retry is likely to succeed; None: it would fail on an idle mesh as
    well."""

    reason: str
    message: str
    retry_delay_s: float | None


@dataclass(eq=False)
class Ticket:
    """Hold a request's slot or its place in the queue. `number` counts arrivals; `refusal`: why it was refused while it
    waited."""

    item: FlowItem
    number: int
    arrived: float
    state: TicketState = TicketState.WAITING
    refusal: Refusal | None = None
    expected_s: float | None = None  # predicted time to first token, on arrival
    charged: float = field(default=0.0, repr=False)  # tokens taken from the tenant's bucket
    overtaken_tokens: int = 0  # prompt tokens of shorter requests that were admitted while it was first


class Line:
    """Hold tickets in the order of their turns: higher hints first, among equals the older one. It may contain tickets that no
    longer wait, which are skipped."""

    def __init__(self) -> None:
        self._levels: dict[int, deque[Ticket]] = {}  # by hint
        self._hints: list[int] = []  # ascending
        self._num = 0

    def __len__(self) -> int:
        """Return the number of tickets, those included that no longer wait."""
        return self._num

    def append(self, ticket: Ticket) -> None:
        """Add a ticket behind those of its hint."""
        self._level(ticket.item.hint).append(ticket)
        self._num += 1

    def appendleft(self, ticket: Ticket) -> None:
        """Add a ticket before those of its hint."""
        self._level(ticket.item.hint).appendleft(ticket)
        self._num += 1

    def remove(self, ticket: Ticket) -> None:
        """Remove a ticket that is in the line."""
        self._levels[ticket.item.hint].remove(ticket)
        self._num -= 1

    def first(self) -> Ticket | None:
        """Return the ticket whose turn is next; None when none waits."""
        while self._hints:
            level = self._levels[self._hints[-1]]
            while level and level[0].state is not TicketState.WAITING:
                level.popleft()
                self._num -= 1
            if level:
                return level[0]
            del self._levels[self._hints.pop()]
        return None

    def last(self) -> Ticket | None:
        """Return the ticket whose turn comes last; None when none waits."""
        while self._hints:
            level = self._levels[self._hints[0]]
            while level and level[-1].state is not TicketState.WAITING:
                level.pop()
                self._num -= 1
            if level:
                return level[-1]
            del self._levels[self._hints.pop(0)]
        return None

    def tidied(self, gone: Ticket) -> "Line":
        """Return the line without `gone` and the tickets that no longer wait."""
        tidy = Line()
        for level in self._levels.values():
            for ticket in level:
                if ticket.state is TicketState.WAITING and ticket is not gone:
                    tidy.append(ticket)
        return tidy

    def _level(self, hint: int) -> deque[Ticket]:
        if hint not in self._levels:
            self._levels[hint] = deque()
            insort(self._hints, hint)
        return self._levels[hint]


# Accuracy of TTFT forecasts, from the requests that were admitted by them.
#
# A forecast is a median: half of the requests are later. An objective needs the upper tail, so there is a margin: the factor
# within which all but a few of the latest requests stayed. A request beyond it raises the margin by a step; one within it lowers
# the margin by the fraction of a step that balances the two when a share of FEW exceeds it (a quantile, tracked by steps). A
# stall makes many requests late at once and counts once; and the margin decays over time. A request that waited and was refused
# then counts as one beyond it: it should have been refused at once.

FEW = 0.03
STEP = 0.2
MIN_MARGIN, MAX_MARGIN = 1 / 0.95, 2.0
HALF_LIFE_S = 30.0
RAISE_PERIOD_S = 0.5
CLOSE = 0.4
"""Fraction of the objective. Errors of forecasts below it are ignored: they are relatively large, and harmless."""


class PredictorAccuracy:
    """Track the accuracy of the forecasts for one lane. Times are seconds, `now` is monotonic."""

    def __init__(self) -> None:
        self._margin = MIN_MARGIN
        self._margin_at = 0.0
        self._raised_at = -RAISE_PERIOD_S

    def margin(self, now: float) -> float:
        """Return the margin for a request that arrives now."""
        faded: float = 0.5 ** (max(0.0, now - self._margin_at) / HALF_LIFE_S)
        return MIN_MARGIN + (self._margin - MIN_MARGIN) * faded

    def observe(self, expected_s: float, seen_s: float, objective_s: float, now: float) -> None:
        """Record the TTFT that was expected at admission or at arrival in the queue, and the one that was measured."""
        if expected_s < CLOSE * objective_s:
            return
        margin = self.margin(now)
        late = seen_s > margin * expected_s
        if late and now - self._raised_at >= RAISE_PERIOD_S:
            margin, self._raised_at = margin + STEP * (1 - FEW), now
        elif not late:
            margin -= STEP * FEW
        self._margin, self._margin_at = min(MAX_MARGIN, max(MIN_MARGIN, margin)), now


REOPEN = 0.95
"""Once a tenant is refused, its next request is admitted only with some reserve; else admission would flap with each
heartbeat."""
HOPELESS = 1.5
"""A request that has waited is refused once it is predicted to take so many times its objective: forecasts are off by a fifth at
the median, and it would have waited for nothing."""
BATCH_ROOM = 0.8
"""Batch may use at most this fraction of the objectives of other requests."""
MAX_WAIT_S = 3600.0
"""No request waits longer than this."""


class Verdict(enum.Enum):
    """Say what to do with a request. OPEN: place it now. SATURATED: no request can be placed well now. OWN: it waits because of
    its own objective or rank."""

    OPEN = "open"
    SATURATED = "saturated"
    OWN = "own"


def verdict(item: FlowItem, forecast: Forecast | None, *, others_above: bool, transit_s: float = 0.0) -> Verdict:
    """Return whether the item may be placed now. `others_above`: a request of a higher rank runs, which batch must not disturb.
    `transit_s`: time of admitted prompts that have not reached a worker, which the forecast does not contain."""
    if forecast is None:
        return Verdict.OPEN
    if not forecast.has_room or _is_held_back(item, forecast, transit_s):
        return Verdict.SATURATED
    if item.tpot_s is not None and forecast.tpot_s > item.tpot_s:
        return Verdict.OWN
    if item.rank == BATCH and others_above and _disturbs(item, forecast):
        return Verdict.OWN
    return Verdict.OPEN


def _is_held_back(item: FlowItem, forecast: Forecast, transit_s: float) -> bool:
    """Return whether every worker has enough work. One that wants a busy worker, since its prefix is cached there, while others
    are free is sent to it: held back here it would be in the way of requests that want the free ones. Batch waits all the same:
    on the worker no priority would order it."""
    if not is_saturated(forecast.ttft_s, forecast.ahead_s, transit_s):
        return False
    other = forecast.elsewhere
    return item.rank == BATCH or other is None or is_saturated(other.ttft_s, other.ahead_s, transit_s)


def _disturbs(item: FlowItem, forecast: Forecast) -> bool:
    ttft_s, tpot_s = item.guard_ttft_s, item.guard_tpot_s
    if ttft_s is not None and forecast.ttft_s > BATCH_ROOM * ttft_s:
        return True
    return tpot_s is not None and forecast.tpot_s > BATCH_ROOM * tpot_s


def alone_s(forecast: Forecast) -> float:
    """Return the part of the TTFT that is not caused by other requests' prompts."""
    return max(0.0, forecast.ttft_s - forecast.ahead_s)


@dataclass
class SloEstimate:
    """Hold whether one tenant, in one lane and rank, is refused for its objective at present."""

    refusing: bool = False

    def refusal(
        self,
        item: FlowItem,
        forecast: Forecast | None,
        wait_s: float | None,
        waited_s: float = 0.0,
        margin: float = MIN_MARGIN,
    ) -> Refusal | None:
        """Return a refusal if the item would miss its TTFT objective; None: it will be in time.

        `wait_s`: expected wait in the queue; None: it would be placed now. `waited_s`: its wait so far. A new item has to fit
        with `margin` times the expected time; one that has waited is refused only if it is hopeless (HOPELESS).
        """
        if forecast is None or item.ttft_s is None:
            return None
        expected_s = waited_s + expected_ttft_s(forecast, wait_s)
        ratio = expected_s / (HOPELESS * item.ttft_s) if waited_s else margin * expected_s / item.ttft_s
        late = ratio > (REOPEN if self.refusing and not waited_s else 1.0)
        if alone_s(forecast) <= REOPEN * item.ttft_s and not waited_s:
            self.refusing = late  # a prompt too long for its objective shows nothing about the load
        if not late:
            return None
        return Refusal("objective", _objective_words(item.ttft_s, expected_s, forecast, wait_s, waited_s),
                       retry_delay_s(expected_s - REOPEN * item.ttft_s))  # fmt: skip

    def unless_waiting_alone(self, item: FlowItem, wait_s: float | None) -> Refusal | None:
        """Return a refusal if the wait in the queue alone exceeds the objective: this needs no forecast."""
        if item.ttft_s is None or wait_s is None or wait_s <= item.ttft_s:
            return None
        self.refusing = True
        words = f"the queue alone is predicted to take {_ms(wait_s)}, the objective (slo_ttft_ms) is {_ms(item.ttft_s)}"
        return Refusal("objective", words, retry_delay_s(wait_s - REOPEN * item.ttft_s))


def deadline_refusal(item: FlowItem, forecast: Forecast | None, wait_s: float | None, now: float) -> Refusal | None:
    """Return a refusal if the first token would come after the deadline. Where the prompt alone takes longer, the deadline itself
    is the cause, and no retry helps."""
    if forecast is None or item.deadline is None:
        return None
    left_s, expected_s = item.deadline - now, expected_ttft_s(forecast, wait_s)
    if expected_s <= left_s:
        return None
    words = f"the first token is predicted in {_ms(expected_s)}, the deadline is in {_ms(left_s)}"
    if alone_s(forecast) > left_s:
        return Refusal("deadline", f"{words}: without other requests it would take {_ms(alone_s(forecast))}", None)
    return Refusal("deadline", words, retry_delay_s(expected_s - left_s))


def expired(item: FlowItem, waited_s: float, now: float, delay_s: float) -> Refusal:
    """Return the refusal of a ticket that has waited too long."""
    if waited_s >= MAX_WAIT_S:
        return Refusal("deadline", f"it has waited {_ms(waited_s)}, the longest that any request waits", delay_s)
    if item.ttft_s is not None and (item.deadline is None or max(now, now - waited_s + item.ttft_s) < item.deadline):
        words = f"it has waited {_ms(waited_s)} and cannot meet its objective (slo_ttft_ms) of {_ms(item.ttft_s)} any more"
        return Refusal("objective", words, delay_s)
    return Refusal("deadline", f"it has waited {_ms(waited_s)} and cannot meet its deadline any more", delay_s)


def too_slow(item: FlowItem, forecast: Forecast | None) -> Refusal | None:
    """Return a refusal if TPOT would miss its objective at the present load."""
    if forecast is None or item.tpot_s is None or forecast.tpot_s <= item.tpot_s:
        return None
    pace = f"an output token is predicted every {forecast.tpot_s * 1000:.1f} ms"
    words = f"{pace}, the objective (slo_tpot_ms) is {item.tpot_s * 1000:.1f} ms"
    return Refusal("objective", words, retry_delay_s(None))


def never_fast_enough(item: FlowItem, forecast: Forecast | None) -> Refusal | None:
    """Return a refusal if no worker would meet the TPOT objective, not even an idle one, so that waiting is useless."""
    if forecast is None or item.tpot_s is None or forecast.idle_tpot_s is None or forecast.idle_tpot_s <= item.tpot_s:
        return None
    pace = f"the fastest worker takes {forecast.idle_tpot_s * 1000:.1f} ms for an output token with nothing else to do"
    words = f"{pace}, the objective (slo_tpot_ms) is {item.tpot_s * 1000:.1f} ms"
    return Refusal("objective", words, MAX_RETRY_DELAY_S)


def expected_ttft_s(forecast: Forecast, wait_s: float | None) -> float:
    """Return the expected TTFT from now. After a wait, workers are as busy as they ever get work in advance (MAX_AHEAD_S), save
    one that has the prompt's beginning."""
    if wait_s is None or forecast.elsewhere is not None:
        return forecast.ttft_s + (wait_s or 0.0)
    return wait_s + alone_s(forecast) + min(forecast.ahead_s, MAX_AHEAD_S)


def _objective_words(objective_s: float, expected_s: float, forecast: Forecast, wait_s: float | None, waited_s: float) -> str:
    parts = [f"{_ms(waited_s)} waited already"] if waited_s else []
    parts += [f"{_ms(wait_s)} in the queue"] if wait_s else []
    parts.append(f"{_ms(alone_s(forecast))} for the prompt itself")
    expected = f"the first token is predicted after {_ms(expected_s)} ({', '.join(parts)})"
    return f"{expected}, the objective (slo_ttft_ms) is {_ms(objective_s)}"


def _ms(seconds: float) -> str:
    return f"{max(0.0, seconds) * 1000:.0f} ms"
