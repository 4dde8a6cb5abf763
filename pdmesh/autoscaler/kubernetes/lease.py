"""Who leads, decided from a Lease as client-go decides it. Pure: both clocks are passed in.

A candidate believes nobody's clock but its own: it waits until the record has not changed for as long as the record says. The
leader counts from before it sent its latest renewal, and stops leading earlier than anybody else may begin.
"""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class LeaseRecord:
    """The spec of a Lease. `holder` is empty: nobody. Times are kept as they were written: only whether they change matters."""

    holder: str
    duration_s: int
    acquired: str
    renewed: str
    transitions: int
    version: str = ""

    @classmethod
    def of(cls, lease: dict[str, Any]) -> "LeaseRecord":
        """A Lease of the API; what it leaves out counts as nothing."""
        spec = lease.get("spec") or {}
        return cls(
            holder=str(spec.get("holderIdentity") or ""),
            duration_s=int(spec.get("leaseDurationSeconds") or 0),
            acquired=str(spec.get("acquireTime") or ""),
            renewed=str(spec.get("renewTime") or ""),
            transitions=int(spec.get("leaseTransitions") or 0),
            version=str(lease.get("metadata", {}).get("resourceVersion", "")),
        )

    def spec(self) -> dict[str, Any]:
        """As the API wants it."""
        return {
            "holderIdentity": self.holder,
            "leaseDurationSeconds": self.duration_s,
            "acquireTime": self.acquired,
            "renewTime": self.renewed,
            "leaseTransitions": self.transitions,
        }


class Election:
    """One candidate's view. `now_s` is its own monotonic clock; `wall` is the time in words, for people who read the Lease."""

    def __init__(self, identity: str, duration_s: int, renew_deadline_s: float) -> None:
        self.identity = identity
        self._duration_s = duration_s
        self._renew_deadline_s = renew_deadline_s
        self._record: LeaseRecord | None = None
        self._changed_s = float("-inf")
        self._renewed_s: float | None = None

    @property
    def leader(self) -> str:
        """As last seen; empty: nobody."""
        return self._record.holder if self._record is not None else ""

    def seen(self, record: LeaseRecord | None, now_s: float) -> None:
        """What the API showed; `now_s` when it had. None: there is no Lease, and anybody may make one."""
        if record is None or self._record is None or replace(record, version="") != replace(self._record, version=""):
            self._changed_s = now_s
        self._record = record
        if self.leader != self.identity:
            self._renewed_s = None

    def attempt(self, now_s: float, wall: str) -> LeaseRecord | None:
        """What to write in place of what was seen, provided that it is still the same; None: another one leads."""
        record = self._record
        if record is None:
            return LeaseRecord(self.identity, self._duration_s, wall, wall, 0)
        if record.holder == self.identity:
            return replace(record, duration_s=self._duration_s, renewed=wall)
        if record.holder and now_s < self._changed_s + record.duration_s:
            return None
        taken = replace(record, holder=self.identity, duration_s=self._duration_s, acquired=wall, renewed=wall)
        return replace(taken, transitions=record.transitions + 1)

    def wrote(self, record: LeaseRecord, sent_s: float) -> None:
        """The API took an attempt that was sent at `sent_s`."""
        self._record, self._changed_s = record, sent_s
        self._renewed_s = sent_s if record.holder == self.identity else None

    def leads(self, now_s: float) -> bool:
        """Whether this candidate may act now."""
        return self._renewed_s is not None and now_s < self._renewed_s + self._renew_deadline_s

    def silent_s(self, now_s: float) -> float | None:
        """How long ago the renewal was sent that this candidate leads by, or has led by; None: there is none."""
        return None if self._renewed_s is None else now_s - self._renewed_s

    def resign(self, wall: str) -> LeaseRecord | None:
        """Leads no more from here on. What to write so that others need not wait; None: it held nothing."""
        holds = self._renewed_s is not None and self.leader == self.identity
        self._renewed_s = None
        if not holds or self._record is None:
            return None
        return replace(self._record, holder="", duration_s=1, acquired=wall, renewed=wall)
