"""What admission did, by tenant and priority: for the status. Bounded: tenants name themselves. Pure."""

from collections import Counter
from dataclasses import dataclass, field

MAX_TENANTS = 64
OTHERS = "(others)"
"""The sum of tenants that there was no room for."""


@dataclass(eq=False)
class Tally:
    """One tenant's requests of one priority. `refused` counts by reason."""

    num_inflight: int = 0
    num_queued: int = 0
    num_admitted: int = 0
    num_waited: int = 0  # of those that got a place, and of others, for an answer
    refused: Counter[str] = field(default_factory=Counter)


class AdmissionCounts:
    """The tallies; at most MAX_TENANTS names beside OTHERS."""

    def __init__(self) -> None:
        self.tallies: dict[tuple[str, int], Tally] = {}
        self._tenants: dict[str, None] = {}

    def of(self, tenant: str, priority: int) -> Tally:
        """The tally to count in. A ticket keeps to its own: the name may be summed up with others meanwhile."""
        if tenant not in self._tenants and len(self._tenants) >= MAX_TENANTS and not self._forget_one():
            tenant = OTHERS
        if tenant != OTHERS:
            self._tenants.pop(tenant, None)
            self._tenants[tenant] = None  # the latest is last
        return self.tallies.setdefault((tenant, priority), Tally())

    def _forget_one(self) -> bool:
        """Sum the tenant that has been quiet for longest up with the others; False: all have requests here."""
        busy = {name for (name, _), tally in self.tallies.items() if tally.num_inflight or tally.num_queued}
        quiet = next((tenant for tenant in self._tenants if tenant not in busy), None)
        if quiet is None:
            return False
        del self._tenants[quiet]
        for name, priority in [key for key in self.tallies if key[0] == quiet]:
            old, others = self.tallies.pop((name, priority)), self.tallies.setdefault((OTHERS, priority), Tally())
            others.num_admitted += old.num_admitted
            others.num_waited += old.num_waited
            others.refused.update(old.refused)
        return True
