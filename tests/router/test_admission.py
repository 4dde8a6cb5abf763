"""Admission by count, rank and share: bounds, order, eviction, and that places and tokens are given back exactly once."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.flow_control.capacity import OTHERS, AdmissionSettings, SameForAll, TenantLimits
from router.flow_control.controller import Admission
from router.flow_control.slo_admission import BATCH, INTERACTIVE, STANDARD, FlowItem, Forecast, Refusal, Ticket, TicketState

WEIGHTS = {"a": 1.0, "b": 1.0, "c": 3.0}


class Book:
    """Limits by name; without a limit for the others."""

    def __init__(self, limits: dict[str, TenantLimits]) -> None:
        self.limits = limits

    def limits_of(self, tenant: str) -> TenantLimits:
        return self.limits.get(tenant, TenantLimits())


WEIGHTED = Book({tenant: TenantLimits(weight=weight) for tenant, weight in WEIGHTS.items()})


def admission_of(max_inflight: int, max_queued: int, **more: int) -> Admission:
    return Admission(AdmissionSettings(max_inflight, max_queued, **more), WEIGHTED)


def ask(admission: Admission, priority: int = STANDARD, now: float = 0.0, **fields: object) -> Ticket:
    ticket = admission.ask(replace(FlowItem(priority=priority), **fields), now)  # type: ignore[arg-type]
    assert isinstance(ticket, Ticket)
    return ticket


def refusal(admission: Admission, priority: int = STANDARD, now: float = 0.0, **fields: object) -> Refusal:
    answer = admission.ask(replace(FlowItem(priority=priority), **fields), now)  # type: ignore[arg-type]
    assert isinstance(answer, Refusal)
    return answer


def order_of(admission: Admission, holder: Ticket, waiting: list[Ticket], now: float = 0.0) -> list[int]:
    """The order in which those who wait get the one place."""
    order = []
    for _ in waiting:
        (holder,) = admission.release(holder, now)
        order.append(waiting.index(holder))
    return order


def test_places_then_queue_then_refusal() -> None:
    admission = admission_of(2, 1)
    states = [ask(admission, INTERACTIVE).state for _ in range(3)]
    assert states == [TicketState.ADMITTED, TicketState.ADMITTED, TicketState.WAITING]
    refused = refusal(admission, INTERACTIVE)
    assert refused.reason == "queue_full" and refused.retry_delay_s
    assert "max_inflight 2" in refused.message and "max_queued 1" in refused.message


def test_priority_goes_first_then_arrival() -> None:
    admission = admission_of(1, 4)
    holder = ask(admission)
    waiting = [ask(admission, priority) for priority in (3, 2, 2, 1)]
    assert order_of(admission, holder, waiting) == [3, 1, 2, 0]


def test_a_lost_stream_keeps_its_priority() -> None:
    admission = admission_of(1, 4)
    holder = ask(admission)
    waiting = [ask(admission, STANDARD), ask(admission, INTERACTIVE), ask(admission, BATCH, started=True)]
    assert order_of(admission, holder, waiting) == [1, 0, 2]


def test_standard_is_not_starved_by_interactive() -> None:
    admission = admission_of(1, 40)
    holder = ask(admission)
    waiting = [ask(admission, STANDARD) for _ in range(2)] + [ask(admission, INTERACTIVE) for _ in range(8)]
    assert order_of(admission, holder, waiting, now=10.0) == [2, 3, 4, 0, 5, 6, 7, 1, 8, 9]


def test_without_aging_interactive_goes_first_for_ever() -> None:
    admission = Admission(AdmissionSettings(1, 40, aging_s=0))
    holder = ask(admission)
    waiting = [ask(admission, STANDARD)] + [ask(admission, INTERACTIVE) for _ in range(8)]
    assert order_of(admission, holder, waiting, now=1e3)[-1] == 0


def test_release_is_idempotent() -> None:
    admission = admission_of(1, 2)
    first, second, third = (ask(admission) for _ in range(3))
    assert admission.release(first, 0.0) == [second]
    assert admission.release(first, 0.0) == []
    assert admission.release(third, 0.0) == []
    assert (admission.num_inflight, admission.num_queued) == (1, 0)
    assert admission.release(second, 0.0) == []
    assert admission.num_inflight == 0


def test_bytes_are_bounded() -> None:
    admission = admission_of(1, 100, max_queued_bytes=1000)
    ask(admission)
    ask(admission, INTERACTIVE, num_bytes=600)
    assert refusal(admission, INTERACTIVE, num_bytes=600).reason == "queue_full"
    assert ask(admission, INTERACTIVE, num_bytes=400).state is TicketState.WAITING
    assert "max_queued_bytes 1000" in refusal(admission, INTERACTIVE, num_bytes=1).message


def test_lower_ranks_leave_a_share_of_the_queue() -> None:
    admission = admission_of(1, 16)
    ask(admission)
    tenants = [f"t{number}" for number in range(16)]
    batch = [admission.ask(FlowItem(priority=BATCH, tenant=tenant), 0.0) for tenant in tenants]
    assert sum(isinstance(answer, Ticket) for answer in batch) == 12
    standard = [admission.ask(FlowItem(tenant=tenant), 0.0) for tenant in tenants]
    assert sum(isinstance(answer, Ticket) for answer in standard) == 14  # two places and all of batch's


def test_a_full_queue_pushes_batch_out_and_says_so() -> None:
    admission = admission_of(1, 4)
    ask(admission)
    batch = [ask(admission, BATCH, tenant="b") for _ in range(3)]
    ask(admission)
    ask(admission, INTERACTIVE)
    assert admission.decided() == [batch[2]]  # the newest
    assert batch[2].state is TicketState.REFUSED and batch[2].refusal is not None
    assert batch[2].refusal.reason == "priority" and batch[2].refusal.retry_delay_s
    assert admission.release(batch[2], 0.0) == [] and admission.num_queued == 4


def test_a_tenant_that_fills_the_queue_makes_way_for_another() -> None:
    admission = admission_of(1, 8)
    ask(admission)
    flood = [ask(admission, tenant="a") for _ in range(7)]
    others = [ask(admission, tenant="b") for _ in range(3)]
    assert [ticket.state for ticket in others] == [TicketState.WAITING] * 3
    pushed = admission.decided()
    assert pushed == flood[:3:-1]
    assert {ticket.refusal.reason for ticket in pushed if ticket.refusal} == {"share"}
    assert refusal(admission, tenant="a").reason == "queue_full"


def test_a_tenants_own_bound_holds_only_itself() -> None:
    admission = Admission(AdmissionSettings(10, 10), Book({"a": TenantLimits(max_inflight=1)}))
    first, second = ask(admission, tenant="a"), ask(admission, tenant="a")
    assert second.state is TicketState.WAITING
    assert admission.look(0.0) == []
    assert ask(admission, tenant="b").state is TicketState.ADMITTED  # passes whoever waits for itself
    assert admission.release(first, 0.0) == [second]


def test_over_its_rate_a_tenant_is_told_rate_and_delay() -> None:
    admission = Admission(AdmissionSettings(), SameForAll(TenantLimits(tokens_per_s=100, burst_tokens=100)))
    first = ask(admission, prompt_tokens=60, output_tokens=40)
    refused = refusal(admission, prompt_tokens=60, output_tokens=40)
    assert refused.reason == "rate" and refused.retry_delay_s == pytest.approx(1.0)
    assert "100 tokens/s" in refused.message
    admission.release(first, 0.0, used_tokens=20)
    assert refusal(admission, prompt_tokens=60, output_tokens=40).retry_delay_s == pytest.approx(0.2)
    assert ask(admission, prompt_tokens=60, output_tokens=20).state is TicketState.ADMITTED


def test_who_never_ran_pays_nothing() -> None:
    admission = Admission(AdmissionSettings(1, 1), SameForAll(TenantLimits(tokens_per_s=1, burst_tokens=100)))
    ask(admission, prompt_tokens=40)
    waiting = ask(admission, prompt_tokens=60)
    assert refusal(admission, prompt_tokens=1).reason == "rate"
    admission.release(waiting, 0.0)
    assert ask(admission, prompt_tokens=60).state is TicketState.WAITING


def test_counts_by_tenant_and_priority_and_reason() -> None:
    admission = admission_of(1, 1)
    first = ask(admission, INTERACTIVE, tenant="a")
    ask(admission, INTERACTIVE, tenant="b")
    refusal(admission, INTERACTIVE, tenant="b")
    tallies = admission.limiter.counts.tallies
    assert (tallies["a", 1].num_inflight, tallies["a", 1].num_admitted) == (1, 1)
    assert (tallies["b", 1].num_queued, dict(tallies["b", 1].refused)) == (1, {"queue_full": 1})
    admission.release(first, 0.0)
    assert (tallies["a", 1].num_inflight, tallies["b", 1].num_inflight, tallies["b", 1].num_queued) == (0, 1, 0)


def test_counts_are_bounded_and_their_sum_is_kept() -> None:
    admission = admission_of(1000, 0)
    for number in range(500):
        ticket = ask(admission, tenant=f"t{number}")
        if number % 3:
            admission.release(ticket, 0.0)
    tallies = admission.limiter.counts.tallies
    assert len({tenant for tenant, _ in tallies}) <= 65 and (OTHERS, STANDARD) in tallies
    assert sum(tally.num_admitted for tally in tallies.values()) == 500
    assert sum(tally.num_inflight for tally in tallies.values()) == admission.num_inflight == 167


def served_tokens(admission: Admission, costs: dict[str, int], num_served: int) -> dict[str, float]:
    """Every tenant has a backlog all the time; one place. Tokens that each was given."""
    served = dict.fromkeys(costs, 0.0)
    holder = ask(admission, tenant="nobody")
    for tenant, cost in costs.items():
        for _ in range(3):
            ask(admission, tenant=tenant, prompt_tokens=cost)
    for _ in range(num_served):
        (holder,) = admission.release(holder, 0.0)
        tenant = holder.item.tenant
        served[tenant] += holder.item.cost
        ask(admission, tenant=tenant, prompt_tokens=costs[tenant])
    return served


def test_backlogged_tenants_get_their_weighted_shares_of_tokens() -> None:
    costs = {"a": 10, "b": 300, "c": 70}
    served = served_tokens(admission_of(1, 100), costs, 2000)
    normalized = [served[tenant] / WEIGHTS[tenant] for tenant in costs]
    # Start-time fair queueing: two backlogged flows differ by at most one request of each, divided by its weight.
    assert max(normalized) - min(normalized) <= 300 + 10 + 70 / 3


def test_a_pause_earns_nothing() -> None:
    admission = admission_of(1, 100)
    holder = ask(admission, tenant="a", prompt_tokens=10)
    waiting = [ask(admission, tenant="a", prompt_tokens=10) for _ in range(20)]
    for _ in range(10):
        (holder,) = admission.release(holder, 0.0)
    late = [ask(admission, tenant="b", prompt_tokens=10) for _ in range(10)]
    order = order_of(admission, holder, waiting[10:] + late)
    assert max(index for index in range(20) if order[index] < 10) >= 17  # they alternate from now on


def test_lanes_do_not_wait_for_each_other() -> None:
    admission = admission_of(10, 10)
    busy = lambda: Forecast(1.0, 0.01, has_room=False)  # noqa: E731
    assert ask(admission, lane="x", foresee=busy).state is TicketState.ADMITTED
    assert ask(admission, lane="x", foresee=busy).state is TicketState.WAITING
    assert ask(admission, lane="y").state is TicketState.ADMITTED


def long_behind_others(admission: Admission) -> Ticket:
    """A long prompt for which the mesh is saturated."""
    saturated = lambda: Forecast(9.0, 0.01, has_room=True, ahead_s=8.0)  # noqa: E731
    assert ask(admission).state is TicketState.ADMITTED
    first = ask(admission, prompt_tokens=1000, foresee=saturated)
    assert first.state is TicketState.WAITING
    return first


def free() -> Forecast:
    return Forecast(0.05, 0.01, has_room=True)


def test_much_shorter_prompts_overtake_one_for_which_the_mesh_is_saturated_by_as_many_tokens_as_it_has() -> None:
    admission = admission_of(20, 20)
    first = long_behind_others(admission)
    states = [ask(admission, prompt_tokens=300, foresee=free).state for _ in range(4)]
    assert states == [TicketState.ADMITTED] * 3 + [TicketState.WAITING]
    assert first.overtaken_tokens == 900
    assert ask(admission, prompt_tokens=100, foresee=free).state is TicketState.ADMITTED
    assert ask(admission, prompt_tokens=1, foresee=free).state is TicketState.WAITING


def test_a_prompt_that_is_not_much_shorter_or_of_lower_rank_does_not_overtake() -> None:
    admission = admission_of(20, 20)
    first = long_behind_others(admission)
    assert ask(admission, prompt_tokens=501, foresee=free).state is TicketState.WAITING
    assert ask(admission, BATCH, prompt_tokens=5, foresee=free).state is TicketState.WAITING
    assert first.overtaken_tokens == 0


def test_one_that_waits_overtakes_when_the_mesh_can_take_it() -> None:
    admission, can_take = admission_of(20, 20), [False]
    first = long_behind_others(admission)
    short = ask(admission, prompt_tokens=5, foresee=lambda: free() if can_take[0] else Forecast(9.0, 0.01, has_room=False))
    assert short.state is TicketState.WAITING
    can_take[0] = True
    assert admission.look(0.1) == [short]
    assert (short.state, first.state, first.overtaken_tokens) == (TicketState.ADMITTED, TicketState.WAITING, 5)


def test_a_tenant_at_its_limit_does_not_overtake() -> None:
    admission = Admission(AdmissionSettings(20, 20), Book({"a": TenantLimits(max_inflight=1)}))
    long_behind_others(admission)
    assert ask(admission, prompt_tokens=5, tenant="a", foresee=free).state is TicketState.ADMITTED
    assert ask(admission, prompt_tokens=5, tenant="a", foresee=free).state is TicketState.WAITING


class AnyOrder(RuleBasedStateMachine):
    """Whatever comes: bounds hold, nobody is lost, nobody waits beside a free place, tokens are conserved."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(AdmissionSettings(3, 6, max_queued_bytes=60), SameForAll(TenantLimits(tokens_per_s=50)))
        self.tickets: list[Ticket] = []
        self.used: dict[int, int] = {}
        self.num_refused = 0
        self.num_asked = 0
        self.now = 0.0

    @rule(
        tenant=st.sampled_from("abc"),
        priority=st.integers(1, 3),
        size=st.integers(1, 20),
        started=st.booleans(),
        hint=st.sampled_from((0, 0, 0, -5, 1, 7)),
    )
    def ask(self, tenant: str, priority: int, size: int, started: bool, hint: int) -> None:
        self.num_asked += 1
        item = FlowItem(tenant=tenant, priority=priority, started=started, prompt_tokens=size, num_bytes=size, hint=hint)
        answer = self.admission.ask(item, self.now)
        if isinstance(answer, Refusal):
            self.num_refused += 1
            assert answer.retry_delay_s is not None and answer.retry_delay_s > 0
        else:
            self.tickets.append(answer)
        self.check_decided(self.admission.decided())

    @precondition(lambda self: self.tickets)
    @rule(number=st.integers(0, 100), used=st.one_of(st.none(), st.integers(0, 40)))
    def release(self, number: int, used: int | None) -> None:
        ticket = self.tickets[number % len(self.tickets)]
        if ticket.state is TicketState.ADMITTED:
            self.used[ticket.number] = int(ticket.item.cost) if used is None else used
        self.check_decided(self.admission.release(ticket, self.now, used))

    @rule(seconds=st.floats(0, 1))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.check_decided(self.admission.look(self.now))

    def check_decided(self, decided: Iterable[Ticket]) -> None:
        for ticket in decided:
            assert (ticket.state is TicketState.REFUSED) == (ticket.refusal is not None)
            assert ticket.state in (TicketState.ADMITTED, TicketState.REFUSED)

    def in_state(self, state: TicketState) -> list[Ticket]:
        return [ticket for ticket in self.tickets if ticket.state is state]

    @invariant()
    def bounds(self) -> None:
        waiting = self.in_state(TicketState.WAITING)
        assert self.admission.num_inflight == len(self.in_state(TicketState.ADMITTED)) <= 3
        assert self.admission.num_queued == len(waiting) <= 6
        assert self.admission.num_queued_bytes == sum(ticket.item.num_bytes for ticket in waiting) <= 60
        assert not waiting or self.admission.num_inflight == 3

    @invariant()
    def everybody_is_counted(self) -> None:
        tallies = self.admission.limiter.counts.tallies.values()
        assert sum(tally.num_inflight for tally in tallies) == self.admission.num_inflight
        assert sum(tally.num_queued for tally in tallies) == self.admission.num_queued
        assert self.num_asked == len(self.tickets) + self.num_refused

    @invariant()
    def tokens_are_conserved(self) -> None:
        holding = self.in_state(TicketState.WAITING) + self.in_state(TicketState.ADMITTED)
        expected = sum(ticket.item.cost for ticket in holding) + sum(self.used.values())
        assert sum(self.admission.limiter.rates.spent.values()) == pytest.approx(expected)

    def teardown(self) -> None:
        for ticket in self.tickets:
            self.admission.release(ticket, self.now)
        assert (self.admission.num_inflight, self.admission.num_queued, self.admission.num_queued_bytes) == (0, 0, 0)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_who_has_waited_is_refused_when_hopeless_and_then_fewer_are_made_to_wait() -> None:
    """An objective of 4 s. Forecasts were of 2.5 s, and become 5 s, then 7 s."""
    admission = admission_of(8, 8)
    ask(admission)
    ttft_s = 2.5
    asked: dict[str, Any] = {"ttft_s": 4.0, "foresee": lambda: Forecast(ttft_s, 0.01, has_room=False)}
    late, later = ask(admission, **asked), ask(admission, **asked)
    ttft_s = 5.0
    assert admission.look(0.5) == [] and late.state is TicketState.WAITING, "5.5 s of 4: forecasts are no better"
    ttft_s = 7.0
    refused = admission.look(1.0)
    assert refused == [late, later] and all(each.refusal and each.refusal.reason == "objective" for each in refused)
    ttft_s = 3.5
    assert "predicted after 3500 ms" in refusal(admission, now=1.0, **asked).message, "it would have waited before"
    assert ask(admission_of(8, 8), **asked).state is TicketState.ADMITTED
