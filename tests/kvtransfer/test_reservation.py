"""The reservation state machine: its whole table, then random histories."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.reservation import (
    AlreadyReleased,
    AlreadyRunning,
    AttemptFailed,
    Cancelled,
    Committed,
    Event,
    Failed,
    Finished,
    InvalidTransition,
    LeaseExpired,
    Mode,
    NewAttempt,
    Progress,
    PushOpened,
    ReservationState,
    StaleAttempt,
    Started,
    State,
    reserved,
    transition,
)

LEASE_S = 5.0
NOW = 100.0
DEADLINE = 103.0  # of the state before the event: not yet over
RENEWED = NOW + LEASE_S

REMOTE, LOCAL = Mode.REMOTE, Mode.LOCAL
SAME = "same"
INVALID, STALE, RUNNING_ALREADY, GONE = InvalidTransition, StaleAttempt, AlreadyRunning, AlreadyReleased

# The states that can occur, all at attempt 2.
STATES = {
    "reserved": ReservationState(State.RESERVED, 2, REMOTE, LEASE_S, DEADLINE),
    "reserved local": ReservationState(State.RESERVED, 2, LOCAL, LEASE_S, DEADLINE),
    "receiving": ReservationState(State.RECEIVING, 2, REMOTE, LEASE_S, DEADLINE),
    "committed": ReservationState(State.COMMITTED, 2, REMOTE, LEASE_S, None),
    "running": ReservationState(State.RUNNING, 2, REMOTE, LEASE_S, None),
    "running local": ReservationState(State.RUNNING, 2, LOCAL, LEASE_S, None),
    "released": ReservationState(State.RELEASED, 2, REMOTE, LEASE_S, None, "why"),
}

# After an event: (state, attempt, mode, deadline), SAME, or the exception. One column for each state, in the order of STATES.
RESERVED_3 = (State.RESERVED, 3, REMOTE, RENEWED)
LOCAL_2 = (State.RUNNING, 2, LOCAL, None)
LOCAL_3 = (State.RUNNING, 3, LOCAL, None)
RECEIVING = (State.RECEIVING, 2, REMOTE, RENEWED)
COMMITTED = (State.COMMITTED, 2, REMOTE, None)
RUNNING = (State.RUNNING, 2, REMOTE, None)
ENDED = (State.RELEASED, 2, None, None)
TABLE: dict[Event, tuple[object, ...]] = {
    #                        reserved    reserved local  receiving   committed        running          running local    released
    PushOpened(1):          (STALE,      STALE,          STALE,      STALE,           STALE,           STALE,           GONE),
    PushOpened(2):          (RECEIVING,  INVALID,        INVALID,    INVALID,         INVALID,         INVALID,         GONE),
    PushOpened(3):          (INVALID,    INVALID,        INVALID,    INVALID,         INVALID,         INVALID,         GONE),
    Progress(1):            (STALE,      STALE,          STALE,      STALE,           STALE,           STALE,           GONE),
    Progress(2):            (INVALID,    INVALID,        RECEIVING,  INVALID,         INVALID,         INVALID,         GONE),
    Progress(3):            (INVALID,    INVALID,        INVALID,    INVALID,         INVALID,         INVALID,         GONE),
    Committed(1):           (STALE,      STALE,          STALE,      STALE,           STALE,           STALE,           GONE),
    Committed(2):           (INVALID,    INVALID,        COMMITTED,  INVALID,         INVALID,         INVALID,         GONE),
    Committed(3):           (INVALID,    INVALID,        INVALID,    INVALID,         INVALID,         INVALID,         GONE),
    Started():              (INVALID,    LOCAL_2,        INVALID,    RUNNING,         INVALID,         INVALID,         GONE),
    AttemptFailed(1):       (SAME,       SAME,           SAME,       SAME,            SAME,            SAME,            SAME),
    AttemptFailed(2):       (SAME,       SAME,           RESERVED_3, SAME,            SAME,            SAME,            SAME),
    AttemptFailed(3):       (INVALID,    INVALID,        INVALID,    INVALID,         INVALID,         INVALID,         SAME),
    NewAttempt(1, REMOTE):  (STALE,      STALE,          STALE,      STALE,           STALE,           STALE,           GONE),
    NewAttempt(1, LOCAL):   (STALE,      STALE,          STALE,      STALE,           STALE,           STALE,           GONE),
    NewAttempt(2, REMOTE):  (SAME,       INVALID,        SAME,       SAME,            SAME,            RUNNING_ALREADY, GONE),
    NewAttempt(2, LOCAL):   (LOCAL_2,    SAME,           INVALID,    RUNNING_ALREADY, RUNNING_ALREADY, SAME,            GONE),
    NewAttempt(3, REMOTE):  (RESERVED_3, RESERVED_3,     RESERVED_3, RUNNING_ALREADY, RUNNING_ALREADY, RUNNING_ALREADY, GONE),
    NewAttempt(3, LOCAL):   (LOCAL_3,    LOCAL_3,        LOCAL_3,    RUNNING_ALREADY, RUNNING_ALREADY, RUNNING_ALREADY, GONE),
    LeaseExpired():         (SAME,       SAME,           SAME,       SAME,            SAME,            SAME,            SAME),
    Cancelled("c"):         (ENDED,      ENDED,          ENDED,      ENDED,           ENDED,           ENDED,           SAME),
    Failed("f"):            (ENDED,      ENDED,          ENDED,      ENDED,           ENDED,           ENDED,           SAME),
    Finished("d"):          (ENDED,      ENDED,          ENDED,      ENDED,           ENDED,           ENDED,           SAME),
}  # fmt: skip
CASES = [(name, event, row[i]) for event, row in TABLE.items() for i, name in enumerate(STATES)]


@pytest.mark.parametrize(("name", "event", "expected"), CASES, ids=[f"{name}-{event}" for name, event, _ in CASES])
def test_table(name: str, event: Event, expected: object) -> None:
    before = STATES[name]
    if isinstance(expected, type):
        with pytest.raises(InvalidTransition) as raised:
            transition(before, event, NOW)
        assert type(raised.value) is expected
        assert before.state.value in str(raised.value) and type(event).__name__ in str(raised.value)
    elif expected is SAME:
        assert transition(before, event, NOW) is before
    else:
        assert isinstance(expected, tuple)
        state, attempt, mode, deadline = expected
        reason = event.reason if isinstance(event, Cancelled | Failed | Finished) else None
        wanted = ReservationState(state, attempt, mode or before.mode, LEASE_S, deadline, reason)
        assert transition(before, event, NOW) == wanted


def test_every_event_type_is_in_the_table() -> None:
    assert {type(event) for event in TABLE} == set(Event.__args__)


@pytest.mark.parametrize("name", ["reserved", "reserved local", "receiving"])
def test_lease_ends_at_its_deadline(name: str) -> None:
    before = STATES[name]
    assert transition(before, LeaseExpired(), DEADLINE - 1e-6) is before
    after = transition(before, LeaseExpired(), DEADLINE)
    assert after.state is State.RELEASED and after.released_reason == "lease expired"


@pytest.mark.parametrize("name", ["committed", "running", "running local", "released"])
def test_no_lease_runs_once_committed(name: str) -> None:
    assert transition(STATES[name], LeaseExpired(), NOW + 1e9) is STATES[name]


def test_a_reservation_begins_reserved() -> None:
    assert reserved(1, REMOTE, NOW, LEASE_S) == ReservationState(State.RESERVED, 1, REMOTE, LEASE_S, RENEWED)
    with pytest.raises(ValueError, match="attempt"):
        reserved(0, REMOTE, NOW, LEASE_S)


def test_only_the_writer_of_the_present_attempt_may_write() -> None:
    for name, state in STATES.items():
        assert state.accepts_bytes(2) is (name == "receiving")
        assert not state.accepts_bytes(1) and not state.accepts_bytes(3)


ATTEMPTS = st.integers(1, 5)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(PushOpened, ATTEMPTS),
    st.builds(Progress, ATTEMPTS),
    st.builds(Committed, ATTEMPTS),
    st.just(Started()),
    st.builds(AttemptFailed, ATTEMPTS),
    st.builds(NewAttempt, ATTEMPTS, st.sampled_from(Mode)),
    st.just(LeaseExpired()),
    st.sampled_from([Cancelled(), Failed(), Finished()]),
)


@given(st.sampled_from(Mode), st.lists(st.tuples(EVENTS, st.floats(0, 3)), max_size=30))
def test_random_histories(mode: Mode, history: list[tuple[Event, float]]) -> None:
    now, current = NOW, reserved(1, mode, NOW, LEASE_S)
    receiving: set[int] = set()
    for event, elapsed in history:
        now += elapsed
        before = current
        try:
            current = transition(before, event, now)
        except InvalidTransition:
            continue
        _check_step(before, event, current, receiving)
        if current.state is State.RECEIVING:
            receiving.add(current.attempt)


def _check_step(before: ReservationState, event: Event, after: ReservationState, receiving: set[int]) -> None:
    assert after.attempt >= before.attempt
    if before.state is State.RELEASED:
        assert after is before
    if isinstance(event, Committed):
        assert event.attempt == before.attempt == after.attempt and before.state is State.RECEIVING
    if after.state is State.COMMITTED:
        assert after.attempt in receiving
    if after.state is State.RUNNING and after.mode is REMOTE:
        assert before.state in (State.COMMITTED, State.RUNNING)
    assert (after.lease_deadline is not None) == (after.state in (State.RESERVED, State.RECEIVING))
    assert (after.released_reason is not None) == (after.state is State.RELEASED)
    assert replace(after, lease_deadline=None).lease_s == LEASE_S
