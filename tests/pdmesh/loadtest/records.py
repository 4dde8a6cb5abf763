"""Records for tests."""

from __future__ import annotations

from array import array

from pdmesh.loadtest.record import Outcome, Record


def record(
    scheduled_s: float = 0.0,
    *times: float,
    outcome: Outcome = Outcome.OK,
    sent_s: float | None = None,
    end_s: float | None = None,
    session: int = 0,
    traffic_class: str = "standard",
    tenant: str = "",
    error: str = "",
    phases_ms: dict[str, float] | None = None,
) -> Record:
    """A request that was due at `scheduled_s` and whose tokens came at `times`."""
    sent_s = scheduled_s if sent_s is None else sent_s
    return Record(
        session=session,
        turn=0,
        traffic_class=traffic_class,
        tenant=tenant,
        priority="standard",
        scheduled_s=scheduled_s,
        sent_s=sent_s,
        end_s=max([sent_s, *times]) if end_s is None else end_s,
        outcome=outcome,
        input_tokens=10,
        output_tokens=len(times),
        token_times=array("d", times),
        error=error,
        phases_ms=phases_ms or {},
    )
