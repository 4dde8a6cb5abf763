"""What admission knows of a request, the ticket that it gets, and how it is told no."""

import enum
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol

from router.tokenization.prepared_request import PreparedRequest

# What the policy expects for a request, as admission asks for it: the mesh's answer to "would it meet its objective?".


@dataclass(frozen=True)
class Forecast:
    """`ttft_s` from the moment at which it is placed, `tpot_s` of its own tokens: of the best placement there is.

    `has_room`: some worker could hold it now. `ahead_s`: the part of `ttft_s` that other requests' prompts take.
    `idle_tpot_s`: what the fastest worker would give it with nothing else to do; None: it was not looked at, or is not known."""

    ttft_s: float
    tpot_s: float
    has_room: bool
    ahead_s: float = 0.0
    idle_tpot_s: float | None = None


class Forecaster(Protocol):
    """Looks at the fleet as it is now."""

    def forecast(self, prepared: PreparedRequest) -> Forecast | None:
        """None while nothing is known: no worker, or none that says how fast it is."""


INTERACTIVE, STANDARD, BATCH = RANKS = (1, 2, 3)
"""Who comes first; numbered as the priorities of common.proto."""


def nothing_known() -> Forecast | None:
    """The forecast of a mesh that says nothing."""
    return None


@dataclass(frozen=True, eq=False)
class FlowItem:
    """One request at the gate.

    `priority` is that of common.proto. `started`: a stream that was lost elsewhere, of which the client has tokens. `lane`:
    requests of different lanes run on different workers, and do not wait for each other. `ttft_s` and `tpot_s` are its
    objectives, `guard_ttft_s` and `guard_tpot_s` those of others that it must not spoil (batch); None: there is none. `deadline`
    is on the clock that admission is given. `num_bytes` is what it holds while it waits. `foresee` looks at the mesh as it is.
    """

    tenant: str = ""
    priority: int = STANDARD
    started: bool = False
    prompt_tokens: int = 1
    output_tokens: int = 0
    num_bytes: int = 0
    lane: Hashable = ""
    ttft_s: float | None = None
    tpot_s: float | None = None
    guard_ttft_s: float | None = None
    guard_tpot_s: float | None = None
    deadline: float | None = None
    foresee: Callable[[], Forecast | None] = nothing_known

    @property
    def rank(self) -> int:
        """Its priority. A stream that was lost elsewhere has no other: anybody can claim to continue."""
        return self.priority

    @property
    def cost(self) -> float:
        """Tokens that it is expected to take: prompt and output."""
        return float(self.prompt_tokens + self.output_tokens)


class TicketState(enum.Enum):
    """WAITING in the queue, ADMITTED (holds a place), REFUSED while it waited, or RELEASED. The last two hold nothing."""

    WAITING = "waiting"
    ADMITTED = "admitted"
    REFUSED = "refused"
    RELEASED = "released"


@dataclass(frozen=True)
class Refusal:
    """`reason` is a word for programs (`queue_full`, `share`, `priority`, `rate`, `objective`, `deadline`), `message` is for
    people; `retry_delay_s` is when a try is likely to succeed."""

    reason: str
    message: str
    retry_delay_s: float


@dataclass(eq=False)
class Ticket:
    """A request's place or its turn in the queue. `number` counts arrivals; `refusal`: why it was refused while it waited."""

    item: FlowItem
    number: int
    arrived: float
    state: TicketState = TicketState.WAITING
    refusal: Refusal | None = None
    expected_s: float | None = None  # until its first token, as was thought when it came
    charged: float = field(default=0.0, repr=False)  # tokens taken from the tenant's bucket
