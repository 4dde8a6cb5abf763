"""Between which workers a transport moves KV: transports say it, workers register it, routers compare it. Imports nothing but
the standard library: routers ask the same question as workers, and know no transport by name.

A worker of a version before `WorkerInfo.transport_reach` does not say what its transports reach (None here). The other end's
word then counts for both, as it is the same transport. Where neither end says it, the transport is taken to reach: such a pair
may be chosen in vain, but not harmed, as a sender uses only endpoints that it reaches, a receiver refuses a layout that it
cannot take, and the router then has another worker compute the prompt.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Scope(enum.Enum):
    """How far apart two workers may be. The values are those of `worker_pb2.ReachScope`."""

    PROCESS = 1
    HOST = 2
    EVERYWHERE = 3


class WireReach(Protocol):
    """`worker_pb2.TransportReach`, as far as it matters here."""

    @property
    def scope(self) -> int: ...
    @property
    def same_layout(self) -> bool: ...


@dataclass(frozen=True)
class Reach:
    """What one transport reaches. `same_layout`: it moves blocks as they lie and converts nothing."""

    scope: Scope
    same_layout: bool = False

    @classmethod
    def of(cls, wire: WireReach) -> "Reach | None":
        """Return what the message says; None where it does not say it. Raises ValueError for a scope of a later version."""
        return cls(Scope(wire.scope), wire.same_layout) if wire.scope else None

    def covers(self, *, same_process: bool, same_host: bool, same_layout: bool) -> bool:
        """Return whether KV gets from one worker to another that are so far apart."""
        if self.same_layout and not same_layout:
            return False
        return self.scope is Scope.EVERYWHERE or (same_host if self.scope is Scope.HOST else same_process)


EVERYWHERE = Reach(Scope.EVERYWHERE)


class Transports(NamedTuple):
    """What one worker offers: pairs of a transport's name and its reach. `reach_all`: by one of them, any worker that offers the
    same ones is reached."""

    offers: frozenset[tuple[str, Reach | None]]
    reach_all: bool

    @classmethod
    def of(cls, reach: Mapping[str, Reach | None]) -> "Transports":
        """Return the transports with these names."""
        return cls(frozenset(reach.items()), any(each in (None, EVERYWHERE) for each in reach.values()))

    def meet(self, others: "Transports", *, same_process: bool, same_host: bool, same_layout: bool) -> bool:
        """Return whether a transport that both workers offer reaches from one to the other."""
        theirs = dict(others.offers)
        for name, reach in self.offers:
            if name in theirs and all(
                said.covers(same_process=same_process, same_host=same_host, same_layout=same_layout)
                for said in (reach, theirs[name])
                if said is not None
            ):
                return True
        return False
