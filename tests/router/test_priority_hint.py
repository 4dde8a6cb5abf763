"""Hints order the waiting requests of one tenant and one rank, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router.flow_control.capacity import AdmissionSettings
from router.flow_control.controller import Admission
from router.flow_control.fairness import FairShare
from router.flow_control.slo_admission import BATCH, INTERACTIVE, STANDARD, FlowItem, Forecast, Refusal, Ticket, TicketState
from router.lifecycle.capacity_queue import CapacityQueue

HINTS = st.integers(-3, 3)
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 1.0}
COSTS = {"a": 10, "b": 25, "c": 40}


def ask(admission: Admission, hint: int = 0, **fields: object) -> Ticket:
    ticket = admission.ask(replace(FlowItem(hint=hint), **fields), 0.0)  # type: ignore[arg-type]
    assert isinstance(ticket, Ticket)
    return ticket


def served(admission: Admission, holder: Ticket) -> list[Ticket]:
    """The waiting tickets in the order in which they get the one place."""
    order: list[Ticket] = []
    while admission.num_inflight:
        order += admission.release(holder, 0.0)
        holder = order[-1] if order else holder
    return order


@given(st.lists(st.tuples(HINTS, st.sampled_from([INTERACTIVE, STANDARD, BATCH])), max_size=30))
def test_within_a_tenant_and_rank_higher_hints_go_first_and_equals_in_their_order(asked: list[tuple[int, int]]) -> None:
    admission = Admission(AdmissionSettings(1, 400))
    holder = ask(admission)
    waiting = [ask(admission, hint, priority=rank) for hint, rank in asked]
    by_turn = sorted(waiting, key=lambda ticket: (ticket.item.rank, -ticket.item.hint, ticket.number))
    assert served(admission, holder) == by_turn


def test_the_tickets_that_have_gone_are_passed_over() -> None:
    admission = Admission(AdmissionSettings(1, 400))
    holder = ask(admission)
    waiting = [ask(admission, hint) for hint in (1, 5, 5, 1, -2)]
    for gone in (1, 4):
        admission.release(waiting[gone], 0.0)
    assert served(admission, holder) == [waiting[2], waiting[0], waiting[3]]


def test_one_that_resumes_and_a_new_one_take_turns_among_equals_alone() -> None:
    admission = Admission(AdmissionSettings(1, 400))
    holder = ask(admission)
    waiting = [ask(admission, hint, started=started) for hint, started in ((0, True), (0, False), (3, False), (3, False))]
    assert served(admission, holder) == [waiting[number] for number in (2, 3, 0, 1)]


Asks = list[tuple[str, int, int]]
ASKS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([INTERACTIVE, STANDARD, BATCH]), HINTS), max_size=60)


def shares_of(asks: Asks, *, hinted: bool) -> list[tuple[str, int]]:
    """Tenant and rank of each turn, where the requests of a tenant cost the same."""
    shares = FairShare(0.01, 1.0)
    for number, (tenant, rank, hint) in enumerate(asks):
        item = FlowItem(tenant, rank, prompt_tokens=COSTS[tenant], hint=hint if hinted else 0)
        shares.push(Ticket(item, number, 0.0), WEIGHTS[tenant])
    turns = []
    while (queue := shares.first([INTERACTIVE, STANDARD, BATCH])) is not None and (ticket := queue.head()) is not None:
        turns.append((ticket.item.tenant, ticket.item.rank))
        shares.serve(ticket)
        ticket.state = TicketState.ADMITTED
    return turns


@given(ASKS)
def test_whose_turn_it_is_is_the_same_with_and_without_hints(asks: Asks) -> None:
    assert shares_of(asks, hinted=True) == shares_of(asks, hinted=False)


def losers_of(asks: Asks, *, hinted: bool) -> list[str]:
    """The outcome of each request for its tenant: how many of whose requests were refused or evicted after it."""
    admission = Admission(AdmissionSettings(1, 6))
    ask(admission, tenant="holder")
    lost = []
    for tenant, rank, hint in asks:
        answer = admission.ask(FlowItem(tenant, rank, hint=hint if hinted else 0), 0.0)
        evicted = [ticket.item.tenant for ticket in admission.decided()]
        lost.append("".join([tenant] if isinstance(answer, Refusal) else evicted))
    return lost


@given(ASKS)
def test_in_a_full_queue_the_tenants_that_lose_requests_are_the_same_with_and_without_hints(asks: Asks) -> None:
    assert losers_of(asks, hinted=True) == losers_of(asks, hinted=False)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([1, 2]), st.integers(1, 50), HINTS), min_size=1, max_size=80))
def test_a_backlog_is_shared_by_weight_whatever_the_hints(asks: list[tuple[str, int, int, int]]) -> None:
    """The bound is that of tests/router/test_shares.py: one request of each tenant."""
    shares = FairShare(0.01, 1.0)
    for number, (tenant, rank, cost, hint) in enumerate(asks):
        item = FlowItem(tenant, rank, prompt_tokens=cost, hint=hint)
        shares.push(Ticket(item, number, 0.0), {"a": 1.0, "b": 2.0}[tenant])
    given_tokens = {"a": 0.0, "b": 0.0}
    while (queue := shares.first([1, 2, 3])) is not None and (ticket := queue.head()) is not None:
        if all(any(queue.flow(tenant) for queue in shares.queues.values()) for tenant in "ab"):
            assert abs(given_tokens["a"] - given_tokens["b"] / 2) <= 50 + 25
        given_tokens[ticket.item.tenant] += ticket.item.cost
        shares.serve(ticket)
        ticket.state = TicketState.ADMITTED
    assert shares.num_waiting == 0 and sum(given_tokens.values()) == sum(cost for _, _, cost, _ in asks)


def test_a_flood_with_the_highest_hint_keeps_no_other_tenant_waiting() -> None:
    admission = Admission(AdmissionSettings(1, 400))
    holder = ask(admission, tenant="flood")
    for _ in range(100):
        ask(admission, 1000, tenant="flood", priority=INTERACTIVE)
    modest = ask(admission, -1000, tenant="modest", priority=INTERACTIVE)
    assert served(admission, holder).index(modest) <= 1


def test_a_full_queue_evicts_the_lowest_hint_of_a_tenant_and_the_newest_of_equals() -> None:
    admission = Admission(AdmissionSettings(1, 4))
    ask(admission, priority=INTERACTIVE)
    waiting = [ask(admission, hint, priority=INTERACTIVE) for hint in (2, -1, -1, 0)]
    assert isinstance(admission.ask(FlowItem("", INTERACTIVE, hint=-1), 0.0), Refusal)
    assert ask(admission, 1, priority=INTERACTIVE).state is TicketState.WAITING
    (evicted,) = admission.decided()
    assert evicted is waiting[2] and evicted.refusal is not None and evicted.refusal.reason == "priority"


def test_a_tenant_that_holds_too_much_loses_its_lowest_hint() -> None:
    admission = Admission(AdmissionSettings(1, 4))
    ask(admission, tenant="flood", priority=INTERACTIVE)
    waiting = [ask(admission, hint, tenant="flood", priority=INTERACTIVE) for hint in (0, -7, 3, 0)]
    ask(admission, -1000, tenant="calm", priority=INTERACTIVE)
    assert admission.decided() == [waiting[1]]


def test_what_is_ahead_of_a_request_are_those_with_its_hint_or_a_higher_one() -> None:
    shares = FairShare(0.01, 1.0)
    for number, (hint, tokens) in enumerate(((0, 10), (5, 100), (-3, 1000))):
        shares.push(Ticket(FlowItem("a", STANDARD, prompt_tokens=tokens, hint=hint), number, 0.0), 1.0)
    ahead = [shares.cost_ahead(FlowItem("a", STANDARD, hint=hint), 1.0) for hint in (6, 5, 0, -3)]
    assert ahead == [0, 100, 110, 1110]


def test_a_short_prompt_of_a_lower_hint_does_not_overtake_its_own_tenants() -> None:
    admission = Admission(AdmissionSettings(8, 8))
    saturated = Forecast(5.0, 0.01, has_room=True, ahead_s=4.9)
    good = Forecast(0.01, 0.01, has_room=True)
    admission.placed(ask(admission, foresee=lambda: good), 0.0)
    long = ask(admission, 2, prompt_tokens=1000, foresee=lambda: saturated)
    lower = ask(admission, 1, prompt_tokens=10, foresee=lambda: good)
    same = ask(admission, 2, prompt_tokens=10, foresee=lambda: good)
    assert [long.state, lower.state, same.state] == [TicketState.WAITING, TicketState.WAITING, TicketState.ADMITTED]


def test_those_that_found_no_room_are_in_the_same_order() -> None:
    queue = CapacityQueue()
    waiters = [queue.enter("lane", 2, tenant, hint=hint) for tenant, hint in (("a", 0), ("b", -9), ("a", 4), ("a", 0))]
    order = []
    left = list(waiters)
    while left:
        (first,) = [waiter for waiter in left if waiter.may_try.is_set()]
        order.append(waiters.index(first))
        left.remove(first)
        queue.failed("lane")
        queue.leave("lane", first)
    assert order == [2, 1, 0, 3]
