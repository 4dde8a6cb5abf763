"""What is to be struck, at which state and for how long: a seeded list of faults that meets quotas. Pure.

A cell is a kind at a state. The list goes over all cells again and again, each time in another order, so that every part of it
has about equally many of each: what is cut short is balanced all the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

ANY_MOMENT = "any moment"
PREFILL_STATES = (
    "prefill.accepted",
    "prefill.computed",
    "push.hello",
    "push.part",
    "push.before_commit",
    "push.committed",
)
DECODE_STATES = ("decode.reserved", "decode.receiving", "decode.committed", "decode.running")
TIER_STATES = ("tier.write", "tier.restore", "pull.ask", "pull.send")
"""Those of workers with tiers, and of the two ends of a pull; workers of either role pass through them."""
ANY_OF_ROUTER = "any moment of a router"
ROUTER_STATES = (ANY_OF_ROUTER, "router.route", "router.admission")
STATES = (ANY_MOMENT, *PREFILL_STATES, *DECODE_STATES)
"""Those of workers."""
MOMENTS = (ANY_MOMENT, ANY_OF_ROUTER)
WORKERS = ("prefill", "decode")
ROLES = (*WORKERS, "router")


class Kind(StrEnum):
    """What goes wrong."""

    KILL = "kill"  # SIGKILL, then a new process
    STOP = "stop"  # SIGSTOP, later SIGCONT
    RESTART = "restart"  # SIGTERM, then a new process: what a rollout does to each worker
    RESET = "reset"  # connections end at both ends at once
    BLACK_HOLE = "black hole"  # nothing passes a link, and nobody is told
    DROP = "dropped connection"  # those that a link has carry nothing more, and nobody is told; new ones do
    SLOW = "slow link"  # delay and few bytes per second
    LOSSY = "lossy link"  # half of what is sent has to be sent again, and again
    SLOW_PROCESS = "slow process"  # it gets a tenth of the time
    SHM_FULL = "shm full"  # no memory for mapping a peer's pool
    REDIS_STOP = "redis stopped"
    REDIS_EMPTY = "redis emptied"
    REDIS_RESTART = "redis restarted"  # killed, some time later started again: empty as well
    CLOCK = "clock jump"  # of one process, and back
    DISK_FULL = "disk full"  # no file that the process has grows any more
    LOG_STANDS = "log stands still"  # the pipe that takes its log is full, and read by nothing
    OUT_OF_MEMORY = "out of memory"  # its control group has no more: the kernel kills it
    RANK_KILL = "rank killed"  # SIGKILL of one of the processes that are a worker together
    UNPLUGGED = "host unplugged"  # nothing reaches a host, and nothing leaves it
    PARTITION = "partition"  # two hosts do not reach each other, and all others do
    ONE_WAY = "partition one way"  # what one host sends to another does not arrive, what it gets does
    KV_DISK_FULL = "KV disk full"  # the file system of a worker's tier has no room
    KV_DISK_READ_ONLY = "KV disk read-only"  # it is mounted anew
    KV_DISK_SLOW = "KV disk slow"  # each file takes up to seconds
    KV_BITS = "KV bits flipped"  # in files of blocks
    KV_CUT = "KV files cut"  # to any length, as a half-written one has
    KV_REMOVED = "KV files removed"


LIMIT_KINDS = (Kind.DISK_FULL, Kind.OUT_OF_MEMORY)
NETWORK_KINDS = (Kind.UNPLUGGED, Kind.PARTITION, Kind.ONE_WAY)
"""Between hosts: each process has a network namespace of its own."""
DISK_KINDS = (
    Kind.KV_DISK_FULL,
    Kind.KV_DISK_READ_ONLY,
    Kind.KV_DISK_SLOW,
    Kind.KV_BITS,
    Kind.KV_CUT,
    Kind.KV_REMOVED,
)
"""What happens to the disk of a worker's tier."""
TIER_KINDS = (Kind.KILL, Kind.STOP, Kind.RESTART, Kind.RESET, Kind.BLACK_HOLE, Kind.DROP, Kind.SLOW, *DISK_KINDS)
"""What workers with tiers are struck with, at TIER_STATES."""
_NOT_BASE = (*LIMIT_KINDS, *NETWORK_KINDS, *DISK_KINDS, Kind.RANK_KILL, Kind.LOG_STANDS)
BASE_KINDS = tuple(kind for kind in Kind if kind not in _NOT_BASE)
ROUTER_KINDS = (Kind.KILL, Kind.STOP, Kind.RESTART, Kind.SLOW_PROCESS, Kind.CLOCK, Kind.LOG_STANDS, *LIMIT_KINDS, *NETWORK_KINDS)
"""What routers are struck with; workers with every kind."""


class LinkName(StrEnum):
    """Which of a worker's addresses is behind a faulty link."""

    CONTROL = "control"  # router to worker, gRPC
    TRANSFER = "transfer"  # prefill to decode, KV over tcp


@dataclass(frozen=True)
class PlannedFault:
    """One fault. `role`: whom it strikes, by chance among those of the role (`pick` in [0, 1) decides). `hold_s`: seconds from
    the blow until it is mended. `amount`: seconds of a clock's jump, bytes per second of a slow link, or seconds that a slow disk
    takes for a file."""

    number: int
    kind: Kind
    state: str
    role: str
    pick: float
    hold_s: float
    link: LinkName
    amount: float

    @property
    def at_state(self) -> bool:
        """Does a failpoint say when it is dealt?"""
        return self.state not in MOMENTS


_HOLDS_S: dict[Kind, tuple[float, ...]] = {
    # Around the silence of 1 s after which a stream counts as broken, the grace of 2 s and the lease of 5 s.
    Kind.STOP: (0.1, 0.3, 0.3, 0.7, 1.2, 1.2, 2.2, 3.2, 5.5),
    Kind.BLACK_HOLE: (0.1, 0.3, 0.3, 0.7, 1.2, 1.2, 2.2, 3.2),
    Kind.DROP: (0.1,),
    Kind.SLOW: (0.5, 1.0, 1.5),
    Kind.LOSSY: (0.5, 1.0, 3.0),
    Kind.SLOW_PROCESS: (0.5, 1.5, 4.0),
    Kind.SHM_FULL: (3.0,),  # at most: it ends when it was felt
    Kind.REDIS_STOP: (0.2, 1.2, 2.0, 4.0),  # a registration lapses after 3 s
    Kind.REDIS_EMPTY: (0.2,),
    Kind.REDIS_RESTART: (0.1, 0.5, 1.5, 3.5),
    Kind.CLOCK: (0.3, 0.6, 1.2),
    Kind.DISK_FULL: (0.5, 1.5),
    Kind.LOG_STANDS: (0.5, 1.5, 4.0),
    Kind.OUT_OF_MEMORY: (1.5,),  # at most: it ends when the kernel has struck
    Kind.RANK_KILL: (0.1, 0.5),
    Kind.UNPLUGGED: (0.1, 0.3, 0.7, 1.2, 2.2, 3.2, 5.5),
    Kind.PARTITION: (0.3, 0.7, 1.2, 2.2, 3.2, 5.5),
    Kind.ONE_WAY: (0.3, 0.7, 1.2, 2.2, 3.2, 5.5),
    Kind.KV_DISK_FULL: (0.3, 1.0, 2.0),
    Kind.KV_DISK_READ_ONLY: (0.3, 1.0, 2.0),
    Kind.KV_DISK_SLOW: (0.5, 1.5, 3.0),
    Kind.KV_BITS: (0.1, 0.5),
    Kind.KV_CUT: (0.1, 0.5),
    Kind.KV_REMOVED: (0.1, 0.5),
}
_JUMPS_S = (-30 * 86_400.0, -3600.0, -5.0, -1.0, 1.0, 5.0, 3600.0, 30 * 86_400.0)
_BYTES_PER_S = (32e3, 128e3, 512e3)
_AMOUNTS: dict[Kind, tuple[float, ...]] = {Kind.CLOCK: _JUMPS_S, Kind.KV_DISK_SLOW: (0.01, 0.1, 0.7)}


def role_of(state: str) -> str | None:
    """Who passes through `state`; None: any worker, at any moment."""
    if state in ROUTER_STATES:
        return "router"
    if state in PREFILL_STATES:
        return "prefill"
    return "decode" if state in DECODE_STATES else None


def states_of(kind: Kind) -> tuple[str, ...]:
    """Return the states at which a kind is dealt."""
    if kind is Kind.RANK_KILL:
        return (ANY_MOMENT,)
    if kind in NETWORK_KINDS:
        return MOMENTS
    return (*STATES, *(ROUTER_STATES if kind in ROUTER_KINDS else ()))


def cells(kinds: Sequence[Kind], states: Sequence[str] = ()) -> list[tuple[Kind, str]]:
    """What there is to deal: kinds at `states`, or each kind at its own."""
    if states:
        return [(kind, state) for kind in kinds for state in states]
    of_workers = [(kind, state) for kind in kinds for state in states_of(kind) if state not in ROUTER_STATES]
    return of_workers + [(kind, state) for kind in kinds for state in states_of(kind) if state in ROUTER_STATES]


def make_plan(seed: int, num_faults: int, kinds: Sequence[Kind] = BASE_KINDS, states: Sequence[str] = ()) -> list[PlannedFault]:
    """`num_faults` faults, numbered from 0; the same arguments give the same list. `states`: as in `cells`."""
    rng = random.Random(seed)
    all_cells = cells(kinds, states)
    faults: list[PlannedFault] = []
    while len(faults) < num_faults and all_cells:
        for kind, state in rng.sample(all_cells, len(all_cells)):
            faults.append(_fault(rng, len(faults), kind, state))
    return faults[:num_faults]


def _fault(rng: random.Random, number: int, kind: Kind, state: str) -> PlannedFault:
    return PlannedFault(
        number=number,
        kind=kind,
        state=state,
        role=role_of(state) or rng.choice(WORKERS),
        pick=rng.random(),
        hold_s=rng.choice(_HOLDS_S.get(kind, (0.0,))),
        link=rng.choice(tuple(LinkName)),
        amount=rng.choice(_AMOUNTS.get(kind, _BYTES_PER_S)),
    )
