"""Whose replicas a Deployment has, and how long a person's stay."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pdmesh.autoscaler.kubernetes import objects
from pdmesh.autoscaler.kubernetes.ledger import (
    ARRIVES_S,
    AUTOSCALE,
    HOLD_UNTIL,
    UNKNOWN_OWNER,
    Entry,
    Held,
    entry_of,
    has_ended,
    hold,
    looked,
)
from pdmesh.autoscaler.kubernetes.objects import Owner, Seen, seen_of
from pdmesh.autoscaler.platform import PlatformError

NOW_S, FOR_S = 1_800_000_000.0, 600.0


KUBECTL = Owner("kubectl", "2027-01-15T08:00:00Z")
CHANGED = Entry("u", (5,), NOW_S, "kubectl", owner=KUBECTL)
NAMES = {"autoscale": AUTOSCALE, "hold_until": HOLD_UNTIL}


def _seen(replicas: int = 2, uid: str = "u", owner: Owner = KUBECTL, /, **annotations: str) -> Seen:
    return Seen("pdmesh-decode", uid, "7", replicas, {NAMES[key]: value for key, value in annotations.items()}, owner)


def _held(entry: Entry, seen: Seen, wall_s: float = NOW_S) -> Held | None:
    return hold(entry, seen, wall_s, FOR_S)


def test_what_is_seen_first_is_taken_as_it_is() -> None:
    entry = looked(None, _seen(5), NOW_S)
    assert entry == Entry("u", (5,), owner=KUBECTL)
    assert _held(entry, _seen(5)) is None


def test_another_number_is_a_persons_and_stays_for_a_while() -> None:
    entry = looked(Entry("u", (2,)), _seen(5), NOW_S)
    assert entry == CHANGED
    assert _held(entry, _seen(5), NOW_S + 200) == Held("kubectl", 400.0)
    assert _held(entry, _seen(5), NOW_S + 600) is None
    assert looked(entry, _seen(5), NOW_S + 300) == entry  # seen again: the time goes on from the change
    again = looked(entry, _seen(6, "u", Owner("kubectl", "2027-01-15T08:05:00Z")), NOW_S + 300)
    assert _held(again, _seen(6), NOW_S + 300) == Held("kubectl", 600.0)


@pytest.mark.parametrize(
    "shown",
    [
        Owner(),  # no managedFields
        Owner("kubectl-client-side-apply", "2027-01-01T00:00:00Z"),  # whoever made it: a scale is not noted (before 1.22)
        Owner("pdmesh-autoscaler", "2027-01-15T07:59:00Z"),
    ],
)
def test_who_is_not_known_is_not_named(shown: Owner) -> None:
    before = Owner("kubectl-client-side-apply", "2027-01-01T00:00:00Z")
    assert looked(Entry("u", (2,), owner=before), _seen(5, "u", shown), NOW_S).changed_by == UNKNOWN_OWNER


def test_a_request_that_nobody_answered_may_have_arrived_or_not() -> None:
    entry = Entry("u", (2,), owner=KUBECTL).asking(6, NOW_S)
    assert entry.ours == (6, 2)
    assert looked(entry, _seen(2), NOW_S) == entry
    assert looked(entry, _seen(6), NOW_S).ours == (6,)
    assert looked(entry, _seen(4), NOW_S).changed_by == UNKNOWN_OWNER
    assert entry.asking(2, NOW_S).ours == (2, 6)
    many = Entry("u", (1,))
    for replicas in range(2, 9):
        many = many.asking(replicas, NOW_S)
    assert many.ours == (8, 7, 6, 5)


def test_one_that_never_arrived_is_forgotten_and_the_same_number_a_persons() -> None:
    entry = Entry("u", (2,), owner=KUBECTL).asking(6, NOW_S)
    later = looked(entry, _seen(2), NOW_S + ARRIVES_S)
    assert later.ours == (2,)
    assert looked(later, _seen(6, "u", Owner("kubectl", "later")), NOW_S + 200).changed_by == "kubectl"


def test_a_deployment_that_was_made_anew_is_new() -> None:
    assert looked(CHANGED, _seen(5, "v"), NOW_S) == Entry("v", (5,), owner=KUBECTL)


def _after(*annotations: dict[str, str], every_s: float = 60.0) -> Held | None:
    """A change by kubectl, then these annotations one after the other."""
    entry, seen, wall_s = CHANGED, _seen(5), NOW_S
    for each in annotations:
        wall_s += every_s
        seen = _seen(5, **each)
        entry = entry_again(looked(entry, seen, wall_s))
    return _held(entry, seen, wall_s)


def entry_again(entry: Entry) -> Entry:
    """As the next leader has it."""
    found = entry_of(json.loads(json.dumps(entry.save())))
    assert found is not None
    return found


LATER, PAST, OLD = (objects.time(NOW_S + each) for each in (7200, 30, -7 * 86400))


@pytest.mark.parametrize(
    "annotations",
    [
        [{"hold_until": LATER}, {}],
        [{"autoscale": "off"}, {"autoscale": "on"}],
        [{"autoscale": "off"}, {}],
        [{"autoscale": "on"}],
        [{"hold_until": PAST}, {}],  # over by itself, then tidied up
        [{"hold_until": OLD}],
        [{"hold_until": "tomorrow"}, {"autoscale": "on"}],
        [{"autoscale": "off", "hold_until": LATER}, {"hold_until": LATER}, {}],
        [{"autoscale": "off"}, {"autoscale": "on"}, {}, {}],
    ],
)
def test_a_hold_that_a_person_has_ended_is_over(annotations: list[dict[str, str]]) -> None:
    assert _after(*annotations) is None


@pytest.mark.parametrize("annotations", [[{}], [{"hold_until": "tomorrow"}, {}]])
def test_what_has_not_held_ends_nothing(annotations: list[dict[str, str]]) -> None:
    assert _after(*annotations) == Held("kubectl", 600.0 - 60.0 * len(annotations))


def test_an_old_annotation_that_is_tidied_up_ends_nothing_nor_does_one_that_has_long_said_on() -> None:
    for standing in ({"hold_until": OLD}, {"autoscale": "on"}):
        entry = looked(Entry("u", (2,), said={NAMES[key]: value for key, value in standing.items()}), _seen(5, **standing), NOW_S)
        assert _held(entry, _seen(5, **standing), NOW_S) == Held("kubectl", 600.0)
        if "hold_until" in standing:
            assert _held(looked(entry, _seen(5), NOW_S + 60), _seen(5), NOW_S + 60) == Held("kubectl", 540.0)


def test_tidying_up_after_a_hold_is_not_its_end() -> None:
    standing = replace(CHANGED, said={AUTOSCALE: "on"})
    for passed_s, is_told in ((60.0, True), (700.0, False)):
        after = looked(standing, _seen(5, hold_until=PAST), NOW_S + passed_s)
        assert after.changed_s is None
        assert has_ended(standing, after, NOW_S + passed_s, FOR_S) == is_told
    longer = replace(CHANGED, said={HOLD_UNTIL: LATER})
    assert has_ended(longer, looked(longer, _seen(5), NOW_S + 700), NOW_S + 700, FOR_S)


def test_a_change_after_the_end_of_a_hold_is_a_new_one() -> None:
    entry = looked(looked(CHANGED, _seen(5, autoscale="on"), NOW_S + 60), _seen(7, autoscale="on"), NOW_S + 120)
    assert _held(entry, _seen(7, autoscale="on"), NOW_S + 120) == Held(UNKNOWN_OWNER, 600.0)


@pytest.mark.parametrize("period_s", [0.0, 600.0])
def test_an_annotation_forbids_while_it_stands(period_s: float) -> None:
    seen = _seen(autoscale="off")
    held = hold(Entry("u", (2,)), seen, NOW_S, period_s)
    assert held is not None and held.by == "the annotation pdmesh.io/autoscale" and held.left_s >= 60
    assert hold(Entry("u", (2,)), _seen(autoscale="on"), NOW_S, period_s) is None


def test_an_annotation_says_until_when() -> None:
    seen = _seen(hold_until=objects.time(NOW_S + 100))
    assert _held(Entry("u", (2,)), seen) == Held("the annotation pdmesh.io/hold-until", 100.0)
    assert _held(Entry("u", (2,)), seen, NOW_S + 100) is None


def test_a_newer_annotation_shortens_and_lengthens_what_a_change_does_an_older_one_does_not() -> None:
    changed = Entry("u", (5,), NOW_S, "kubectl")
    given_back = _seen(5, hold_until=objects.time(NOW_S + 10))
    assert _held(changed, given_back, NOW_S + 20) is None
    longer = _seen(5, hold_until=objects.time(NOW_S + 7200))
    held = _held(changed, longer, NOW_S + 3600)
    assert held is not None and held.left_s == 3600
    last_weeks = _seen(5, hold_until=objects.time(NOW_S - 7 * 86400))
    assert _held(changed, last_weeks, NOW_S + 20) == Held("kubectl", 580.0)


@pytest.mark.parametrize(
    ("annotations", "told"),
    [
        ({"autoscale": "No"}, "pdmesh.io/autoscale: 'No' is neither on nor off"),
        ({"hold_until": "tomorrow"}, "pdmesh.io/hold-until: 'tomorrow' is not a time"),
        ({"hold_until": "2027-01-01T00:00:00"}, "has no time zone; end it with Z"),
    ],
)
def test_an_annotation_that_nobody_understands_holds_and_says_so(annotations: dict[str, str], told: str) -> None:
    held = _held(Entry("u", (2,)), _seen(2, **annotations))
    assert held is not None and told in held.mistake


def test_entries_are_saved_as_json_and_anything_else_is_as_if_never_seen() -> None:
    for entry in (Entry("u", (2, 3)), CHANGED, Entry("u", (2,), asked_s=NOW_S, said={AUTOSCALE: "off"})):
        assert entry_of(json.loads(json.dumps(entry.save()))) == entry
    for saved in (
        None,
        3,
        {},
        {**Entry("u", (2,)).save(), "ours": []},
        {**Entry("u", (2,)).save(), "ours": ["2"]},
        {**CHANGED.save(), "said": {"a": 1}},
    ):
        assert entry_of(saved) is None


def test_a_deployment_of_the_api() -> None:
    metadata = {"name": "d", "uid": "u", "resourceVersion": "9", "annotations": {"a": "b"}}
    managed = [
        {"manager": "kubectl-client-side-apply", "fieldsV1": {"f:spec": {"f:template": {}}}},
        {
            "manager": "kubectl",
            "subresource": "scale",
            "time": "2027-01-15T08:00:00Z",
            "fieldsV1": {"f:spec": {"f:replicas": {}}},
        },
    ]
    seen = seen_of({"metadata": metadata | {"managedFields": managed}, "spec": {"replicas": 0}})
    assert seen == Seen("d", "u", "9", 0, {"a": "b"}, KUBECTL)
    with pytest.raises(PlatformError, match="is not one"):
        seen_of({"metadata": metadata})


def test_times_are_those_of_kubernetes() -> None:
    assert objects.micro_time(NOW_S) == "2027-01-15T08:00:00.000000Z"
    assert objects.parse("2027-01-15T09:00:00+01:00") == NOW_S == objects.parse(objects.time(NOW_S))


def test_times_of_a_leader_whose_clock_was_fast_count_as_now() -> None:
    saved = Entry("uid", (2,), changed_s=5000.0, changed_by="kubectl", asked_s=4000.0, owner=Owner("m", "t"), said={}).save()
    found = entry_of(json.loads(json.dumps(saved)), wall_s=1000.0)
    assert found is not None and (found.changed_s, found.asked_s) == (1000.0, 1000.0)
    assert entry_of(json.loads(json.dumps(saved)), wall_s=1e6) == entry_of(saved)
