"""Admission under overload, simulated: a mesh that computes prompts one after another, arrivals as a Poisson process."""

import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from router.flow_control.capacity import AdmissionSettings
from router.flow_control.controller import Admission
from router.flow_control.slo_admission import MAX_RETRY_DELAY_S, FlowItem, Forecast, Refusal, Ticket, TicketState

PROMPT_S, OUTPUT_S, OBJECTIVE_S, SECONDS = 0.1, 2.0, 0.5, 60.0
CAPACITY = SECONDS / PROMPT_S


@dataclass
class World:
    """Prompts take 0.05 to 0.15 s, what the forecast takes for 0.1; `load` by tenant is in units of the capacity."""

    load: dict[str, float]
    objective_s: float | None = OBJECTIVE_S
    admission: Admission = field(default_factory=lambda: Admission(AdmissionSettings()))
    asked: Counter[str] = field(default_factory=Counter)
    admitted: Counter[str] = field(default_factory=Counter)
    good: Counter[str] = field(default_factory=Counter)
    most_queued: int = 0
    now: float = 0.0
    free_at: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(1)
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, str | Ticket | None]] = []

    def run(self) -> None:
        for tenant, load in self.load.items():
            at = 0.0
            while (at := at + self._random.expovariate(load / PROMPT_S)) < SECONDS:
                self._add(at, tenant)
        for look in range(int(SECONDS / 0.02)):
            self._add(0.02 * look, None)
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            self._handle(event)
            self.most_queued = max(self.most_queued, self.admission.num_queued)

    def _add(self, at: float, event: str | Ticket | None) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), event))

    def _handle(self, event: str | Ticket | None) -> None:
        if isinstance(event, str):
            self._ask(event)
        elif event is None:
            self._start(self.admission.look(self.now))
        else:
            self._start(self.admission.release(event, self.now))

    def _ask(self, tenant: str) -> None:
        self.asked[tenant] += 1
        answer = self.admission.ask(
            FlowItem(tenant=tenant, ttft_s=self.objective_s, prompt_tokens=100, foresee=self._forecast), self.now
        )
        if isinstance(answer, Refusal):
            assert answer.retry_delay_s is not None and 0 < answer.retry_delay_s <= MAX_RETRY_DELAY_S
        self._start(self.admission.decided())
        if isinstance(answer, Ticket):
            self._start([answer])

    def _forecast(self) -> Forecast:
        ahead_s = max(0.0, self.free_at - self.now)
        return Forecast(ahead_s + PROMPT_S, 0.02, has_room=True, ahead_s=ahead_s)

    def _start(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            if ticket.state is TicketState.ADMITTED:
                self.free_at = max(self.free_at, self.now) + self._random.uniform(0.5, 1.5) * PROMPT_S
                self.admitted[ticket.item.tenant] += 1
                self.good[ticket.item.tenant] += self.free_at - ticket.arrived <= OBJECTIVE_S
                self._add(self.free_at + OUTPUT_S, ticket)
                self._start(self.admission.placed(ticket, self.now))


def test_three_times_the_capacity_costs_no_goodput_and_what_is_let_in_is_in_time() -> None:
    world = World({"a": 3.0})
    world.run()
    assert world.good.total() >= 0.95 * CAPACITY
    assert world.good.total() >= 0.97 * world.admitted.total()
    assert world.most_queued <= 16 and world.admission.num_inflight == 0


@pytest.mark.parametrize("load", [0.3, 0.5, 0.7, 0.9])
def test_below_the_capacity_no_fewer_are_in_time_than_if_everybody_were_let_in(load: float) -> None:
    judged, unjudged = World({"a": load}), World({"a": load}, objective_s=None)
    judged.run()
    unjudged.run()
    assert judged.good.total() >= unjudged.good.total() and judged.good.total() >= 0.98 * judged.admitted.total()


def test_a_flooding_tenant_leaves_another_its_share() -> None:
    world = World({"flood": 2.7, "calm": 0.3})
    world.run()
    # Bursts go beyond the share, and are refused: half of the mesh computes 2.5 prompts in the time of an objective.
    assert world.good["calm"] >= 0.75 * world.asked["calm"]
    world = World({"flood": 2.0, "other": 1.0})
    world.run()
    assert world.good["other"] >= 0.4 * CAPACITY and world.good.total() >= 0.95 * CAPACITY
