"""What must be true while a run goes on, beside what `simulate` looks at when all is quiet.

Fences: KV is written only for the attempt at which the reservation is, or before anybody else has its blocks.
Releases: in a calm run a request that its client has cancelled or left holds nothing on a decode worker half a second later.
Repetitions: a request that was answered in a calm run was tried once; where only connections were lost, on one decode worker;
where only a worker died, at one router.
Deaths: where one member dies and nothing else is wrong, the next token comes within DEATH_STALL_S; what a dead router had is
given back.
Breakers: no worker is left out for longer than the longest ejection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pdmesh.client.types import Completed
from prefill_service.kv_pull import KVPuller
from tests.simulation.profiles import CALM, DEATHS, LOST_CONNECTIONS, STREAMS
from tests.simulation.scenario import Scenario

if TYPE_CHECKING:
    from router.main import Router
    from tests.simulation.mesh import Member

RELEASED_S = 0.5
"""A cancelled call is known to the router within a few milliseconds, to its worker as soon; a step takes 3 to 10."""
DEATH_STALL_S = 2.0
"""One second of silence, or 1.2 s of a client's channel, and what it takes to look and to compute the prompt elsewhere: at most
four requests of at most 160 tokens."""
ORPHANED_S = 4.0
"""A worker hears nothing for 1 s, waits 2 s for the router to attach again, and looks every 0.1 s."""
CALM_STALL_S = 1.0
"""How long a request waits for a token in a calm run: 32 requests beside it compute prompts of at most 500 tokens."""

_report: list[Callable[[str], None]] = []


def install(report: Callable[[str], None]) -> None:
    """Look at each part of KV that is written, in all runs of this process; `report` gets what is wrong in the present one."""
    from kvtransfer.receiver.push import InboundConnection

    is_installed = bool(_report)
    _report[:] = [report]
    if is_installed:
        return
    write = InboundConnection._write_part

    async def watched(self: Any, header: Any, part: Any, push: Any) -> tuple[int, int]:
        result = await write(self, header, part, push)
        problem = _problem_of_write(push)
        if problem:
            _report[0](problem)
        return result

    setattr(InboundConnection, "_write_part", watched)  # noqa: B010  mypy forbids to assign a method


def _problem_of_write(push: Any) -> str:
    """Return what is wrong with a part that was just written, if anything is. A writer may end behind its fence, as long as
    nothing else has the blocks: no other attempt writes, and the engine has not got them back."""
    target, delegate = push.target, push.host.delegate.of(push.target.reservation_id)
    if isinstance(delegate, KVPuller):
        is_held = target.reservation_id in delegate._pulls
        return "" if is_held else f"a part was written into {target.reservation_id}, whose blocks were given back"
    reservations = delegate._reservations
    record = reservations.find(target.reservation_id)
    if record is None:
        holders = [each.reservation_id for each in reservations.active]
        return (
            ""
            if target.reservation_id in holders
            else f"a part was written into {target.reservation_id}, which has been released"
        )
    at = record.reservation
    attempt = push.hello.attempt  # as the sender says: the receiver may have taken it for another
    is_right = at.state.value == "receiving" and at.attempt == attempt
    if is_right or at.state.value == "reserved":
        return ""
    return f"a part of attempt {attempt} was written into a reservation that is {at.state.value} at attempt {at.attempt}"


def held_requests(members: Iterable[Member], request_id: str) -> list[str]:
    """Return what the decode workers hold of a request, in words."""
    return [
        f"{member.name} holds {record.request_id} ({record.reservation.state.value})"
        for member in members
        if member.worker is not None
        for record in member.worker.decode.reservations.active
        if record.request_id.startswith(request_id)
    ]


def orphans(members: Iterable[Member], router_id: str) -> list[str]:
    """Return what the decode workers hold for a router, in words; not the output of what is over, which is kept."""
    return [
        f"{member.name} holds {request_id}"
        for member in members
        if member.worker is not None
        if (token_stream := member.worker.decode._token_streams._by_router.get(router_id)) is not None
        for request_id, record in token_stream.records.items()
        if not record.is_released
    ]


def ejected_for_ever(router: Router) -> list[str]:
    """Return the breakers that leave a worker out for longer than the longest ejection, in words."""
    health = router.core.health_recorder.health
    most_s = health.limits.max_ejection_s * (1 + health.limits.jitter)
    return [
        f"{worker} is left out as {role.value} for longer than {most_s:.0f} s"
        for (worker, role), breaker in health._breakers.items()
        if worker in health.ejected(role, [worker, ("another", 0)], breaker.opened_at + most_s)
    ]


def repeated(scenario: Scenario, completed: Completed) -> str:
    """Return what a request did more than once without a cause: in a calm run anything, and where only connections are lost it
    stays on its decode worker."""
    timings = completed.timings
    kinds = {fault.kind for fault in scenario.faults}
    counts = {}
    if kinds.issubset(LOST_CONNECTIONS) and scenario.profile in (CALM, STREAMS):
        counts["resubmitted"] = timings.num_resubmissions
    if scenario.profile == DEATHS and not any(name in scenario.routers for fault in scenario.faults for name in fault.targets):
        counts["resumed"] = completed.num_resumes
    if scenario.profile == CALM:
        counts |= {"resumed": completed.num_resumes, "tried again": timings.num_retries}
    return ", ".join(f"{name} {count} times" for name, count in counts.items() if count)
