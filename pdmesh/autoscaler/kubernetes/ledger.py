"""Whose replicas a Deployment has: ours, or a person's, which stay for a while. Pure: the time is passed in, in seconds since
1970, because the next leader, on another machine, goes on with it.

What we ask for is noted before it is sent, beside what was there: whether a request arrived that was not answered, nobody knows,
and either value is ours then, for as long as it may still arrive. Any other value was set by somebody else.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pdmesh.autoscaler.kubernetes import orders
from pdmesh.autoscaler.kubernetes.objects import MANAGER, NOBODY, Owner, Seen
from pdmesh.autoscaler.kubernetes.orders import AUTOSCALE, HOLD_UNTIL

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
    said = orders.ours(seen.annotations)
    if entry is None or entry.uid != seen.uid:
        return Entry(seen.uid, (seen.replicas,), owner=seen.owner, said=said)
    if seen.replicas not in entry.ours:
        return Entry(seen.uid, (seen.replicas,), wall_s, _changed_by(entry, seen), owner=seen.owner, said=said)
    # If it is the latest, it has arrived, and nothing older can any more.
    is_sure = seen.replicas == entry.ours[0] or wall_s >= entry.asked_s + ARRIVES_S
    after = replace(entry, ours=(seen.replicas,) if is_sure else entry.ours, owner=seen.owner, said=said)
    if entry.changed_s is not None and orders.order_ends(entry.said, said, entry.changed_s, wall_s):
        return replace(after, changed_s=None, changed_by="")
    return after


def has_ended(before: Entry, after: Entry, wall_s: float, manual_hold_s: float) -> bool:
    """Whether a person has cut a hold short between two looks, not only tidied up after one."""
    if before.changed_s is None or after.changed_s is not None:
        return False
    return wall_s < before.changed_s + manual_hold_s or orders.read_orders(before.said).forbids(wall_s)


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
    said = orders.read_orders(seen.annotations)
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
