"""The life of a reservation on a decode worker, as a pure state machine (docs/kv_transfer.md).

    RESERVED ──PushOpened──► RECEIVING ──Committed──► COMMITTED ──Started──► RUNNING
       ▲  │                      │                                              ▲
       │  └── NewAttempt(LOCAL), or Started of a LOCAL one ──────────────────────┤
       └──── AttemptFailed, NewAttempt(REMOTE): attempt + 1 ◄──┤                 │
                                                               └─ NewAttempt(LOCAL)
    any ── LeaseExpired | Cancelled | Failed | Finished ──► RELEASED(reason), for good

Nothing here uses blocks, sockets or clocks: `now` is passed in. Leaving RECEIVING other than by Committed fences the writer of
that attempt; the owner of the blocks must wait for `Receiver.quiesce` before it frees them.
"""

from dataclasses import dataclass, replace
from enum import Enum


class State(Enum):
    """Name the state of a reservation."""

    RESERVED = "reserved"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    RUNNING = "running"
    RELEASED = "released"


class Mode(Enum):
    """Name the source of the KV of an attempt."""

    REMOTE = "remote"
    LOCAL = "local"


@dataclass(frozen=True)
class ReservationState:
    """Hold one reservation's state. `lease_deadline` is monotonic seconds in RESERVED and RECEIVING; None elsewhere, where no
    lease runs."""

    state: State
    attempt: int
    mode: Mode
    lease_s: float
    lease_deadline: float | None
    released_reason: str | None = None

    def accepts_bytes(self, attempt: int) -> bool:
        """Return whether the writer of `attempt` may still write into the blocks: False fences it."""
        return self.state is State.RECEIVING and self.attempt == attempt


@dataclass(frozen=True)
class PushOpened:
    """A sender's hello for `attempt` was accepted."""

    attempt: int


@dataclass(frozen=True)
class Progress:
    """Bytes of `attempt` arrive: the lease is renewed."""

    attempt: int


@dataclass(frozen=True)
class Committed:
    """The manifest of `attempt` is complete."""

    attempt: int


@dataclass(frozen=True)
class Started:
    """The engine runs the sequence."""


@dataclass(frozen=True)
class AttemptFailed:
    """The push of `attempt` ended without a commit."""

    attempt: int
    reason: str = ""


@dataclass(frozen=True)
class NewAttempt:
    """`Submit(request, attempt, mode)` arrived for a reservation that exists."""

    attempt: int
    mode: Mode


@dataclass(frozen=True)
class LeaseExpired:
    """The lease timer fired. It changes nothing if the lease was renewed meanwhile."""


@dataclass(frozen=True)
class Cancelled:
    """The router, the client or a deadline ended the request."""

    reason: str = "cancelled"


@dataclass(frozen=True)
class Failed:
    """The worker cannot go on with the request."""

    reason: str = "failed"


@dataclass(frozen=True)
class Finished:
    """The request is complete."""

    reason: str = "finished"


Event = PushOpened | Progress | Committed | Started | AttemptFailed | NewAttempt | LeaseExpired | Cancelled | Failed | Finished


class InvalidTransition(Exception):
    """The event has no meaning in the present state; nothing was changed."""

    def __init__(self, current: ReservationState, event: Event, why: str) -> None:
        super().__init__(f"{event} does not apply to a {current.state.value} reservation at attempt {current.attempt}: {why}")
        self.current = current
        self.event = event
        self.why = why


class StaleAttempt(InvalidTransition):
    """The event belongs to an attempt that a newer one has replaced (ABORTED on the wire)."""


class AlreadyRunning(InvalidTransition):
    """A new attempt came for a request that has its KV already (FAILED_PRECONDITION on the wire)."""


class AlreadyReleased(InvalidTransition):
    """The reservation is gone, for the reason in `current.released_reason`."""


def reserved(attempt: int, mode: Mode, now: float, lease_s: float) -> ReservationState:
    """Return a fresh reservation at `attempt` (from 1) under a lease of `lease_s` seconds that starts `now`."""
    if attempt < 1:
        raise ValueError(f"attempt must be at least 1, got {attempt}")
    return ReservationState(State.RESERVED, attempt, mode, lease_s, now + lease_s)


def transition(current: ReservationState, event: Event, now: float) -> ReservationState:
    """Return the state after `event` at monotonic second `now`.

    It returns `current` itself for an event that is repeated or late. Raises InvalidTransition (or StaleAttempt, AlreadyRunning,
    AlreadyReleased), naming state and event, for an event that has no meaning in the state.
    """
    if current.state is State.RELEASED:
        return _after_release(current, event)
    match event:
        case PushOpened(attempt):
            return _open(current, event, attempt, now)
        case Progress(attempt):
            return _receive(current, event, attempt, _renewed(current, now))
        case Committed(attempt):
            return _receive(current, event, attempt, replace(current, state=State.COMMITTED, lease_deadline=None))
        case Started():
            return _start(current, event)
        case AttemptFailed(attempt):
            return _fail_attempt(current, event, attempt, now)
        case NewAttempt():
            return _submit(current, event, now)
        case LeaseExpired():
            return _expire(current, now)
        case Cancelled(reason) | Failed(reason) | Finished(reason):
            return _released(current, reason)


def _renewed(current: ReservationState, now: float) -> ReservationState:
    return replace(current, lease_deadline=now + current.lease_s)


def _released(current: ReservationState, reason: str) -> ReservationState:
    return replace(current, state=State.RELEASED, lease_deadline=None, released_reason=reason)


def _running(current: ReservationState, attempt: int, mode: Mode) -> ReservationState:
    return replace(current, state=State.RUNNING, attempt=attempt, mode=mode, lease_deadline=None)


def _after_release(current: ReservationState, event: Event) -> ReservationState:
    """Accept an ending that is reported twice, and reject events that would continue the reservation."""
    if isinstance(event, AttemptFailed | LeaseExpired | Cancelled | Failed | Finished):
        return current
    raise AlreadyReleased(current, event, f"it was released: {current.released_reason}")


def _check_attempt(current: ReservationState, event: Event, attempt: int) -> None:
    if attempt < current.attempt:
        raise StaleAttempt(current, event, f"attempt {attempt} was replaced by {current.attempt}")
    if attempt > current.attempt:
        raise InvalidTransition(current, event, f"attempt {attempt} was never submitted")


def _open(current: ReservationState, event: Event, attempt: int, now: float) -> ReservationState:
    _check_attempt(current, event, attempt)
    if current.state is not State.RESERVED:
        raise InvalidTransition(current, event, "a push can open only once for each attempt")
    if current.mode is not Mode.REMOTE:
        raise InvalidTransition(current, event, "its KV is computed locally")
    return replace(_renewed(current, now), state=State.RECEIVING)


def _receive(current: ReservationState, event: Event, attempt: int, after: ReservationState) -> ReservationState:
    _check_attempt(current, event, attempt)
    if current.state is not State.RECEIVING:
        raise InvalidTransition(current, event, "no push of this attempt is open")
    return after


def _start(current: ReservationState, event: Event) -> ReservationState:
    local = current.state is State.RESERVED and current.mode is Mode.LOCAL
    if current.state is State.COMMITTED or local:
        return _running(current, current.attempt, current.mode)
    raise InvalidTransition(current, event, "its KV is not in place")


def _fail_attempt(current: ReservationState, event: Event, attempt: int, now: float) -> ReservationState:
    """Fail the attempt if its push is open. The attempt number is raised at once, so that a late writer of the old one is
    fenced."""
    if attempt > current.attempt:
        raise InvalidTransition(current, event, f"attempt {attempt} was never submitted")
    if not current.accepts_bytes(attempt):
        return current
    return replace(_renewed(current, now), state=State.RESERVED, attempt=attempt + 1)


def _submit(current: ReservationState, event: NewAttempt, now: float) -> ReservationState:
    """Apply an idempotent Submit: the same attempt and mode change nothing, an older attempt is stale, a newer one replaces."""
    if event.attempt < current.attempt:
        raise StaleAttempt(current, event, f"attempt {event.attempt} was replaced by {current.attempt}")
    if event.attempt == current.attempt and event.mode is current.mode:
        return current
    if current.state in (State.COMMITTED, State.RUNNING):
        raise AlreadyRunning(current, event, f"the request runs already with attempt {current.attempt}")
    if event.attempt == current.attempt and (current.state is State.RECEIVING or current.mode is Mode.LOCAL):
        raise InvalidTransition(current, event, "the mode of an attempt cannot change: submit a newer attempt")
    if event.mode is Mode.LOCAL:
        return _running(current, event.attempt, Mode.LOCAL)
    return replace(_renewed(current, now), state=State.RESERVED, attempt=event.attempt, mode=Mode.REMOTE)


def _expire(current: ReservationState, now: float) -> ReservationState:
    if current.lease_deadline is None or now < current.lease_deadline:
        return current
    return _released(current, "lease expired")
