"""Whose replicas a Deployment has: ours, or a person's, which stay for a while. Pure: the time is passed in, in seconds since
1970, because the next leader, on another machine, goes on with it.

What we ask for is noted before it is sent, beside what was there: whether a request arrived that was not answered, nobody knows,
and either value is ours then, for as long as it may still arrive. Any other value was set by somebody else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pdmesh.autoscaler.kubernetes import objects
from pdmesh.autoscaler.kubernetes.objects import MANAGER, NOBODY, Owner, Seen

# What people order by annotations of a Deployment. Pure; times in seconds since 1970.


AUTOSCALE = "pdmesh.io/autoscale"
HOLD_UNTIL = "pdmesh.io/hold-until"
_MAX_SHOWN = 50


@dataclass(frozen=True)
class Said:
    """`until_s`: None without that annotation. `mistake`: what cannot be read of them, which holds until it is put right."""

    is_off: bool = False
    until_s: float | None = None
    mistake: str = ""

    def forbids(self, wall_s: float) -> bool:
        """Whether nothing may change now."""
        return bool(self.mistake) or self.is_off or (self.until_s is not None and wall_s < self.until_s)


def ours(annotations: Mapping[str, str]) -> dict[str, str]:
    """Those that mean us, no longer than what is read of them."""
    return {key: str(annotations[key])[:_MAX_SHOWN] for key in (AUTOSCALE, HOLD_UNTIL) if key in annotations}


def read_orders(annotations: Mapping[str, str]) -> Said:
    """What stands there."""
    found = ours(annotations)
    try:
        return Said(_is_off(found), _until_s(found))
    except ValueError as error:
        return Said(mistake=str(error))


def order_ends(before: Mapping[str, str], after: Mapping[str, str], since_s: float, wall_s: float) -> bool:
    """Whether somebody has said between two looks that a hold since `since_s` is over: what held was taken away, or one was
    written that does not hold. To take away what has not held, an older date or a mistake, says nothing."""
    said = read_orders(after)
    if ours(before) == ours(after) or said.forbids(wall_s):
        return False
    was = read_orders(before)
    is_written = any(before.get(key) != value for key, value in ours(after).items())
    return is_written or was.is_off or (was.until_s is not None and was.until_s >= since_s)


def _is_off(annotations: Mapping[str, str]) -> bool:
    value = annotations.get(AUTOSCALE, "on")
    if value not in ("on", "off"):
        raise ValueError(f"{AUTOSCALE}: {value!r} is neither on nor off; set it to one of them, or take it away")
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
"""By then what was sent has arrived, or never will: an API server ends a request after a minute."""
SOMEBODY = "somebody (kubectl scale or another client)"
MIN_LEFT_S = 60.0


@dataclass(frozen=True)
class Entry:
    """Of one Deployment. `ours`: what it may have by our own doing, the latest, asked for at `asked_s`, first. `changed_*`: the
    latest change by somebody else; None: there is none, or he has ended the hold that came of it. `owner`, `said`: who owned the
    replicas, and the annotations that mean us, when it was last looked at."""

    uid: str
    ours: tuple[int, ...]
    changed_s: float | None = None
    changed_by: str = ""
    asked_s: float = 0.0
    owner: Owner = NOBODY
    said: dict[str, str] = field(default_factory=dict)

    def asking(self, replicas: int, wall_s: float) -> Entry:
        """About to ask for so many."""
        return replace(self, ours=(replicas, *(each for each in self.ours if each != replicas))[:MAX_OURS], asked_s=wall_s)

    def save(self) -> dict[str, object]:
        """As JSON."""
        changed = {"changed_s": self.changed_s, "changed_by": self.changed_by, "asked_s": self.asked_s}
        return {
            "uid": self.uid,
            "ours": list(self.ours),
            **changed,
            "owner": [self.owner.manager, self.owner.time],
            "said": self.said,
        }


def entry_of(saved: object, wall_s: float = float("inf")) -> Entry | None:
    """What `save` gave; None for anything else, as if the Deployment had never been seen. Times that lie ahead of `wall_s`, this
    leader's clock, are those of a former leader whose clock was fast: they count as now."""
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
    """After a look. What is seen for the first time counts as ours: nobody has changed anything yet."""
    said = ours(seen.annotations)
    if entry is None or entry.uid != seen.uid:
        return Entry(seen.uid, (seen.replicas,), owner=seen.owner, said=said)
    if seen.replicas not in entry.ours:
        return Entry(seen.uid, (seen.replicas,), wall_s, _changed_by(entry, seen), owner=seen.owner, said=said)
    # If it is the latest, it has arrived, and nothing older can any more.
    is_sure = seen.replicas == entry.ours[0] or wall_s >= entry.asked_s + ARRIVES_S
    after = replace(entry, ours=(seen.replicas,) if is_sure else entry.ours, owner=seen.owner, said=said)
    if entry.changed_s is not None and order_ends(entry.said, said, entry.changed_s, wall_s):
        return replace(after, changed_s=None, changed_by="")
    return after


def has_ended(before: Entry, after: Entry, wall_s: float, manual_hold_s: float) -> bool:
    """Whether a person has cut a hold short between two looks, not only tidied up after one."""
    if before.changed_s is None or after.changed_s is not None:
        return False
    return wall_s < before.changed_s + manual_hold_s or read_orders(before.said).forbids(wall_s)


def _changed_by(entry: Entry, seen: Seen) -> str:
    """Nobody by name where the API names whoever it named before the change, or us: it has not noted this one."""
    is_noted = seen.owner.manager not in ("", MANAGER) and seen.owner != entry.owner
    return seen.owner.manager if is_noted else SOMEBODY


@dataclass(frozen=True)
class Held:
    """Nothing may change for `left_s` seconds. `mistake`: what is wrong with an annotation, which holds until it is put right."""

    by: str
    left_s: float
    mistake: str = ""


def hold(entry: Entry, seen: Seen, wall_s: float, manual_hold_s: float) -> Held | None:
    """Whether a person has said to leave it alone. What an annotation forbids, it forbids while it stands: `left_s` is then only
    until somebody looks again."""
    said = read_orders(seen.annotations)
    if said.mistake:
        return Held("an annotation that cannot be read", max(manual_hold_s, MIN_LEFT_S), said.mistake)
    if said.is_off:
        return Held(f"the annotation {AUTOSCALE}", max(manual_hold_s, MIN_LEFT_S))
    # An annotation that is newer than the change says how long that stays, which may be: no longer.
    if said.until_s is not None and (entry.changed_s is None or said.until_s >= entry.changed_s):
        return Held(f"the annotation {HOLD_UNTIL}", said.until_s - wall_s) if wall_s < said.until_s else None
    if entry.changed_s is not None and wall_s < entry.changed_s + manual_hold_s:
        return Held(entry.changed_by, entry.changed_s + manual_hold_s - wall_s)
    return None
