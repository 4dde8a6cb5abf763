"""What people order by annotations of a Deployment. Pure; times in seconds since 1970."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdmesh.autoscaler.kubernetes import times

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
        return times.parse(annotations[HOLD_UNTIL])
    except ValueError as error:
        raise ValueError(f"{HOLD_UNTIL}: {error}") from None
