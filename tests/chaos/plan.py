"""What is to be struck, at which state and for how long: a seeded list of faults that meets quotas. Pure.

A cell is a kind at a state. The list goes over all cells again and again, each time in another order, so that every part of it
has about equally many of each: what is cut short is balanced all the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

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
STATES = (ANY_MOMENT, *PREFILL_STATES, *DECODE_STATES)
ROLES = ("prefill", "decode")


class Kind(StrEnum):
    """What goes wrong."""

    KILL = "kill"  # SIGKILL, then a new process
    STOP = "stop"  # SIGSTOP, later SIGCONT
    RESTART = "restart"  # SIGTERM, then a new process: what a rollout does to each worker
    RESET = "reset"  # connections end at both ends at once
    BLACK_HOLE = "black hole"  # nothing passes a link, and nobody is told
    SLOW = "slow link"  # delay and few bytes per second
    SHM_FULL = "shm full"  # no memory for mapping a peer's pool
    REDIS_STOP = "redis stopped"
    REDIS_EMPTY = "redis emptied"
    REDIS_RESTART = "redis restarted"  # killed, some time later started again: empty as well
    CLOCK = "clock jump"  # of one process, and back


class LinkName(StrEnum):
    """Which of a worker's addresses is behind a faulty link."""

    CONTROL = "control"  # router to worker, gRPC
    TRANSFER = "transfer"  # prefill to decode, KV over tcp


@dataclass(frozen=True)
class PlannedFault:
    """One fault. `role`: whom it strikes, by chance among those of the role (`pick` in [0, 1) decides). `hold_s`: seconds from
    the blow until it is mended. `amount`: seconds of a clock's jump, or bytes per second of a slow link."""

    number: int
    kind: Kind
    state: str
    role: str
    pick: float
    hold_s: float
    link: LinkName
    amount: float


_HOLDS_S: dict[Kind, tuple[float, ...]] = {
    # Around the silence of 1 s after which a stream counts as broken, the grace of 2 s and the lease of 5 s.
    Kind.STOP: (0.1, 0.3, 0.3, 0.7, 1.2, 1.2, 2.2, 3.2, 5.5),
    Kind.BLACK_HOLE: (0.1, 0.3, 0.3, 0.7, 1.2, 1.2, 2.2, 3.2),
    Kind.SLOW: (0.5, 1.0, 1.5),
    Kind.SHM_FULL: (3.0,),  # at most: it ends when it was felt
    Kind.REDIS_STOP: (0.2, 1.2, 2.0, 4.0),  # a registration lapses after 3 s
    Kind.REDIS_EMPTY: (0.2,),
    Kind.REDIS_RESTART: (0.1, 0.5, 1.5, 3.5),
    Kind.CLOCK: (0.3, 0.6, 1.2),
}
_JUMPS_S = (-30 * 86_400.0, -3600.0, -5.0, -1.0, 1.0, 5.0, 3600.0, 30 * 86_400.0)
_BYTES_PER_S = (32e3, 128e3, 512e3)


def role_of(state: str) -> str | None:
    """Who passes through `state`; None: anybody, at any moment."""
    if state in PREFILL_STATES:
        return "prefill"
    return "decode" if state in DECODE_STATES else None


def make_plan(seed: int, num_faults: int, kinds: Sequence[Kind] = tuple(Kind)) -> list[PlannedFault]:
    """`num_faults` faults, numbered from 0; the same arguments give the same list."""
    rng = random.Random(seed)
    cells = list(product(kinds, STATES))
    faults: list[PlannedFault] = []
    while len(faults) < num_faults and cells:
        for kind, state in rng.sample(cells, len(cells)):
            faults.append(_fault(rng, len(faults), kind, state))
    return faults[:num_faults]


def _fault(rng: random.Random, number: int, kind: Kind, state: str) -> PlannedFault:
    return PlannedFault(
        number=number,
        kind=kind,
        state=state,
        role=role_of(state) or rng.choice(ROLES),
        pick=rng.random(),
        hold_s=rng.choice(_HOLDS_S.get(kind, (0.0,))),
        link=rng.choice(tuple(LinkName)),
        amount=rng.choice(_JUMPS_S if kind is Kind.CLOCK else _BYTES_PER_S),
    )
