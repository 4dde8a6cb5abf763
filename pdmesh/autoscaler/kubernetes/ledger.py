"""Tells the autoscaler's own replica counts from those that a person has set, which are held for a while. Pure: the time is
passed in, in seconds since 1970, because the next leader, on another machine, continues with it.

What we ask for is recorded before it is sent, beside the previous value: an unanswered request may or may not arrive, so both
values count as ours for as long as it may still arrive. Any other value was set by someone else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pdmesh.autoscaler.kubernetes import objects
from pdmesh.autoscaler.kubernetes.objects import MANAGER, NO_OWNER, Owner, Seen

# Annotations by which people control a Deployment. Times in seconds since 1970.


AUTOSCALE = "pdmesh.io/autoscale"
HOLD_UNTIL = "pdmesh.io/hold-until"
_MAX_SHOWN = 50


@dataclass(frozen=True)
class Said:
    """Hold the annotations' meaning. `until_s`: None without that annotation. `mistake`: an annotation that cannot be read, which
    holds until it is corrected."""

    is_off: bool = False
    until_s: float | None = None
    mistake: str = ""

    def forbids(self, wall_s: float) -> bool:
        """Return whether nothing may change now."""
        return bool(self.mistake) or self.is_off or (self.until_s is not None and wall_s < self.until_s)


def ours(annotations: Mapping[str, str]) -> dict[str, str]:
    """Return the annotations that concern us, cut to the length that is read."""
    return {key: str(annotations[key])[:_MAX_SHOWN] for key in (AUTOSCALE, HOLD_UNTIL) if key in annotations}


def read_orders(annotations: Mapping[str, str]) -> Said:
    """Read the annotations."""
    found = ours(annotations)
    try:
        return Said(_is_off(found), _until_s(found))
    except ValueError as error:
        return Said(mistake=str(error))


def order_ends(before: Mapping[str, str], after: Mapping[str, str], since_s: float, wall_s: float) -> bool:
    """Return whether a person has ended a hold from `since_s` between two looks: an annotation that held was removed, or one was
    written that does not hold. Removing an annotation that did not hold, an older date or a mistake, says nothing."""
    said = read_orders(after)
    if ours(before) == ours(after) or said.forbids(wall_s):
        return False
    was = read_orders(before)
    is_written = any(before.get(key) != value for key, value in ours(after).items())
    return is_written or was.is_off or (was.until_s is not None and was.until_s >= since_s)


def _is_off(annotations: Mapping[str, str]) -> bool:
    value = annotations.get(AUTOSCALE, "on")
    if value not in ("on", "off"):
        raise ValueError(f"{AUTOSCALE}: {value!r} is neither on nor off; set it to one of them, or remove it")
    return value == "off"


def _until_s(annotations: Mapping[str, str]) -> float | None:
    if HOLD_UNTIL not in annotations:
        return None
    try:
        return objects.parse(annotations[HOLD_UNTIL])
    except ValueError as error:
        raise ValueError(f"{HOLD_UNTIL}: {error}") from None


MAX_OURS = 4
ARRIVES_S = 120.0
"""Seconds after which a request has arrived or never will: an API server ends a request after a minute."""
UNKNOWN_OWNER = "someone (kubectl scale or another client)"
MIN_LEFT_S = 60.0


@dataclass(frozen=True)
class Entry:
    """Hold the state of one Deployment. `ours`: the values that are our own doing, the latest, asked for at `asked_s`, first.
    `changed_*`: the latest change by someone else; None: there is none, or the hold that followed was ended. `owner`, `said`: the
    owner of the replicas and the annotations that concern us, at the last look."""

    uid: str
    ours: tuple[int, ...]
    changed_s: float | None = None
    changed_by: str = ""
    asked_s: float = 0.0
    owner: Owner = NO_OWNER
    said: dict[str, str] = field(default_factory=dict)

    def asking(self, replicas: int, wall_s: float) -> Entry:
        """Return the entry before asking for `replicas`."""
        return replace(self, ours=(replicas, *(each for each in self.ours if each != replicas))[:MAX_OURS], asked_s=wall_s)

    def save(self) -> dict[str, object]:
        """Return the entry as JSON."""
        changed = {"changed_s": self.changed_s, "changed_by": self.changed_by, "asked_s": self.asked_s}
        return {
            "uid": self.uid,
            "ours": list(self.ours),
            **changed,
            "owner": [self.owner.manager, self.owner.time],
            "said": self.said,
        }


def entry_of(saved: object, wall_s: float = float("inf")) -> Entry | None:
    """Return the entry that `save` wrote; None for anything else, as if the Deployment had never been seen. Times ahead of
    `wall_s`, this leader's clock, come from a former leader whose clock was fast: they count as now."""
    match saved:
        case {
            "uid": str(uid), "ours": [*ours], "changed_s": float() | int() | None as changed_s, "changed_by": str(by),
            "asked_s": float() | int() as asked_s, "owner": [str(manager), str(time)], "said": dict(said),
        }:  # fmt: skip
            if ours and all(isinstance(each, int) for each in ours) and all(isinstance(each, str) for each in said.values()):
                changed_s = None if changed_s is None else min(changed_s, wall_s)
                return Entry(uid, tuple(ours), changed_s, by, min(asked_s, wall_s), Owner(manager, time), said)
    return None


def looked(entry: Entry | None, seen: Seen, wall_s: float) -> Entry:
    """Return the entry after a look. A Deployment seen for the first time counts as ours: no change is known yet."""
    said = ours(seen.annotations)
    if entry is None or entry.uid != seen.uid:
        return Entry(seen.uid, (seen.replicas,), owner=seen.owner, said=said)
    if seen.replicas not in entry.ours:
        return Entry(seen.uid, (seen.replicas,), wall_s, _changed_by(entry, seen), owner=seen.owner, said=said)
    # If the latest has arrived, nothing older can arrive any more.
    is_sure = seen.replicas == entry.ours[0] or wall_s >= entry.asked_s + ARRIVES_S
    after = replace(entry, ours=(seen.replicas,) if is_sure else entry.ours, owner=seen.owner, said=said)
    if entry.changed_s is not None and order_ends(entry.said, said, entry.changed_s, wall_s):
        return replace(after, changed_s=None, changed_by="")
    return after


def has_ended(before: Entry, after: Entry, wall_s: float, manual_hold_s: float) -> bool:
    """Return whether a person ended a hold early between two looks, rather than cleaning up after one."""
    if before.changed_s is None or after.changed_s is not None:
        return False
    return wall_s < before.changed_s + manual_hold_s or read_orders(before.said).forbids(wall_s)


def _changed_by(entry: Entry, seen: Seen) -> str:
    """Return the owner of the change; empty if the API still names the owner from before, or us: it has not recorded this one."""
    is_noted = seen.owner.manager not in ("", MANAGER) and seen.owner != entry.owner
    return seen.owner.manager if is_noted else UNKNOWN_OWNER


@dataclass(frozen=True)
class Held:
    """Report that nothing may change for `left_s` seconds. `mistake`: an annotation that cannot be read, which holds until
    corrected."""

    by: str
    left_s: float
    mistake: str = ""


def hold(entry: Entry, seen: Seen, wall_s: float, manual_hold_s: float) -> Held | None:
    """Return the hold of a person, if any. An annotation forbids changes while it stands: `left_s` is then only the time until
    the next look."""
    said = read_orders(seen.annotations)
    if said.mistake:
        return Held("an annotation that cannot be read", max(manual_hold_s, MIN_LEFT_S), said.mistake)
    if said.is_off:
        return Held(f"the annotation {AUTOSCALE}", max(manual_hold_s, MIN_LEFT_S))
    # An annotation newer than the change says how long the change stays, possibly no longer.
    if said.until_s is not None and (entry.changed_s is None or said.until_s >= entry.changed_s):
        return Held(f"the annotation {HOLD_UNTIL}", said.until_s - wall_s) if wall_s < said.until_s else None
    if entry.changed_s is not None and wall_s < entry.changed_s + manual_hold_s:
        return Held(entry.changed_by, entry.changed_s + manual_hold_s - wall_s)
    return None
