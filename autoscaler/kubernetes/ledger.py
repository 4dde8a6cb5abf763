"""Whose replicas a Deployment has: ours, or a person's, which stay for a while. Pure: the time is passed in, in seconds since
1970, because the next leader, on another machine, goes on with it.

What we ask for is noted before it is sent, beside what was there: whether a request arrived that was not answered, nobody knows,
and either value is ours then. Any other value was set by somebody else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoscaler.kubernetes import times
from autoscaler.platform import PlatformError

AUTOSCALE = "pdmesh.io/autoscale"
HOLD_UNTIL = "pdmesh.io/hold-until"
MAX_OURS = 4


@dataclass(frozen=True)
class Seen:
    """A Deployment as the API shows it. `uid` differs once it was deleted and made anew. `set_by`: who set the replicas, as far
    as the API knows."""

    name: str
    uid: str
    version: str
    replicas: int
    annotations: dict[str, str]
    set_by: str = ""


@dataclass(frozen=True)
class Entry:
    """Of one Deployment. `ours`: what it may have by our own doing. `changed_*`: the latest change by somebody else."""

    uid: str
    ours: tuple[int, ...]
    changed_s: float | None = None
    changed_by: str = ""

    def asking(self, replicas: int) -> Entry:
        """About to ask for so many."""
        return replace(self, ours=(replicas, *(each for each in self.ours if each != replicas))[:MAX_OURS])

    def save(self) -> dict[str, object]:
        """As JSON."""
        return {"uid": self.uid, "ours": list(self.ours), "changed_s": self.changed_s, "changed_by": self.changed_by}


def entry_of(saved: object) -> Entry | None:
    """What `save` gave; None for anything else, as if the Deployment had never been seen."""
    match saved:
        case {"uid": str(uid), "ours": [*ours], "changed_s": float() | int() | None as changed_s, "changed_by": str(by)}:
            if ours and all(isinstance(each, int) for each in ours):
                return Entry(uid, tuple(ours), changed_s, by)
    return None


def looked(entry: Entry | None, seen: Seen, wall_s: float) -> Entry:
    """After a look. What is seen for the first time counts as ours: nobody has changed anything yet."""
    if entry is None or entry.uid != seen.uid:
        return Entry(seen.uid, (seen.replicas,))
    if seen.replicas == entry.ours[0]:  # the latest has arrived, and nothing older can any more
        return replace(entry, ours=(seen.replicas,))
    if seen.replicas in entry.ours:
        return entry
    return Entry(seen.uid, (seen.replicas,), wall_s, seen.set_by or "somebody")


@dataclass(frozen=True)
class Held:
    """Nothing may change for `left_s` seconds. `mistake`: what is wrong with an annotation, which holds until it is put right."""

    by: str
    left_s: float
    mistake: str = ""


def hold(entry: Entry, seen: Seen, wall_s: float, manual_hold_s: float) -> Held | None:
    """Whether a person has said to leave it alone. What an annotation forbids, it forbids while it stands: `left_s` is then only
    until somebody looks again."""
    try:
        is_off, until_s = _is_off(seen.annotations), _hold_until(seen.annotations)
    except ValueError as error:
        return Held("an annotation that cannot be read", max(manual_hold_s, 60.0), str(error))
    if is_off:
        return Held(f"the annotation {AUTOSCALE}", max(manual_hold_s, 60.0))
    # An annotation that is newer than the change says how long that stays, which may be: no longer.
    if until_s is not None and (entry.changed_s is None or until_s >= entry.changed_s):
        return Held(f"the annotation {HOLD_UNTIL}", until_s - wall_s) if wall_s < until_s else None
    if entry.changed_s is not None and wall_s < entry.changed_s + manual_hold_s:
        return Held(entry.changed_by, entry.changed_s + manual_hold_s - wall_s)
    return None


def seen_of(deployment: dict[str, object]) -> Seen:
    """A Deployment of the API. Raises PlatformError for anything else."""
    match deployment:
        case {"metadata": {"name": str(name), "uid": str(uid), "resourceVersion": str(version), **metadata}, "spec": dict(spec)}:
            annotations = metadata.get("annotations") or {}
            replicas = spec.get("replicas", 1)
            if isinstance(annotations, dict) and isinstance(replicas, int):
                return Seen(name, uid, version, replicas, annotations, _set_by(metadata.get("managedFields")))
    raise PlatformError(f"what the API server calls a Deployment is none: {str(deployment)[:200]}")


def _set_by(managed: object) -> str:
    """The manager that owns spec.replicas."""
    for each in managed if isinstance(managed, list) else []:
        match each:
            case {"manager": str(manager), "fieldsV1": {"f:spec": {"f:replicas": _}}}:
                return manager[:100]
    return ""


def _is_off(annotations: dict[str, str]) -> bool:
    value = annotations.get(AUTOSCALE, "on")
    if value not in ("on", "off"):
        raise ValueError(f"{AUTOSCALE}: {value[:50]!r} is neither on nor off; set it to one of them, or take it away")
    return value == "off"


def _hold_until(annotations: dict[str, str]) -> float | None:
    if HOLD_UNTIL not in annotations:
        return None
    try:
        return times.parse(annotations[HOLD_UNTIL][:50])
    except ValueError as error:
        raise ValueError(f"{HOLD_UNTIL}: {error}") from None
