"""The election, by its own clock; with hypothesis: never two leaders at once, whatever the clocks and the network do."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.autoscaler.kubernetes.elector import Election, LeaseRecord

DURATION_S, DEADLINE_S = 15, 10.0


def _election(identity: str) -> Election:
    return Election(identity, DURATION_S, DEADLINE_S)


def _lead(election: Election, now_s: float = 0.0) -> LeaseRecord:
    """Makes the Lease."""
    election.seen(None, now_s)
    wanted = election.attempt(now_s, f"at {now_s}")
    assert wanted is not None
    made = replace(wanted, version="1")
    election.wrote(made, now_s)
    return made


def test_who_makes_the_lease_leads_until_it_cannot_renew() -> None:
    one = _election("one")
    assert not one.leads(0.0)
    made = _lead(one)
    assert (made.holder, made.transitions, made.acquired) == ("one", 0, "at 0.0")
    assert one.leads(0.0) and one.leads(9.9)
    assert not one.leads(10.0)


def test_a_renewal_keeps_when_it_was_acquired() -> None:
    one = _election("one")
    made = _lead(one)
    one.seen(made, 2.0)
    renewed = one.attempt(2.0, "later")
    assert renewed == replace(made, renewed="later")
    one.wrote(replace(made, renewed="later", version="2"), 2.0)
    assert one.leads(11.9) and not one.leads(12.0)


def test_another_waits_for_as_long_as_nothing_changes_by_its_own_clock() -> None:
    made = _lead(_election("one"))
    two = _election("two")
    two.seen(made, 1000.0)  # its clock has nothing to do with the other's
    assert two.attempt(1000.0, "x") is None
    two.seen(replace(made, renewed="again", version="2"), 1010.0)
    two.seen(replace(made, renewed="again", version="3"), 1020.0)  # only the version: no sign of life
    assert two.attempt(1024.9, "x") is None
    taken = two.attempt(1025.0, "x")
    assert taken is not None
    assert (taken.holder, taken.transitions, taken.acquired, taken.version) == ("two", 1, "x", "3")
    assert two.leader == "one"


def test_who_sees_another_holder_steps_down_at_once() -> None:
    one = _election("one")
    made = _lead(one)
    one.seen(replace(made, holder="two", version="2"), 1.0)
    assert not one.leads(1.0)
    assert one.attempt(1.0, "x") is None


def test_a_lease_that_was_taken_away_ends_the_lead_until_it_is_made_anew() -> None:
    one = _election("one")
    _lead(one)
    one.seen(None, 1.0)
    assert not one.leads(1.0)
    assert one.attempt(1.0, "x") == LeaseRecord("one", DURATION_S, "x", "x", 0)


def test_what_was_written_but_not_confirmed_is_no_lead() -> None:
    one = _election("one")
    made = _lead(_election("one"))
    one.seen(made, 5.0)  # its own name, and yet it has had no answer
    assert not one.leads(5.0)
    assert one.attempt(5.0, "x") == replace(made, renewed="x")


def test_who_resigns_frees_the_lease_at_once() -> None:
    one, two = _election("one"), _election("two")
    made = _lead(one)
    freed = one.resign("x")
    assert freed is not None and (freed.holder, freed.version) == ("", made.version)
    assert not one.leads(0.0) and one.resign("x") is None
    two.seen(freed, 50.0)
    taken = two.attempt(50.0, "y")
    assert taken is not None and taken.holder == "two"


def test_a_lease_of_the_api_and_back() -> None:
    record = LeaseRecord("one", 15, "2026-01-01T00:00:00.000000Z", "2026-01-01T00:00:02.000000Z", 3, "77")
    assert LeaseRecord.of({"metadata": {"resourceVersion": "77"}, "spec": record.spec()}) == record
    assert LeaseRecord.of({"metadata": {}}) == LeaseRecord("", 0, "", "", 0)


class _Server:
    """A Lease with optimistic concurrency."""

    def __init__(self) -> None:
        self.record: LeaseRecord | None = None
        self.version = 0

    def write(self, wanted: LeaseRecord) -> LeaseRecord | None:
        current = self.record.version if self.record is not None else ""
        if wanted.version != current:
            return None
        self.version += 1
        self.record = replace(wanted, version=str(self.version))
        return self.record


# For each step: who acts, how long it takes to ask and to be answered, whether the answer is lost; and time that passes before.
_PAUSES, _DELAYS = st.sampled_from([0.0, 2.0, 7.5, 15.0]), st.sampled_from([0.0, 0.0, 0.0, 0.0, 4.0])
_STEPS = st.lists(st.tuples(st.integers(0, 1), _PAUSES, _DELAYS, _DELAYS, st.booleans()), min_size=3, max_size=30)


@settings(max_examples=300, deadline=None)
@given(_STEPS, st.lists(st.integers(-1000, 1000), min_size=2, max_size=2))
def test_never_two_leaders(steps: list[tuple[int, float, float, float, bool]], offsets: list[int]) -> None:
    """Clocks start anywhere (and run alike); requests take up to 4 s each way, answers get lost."""
    elections = [_election(name) for name in "ab"]
    server, now_s = _Server(), 0.0
    for who, pause_s, there_s, back_s, is_lost in steps:
        now_s += pause_s
        election, clock = elections[who], offsets[who]
        election.seen(server.record, now_s + clock)
        wanted = election.attempt(now_s + clock, str(now_s))
        if wanted is None:
            continue
        sent_s = now_s
        now_s += there_s
        written = server.write(wanted)
        now_s += back_s
        if written is not None and not is_lost:
            election.wrote(written, sent_s + clock)
        leaders = [each.identity for each, offset in zip(elections, offsets, strict=True) if each.leads(now_s + offset)]
        assert len(leaders) <= 1
