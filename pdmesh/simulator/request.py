"""Holds a request of the simulated mesh, and its placements on workers."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from pdmesh.simulator.arrivals import Arrival
from pdmesh.simulator.workers.kv_room import Sequence
from pdmesh.simulator.workers.kv_sources import NOTHING, Brought
from router.fleet.worker import Dispatched
from router.flow_control.slo_admission import Ticket
from router.routing.cost_model import Prediction
from router.routing.filters import Placement
from router.routing.worker_snapshot import WorkerKey


class End(enum.Enum):
    """Name how a request ends, each exactly once. LOST: its workers were lost too often, or the simulation ended before it
    did."""

    COMPLETED = "completed"
    REFUSED = "refused"
    LOST = "lost"


class Trail(NamedTuple):
    """Record where the time of a request went, in its last placement: `decided_at` placed, `placed_at` reserved there,
    `computed_at` the prompt done after steps of `compute_s` in all, `after_s` later the KV was on the decode worker."""

    decided_at: float
    placed_at: float
    computed_at: float
    compute_s: float
    after_s: float


@dataclass(eq=False, slots=True)
class Request:
    """Hold a request. `num_input` and `num_output` are the arrival's, cut to what workers can hold. Times are simulated seconds;
    goals are seconds, None without one. `num_emitted` tokens came from placements that were lost. `num_cached` were not
    computed, of which `num_fetched` and `num_restored` came for it."""

    number: int
    arrival: Arrival
    num_input: int
    num_output: int
    ttft_goal_s: float | None = None
    tpot_goal_s: float | None = None
    ticket: Ticket | None = None
    first_at: float | None = None
    last_at: float | None = None
    num_emitted: int = 0
    num_resubmissions: int = 0
    is_local: bool = True
    reason: str = ""
    waits_since: float | None = None
    trail: Trail | None = None
    decided_at: float | None = None
    prediction: Prediction | None = None
    num_cached: int = 0
    num_fetched: int = 0
    num_restored: int = 0

    @property
    def num_tokens(self) -> int:
        """Return the tokens to compute before the next one is drawn."""
        return self.num_input + self.num_emitted

    @property
    def ttft_s(self) -> float | None:
        """Return the time from its arrival to its first token."""
        return None if self.first_at is None else self.first_at - self.arrival.at_s

    @property
    def tpot_s(self) -> float | None:
        """Return the mean time of the tokens after the first; None without any."""
        if self.first_at is None or self.last_at is None or self.num_output < 2:
            return None
        return (self.last_at - self.first_at) / (self.num_output - 1)


@dataclass(eq=False, slots=True)
class Stay:
    """Hold one placement of a request: its decode worker, its prefill worker (None: the decode worker), and what was sent to
    each.

    `refused`: workers that had no room before. `owned` is its reservation on the decode worker, `prompt` what the prefill worker
    computes. `tried`: prefill workers that failed. `entered_at`: when the prompt entered the engine that computes it; `after_s`:
    from the first token until the decode worker continues; `brought`: what came for its prompt before, in `brought_s`."""

    request: Request
    placement: Placement
    decode: str
    sent: Dispatched
    decided_at: float
    refused: frozenset[WorkerKey] = frozenset()
    prefill: str | None = None
    sent_prompt: Dispatched | None = None
    owned: Sequence | None = None
    prompt: Sequence | None = None
    tried: frozenset[WorkerKey] = frozenset()
    entered_at: float = 0.0
    placed_at: float = 0.0
    computed_at: float = 0.0
    compute_s: float = 0.0
    after_s: float = 0.0
    has_first: bool = False
    is_running: bool = False
    is_over: bool = False
    brought: Brought = NOTHING
    brought_s: float = 0.0
