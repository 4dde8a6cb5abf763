"""What one tenant declares takes nothing from another: ranks, fake resumes, objectives that nobody can meet. Simulated."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.flow_control.capacity import AdmissionSettings
from router.flow_control.controller import Admission
from router.flow_control.fairness import BATCH_YIELDS, SAVED, FairShare
from router.flow_control.slo_admission import BATCH, INTERACTIVE, STANDARD, FlowItem, Forecast, Ticket, TicketState
from tests.router.test_admission import ask, order_of

STEP_S, SERVICE_S = 0.02, 1.0
GOOD = Forecast(0.01, 0.03, has_room=True)


@dataclass
class World:
    """Every request takes a second of its place; `offers`: who asks every so many steps. Counts who was served."""

    admission: Admission
    offers: list[tuple[int, FlowItem]]
    served: Counter[str] = field(default_factory=Counter)
    now: float = 0.0

    def run(self, seconds: float) -> "World":
        ends: list[tuple[float, Ticket]] = []
        for step in range(round(seconds / STEP_S)):
            self.now += STEP_S
            decided: list[Ticket] = []
            for end, ticket in [entry for entry in ends if entry[0] <= self.now]:
                ends.remove((end, ticket))
                self.served[ticket.item.tenant] += 1
                decided += self.admission.release(ticket, self.now)
            for period, item in self.offers:
                answer = self.admission.ask(item, self.now) if step % period == 0 else None
                decided += [answer] if isinstance(answer, Ticket) else []
                decided += self.admission.decided()
            decided += self.admission.look(self.now)
            ends += [(self.now + SERVICE_S, ticket) for ticket in decided if ticket.state is TicketState.ADMITTED]
            for ticket in decided:
                self.admission.placed(ticket, self.now)
        return self


def item(tenant: str, priority: int = STANDARD, ttft_s: float | None = None, **fields: object) -> FlowItem:
    return FlowItem(tenant, priority, prompt_tokens=100, output_tokens=50, ttft_s=ttft_s, foresee=lambda: GOOD, **fields)  # type: ignore[arg-type]


def of_calm(flood: FlowItem) -> int:
    """Eight places; one tenant asks five times a second, the other fifty times."""
    admission = Admission(AdmissionSettings(max_inflight=8, max_queued=64))
    world = World(admission, [(1, flood), (10, item("calm", ttft_s=2.0))]).run(60)
    assert world.served.total() >= 0.9 * 8 * 60 / (SERVICE_S + STEP_S)
    return world.served["calm"]


@pytest.mark.parametrize(
    "flood",
    [
        item("flood", INTERACTIVE, 2.0),
        item("flood", INTERACTIVE),
        item("flood", INTERACTIVE, started=True),
        item("flood", BATCH, started=True),
    ],
)
def test_a_declared_rank_or_resume_takes_nothing_from_another_tenants_share(flood: FlowItem) -> None:
    assert of_calm(flood) >= 0.9 * of_calm(item("flood", STANDARD, 2.0))


def test_interactive_goes_before_the_batch_of_others_who_were_given_as_much() -> None:
    admission = Admission(AdmissionSettings(1, 10))
    holder = ask(admission, tenant="a")
    waiting = [
        ask(admission, BATCH, tenant="b"),
        ask(admission, INTERACTIVE, tenant="c"),
        ask(admission, INTERACTIVE, tenant="a"),
    ]
    assert order_of(admission, holder, waiting) == [1, 2, 0]


def test_batch_has_its_share_in_the_end() -> None:
    admission = Admission(AdmissionSettings(1, 10))
    holder, tokens = ask(admission, tenant="a"), 0.0
    batch = ask(admission, BATCH, tenant="b")
    while batch.state is TicketState.WAITING:
        ask(admission, INTERACTIVE, tenant="a", prompt_tokens=1000)
        (holder,) = admission.release(holder, 0.0)
        tokens += holder.item.cost
        assert tokens <= BATCH_YIELDS + 2000


def test_a_full_queue_is_not_emptied_of_who_holds_little_by_who_calls_itself_important() -> None:
    admission = Admission(AdmissionSettings(1, 8))
    ask(admission)
    calm = [ask(admission, tenant="calm") for _ in range(2)]
    for _ in range(20):
        admission.ask(FlowItem("flood", INTERACTIVE), 0.0)
    assert [ticket.state for ticket in calm] == [TicketState.WAITING] * 2
    assert ask(admission, tenant="calm").state is TicketState.WAITING
    (pushed,) = admission.decided()
    assert pushed.item.tenant == "flood" and pushed.refusal is not None and pushed.refusal.reason == "share"


def test_within_a_tenant_who_continues_and_who_is_new_take_turns() -> None:
    admission = Admission(AdmissionSettings(1, 10))
    holder = ask(admission)
    waiting = [ask(admission, started=started) for started in (False, False, True, True, True)]
    assert order_of(admission, holder, waiting) == [2, 0, 3, 1, 4]


IMPOSSIBLE_S = 0.001


@pytest.mark.parametrize("priority", [STANDARD, INTERACTIVE])
@pytest.mark.parametrize("tenant", ["p{}", "calm"])
def test_an_objective_that_cannot_be_met_blocks_nobody(priority: int, tenant: str) -> None:
    """Also not those of the same tenant: without names all clients are one."""
    calm = item("calm")
    poison = [(5, item(tenant.format(number), priority, tpot_s=IMPOSSIBLE_S)) for number in range(4)]
    alone = World(Admission(AdmissionSettings(8, 400)), [(10, calm)]).run(30)
    world = World(Admission(AdmissionSettings(8, 400)), [(10, calm), *poison]).run(30)
    assert world.served["calm"] >= 0.9 * alone.served["calm"]
    assert set(world.served) == {"calm"}


def test_who_waits_for_its_own_pace_is_refused_after_the_hold_timeout_or_let_in() -> None:
    answers = [GOOD]
    admission = Admission(AdmissionSettings(8, 8, hold_timeout_s=5.0))
    admission.placed(ask(admission, foresee=lambda: answers[-1]), 0.0)
    patient = ask(admission, tpot_s=0.02, foresee=lambda: answers[-1])
    late = ask(admission, tpot_s=0.01, foresee=lambda: answers[-1])
    assert admission.look(1.0) == []
    answers.append(Forecast(0.01, 0.015, has_room=True))
    assert admission.look(1.1) == [patient] and patient.state is TicketState.ADMITTED
    assert admission.look(4.9) == []
    ask(admission, now=4.95)  # the mesh moves, and is not taken to hang
    assert admission.look(5.1) == [late] and late.refusal is not None
    assert late.refusal.reason == "objective" and "slo_tpot_ms" in late.refusal.message


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([1, 2]), st.integers(1, 50)), min_size=1, max_size=80))
def test_with_a_backlog_nobody_is_given_more_than_a_request_beyond_its_share(asks: list[tuple[str, int, int]]) -> None:
    shares = FairShare(0.01, 1.0)
    for number, (tenant, rank, cost) in enumerate(asks):
        shares.push(Ticket(FlowItem(tenant, rank, prompt_tokens=cost), number, 0.0), {"a": 1.0, "b": 2.0}[tenant])
    given_tokens = {"a": 0.0, "b": 0.0}
    while (queue := shares.first([1, 2, 3])) is not None and (ticket := queue.head()) is not None:
        if all(any(queue.flow(tenant) for queue in shares.queues.values()) for tenant in "ab"):
            assert abs(given_tokens["a"] - given_tokens["b"] / 2) <= 50 + 25
        given_tokens[ticket.item.tenant] += ticket.item.cost
        shares.serve(ticket)
        ticket.state = TicketState.ADMITTED
    assert shares.num_waiting == 0 and sum(given_tokens.values()) == sum(cost for _, _, cost in asks)
    assert shares.heaviest() is None


def test_a_modest_tenant_that_sends_some_at_once_is_served_first_and_no_more_than_it_has_saved_up() -> None:
    admission = Admission(AdmissionSettings(1, 100))
    holder = ask(admission, tenant="modest", prompt_tokens=1)
    for _ in range(30):
        ask(admission, tenant="flood", prompt_tokens=500)
    for _ in range(10):  # 5 000 tokens for the flood meanwhile
        (holder,) = admission.release(holder, 0.0)
    for _ in range(12):
        ask(admission, tenant="modest", prompt_tokens=500)
    served = []
    for _ in range(13):
        (holder,) = admission.release(holder, 0.0)
        served.append(holder.item.tenant)
    num_first = served.index("flood")
    assert SAVED / 500 <= num_first <= SAVED / 500 + 2
    assert served[num_first : num_first + 6].count("flood") == 3
