"""Checks of messages to the decode service, and the errors that it returns. Each error names the field."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

from decode_service.request import Submission
from kvtransfer.kv_sources import check_holder
from kvtransfer.reservation import AlreadyRunning, InvalidTransition, Mode, StaleAttempt
from pdmesh.engine.request import EngineRequest, unpaced_from_ns
from pdmesh.runtime.errors import Aborted, FailedPrecondition, InvalidArgument, MeshError, ResourceExhausted, Unavailable
from pdmesh.v1 import common_pb2, decode_pb2, mesh_pb2

# Deadlines: a message carries the time left, which becomes a deadline on this worker's own monotonic clock.


def deadline_of(time_left_ms: int, now: float) -> float | None:
    """Return the deadline in monotonic seconds; None for `time_left_ms` 0, which means no deadline."""
    return now + time_left_ms / 1000 if time_left_ms else None


def has_passed(deadline: float | None, now: float) -> bool:
    return deadline is not None and now >= deadline


_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
MIN_PERIOD_MS, MAX_PERIOD_MS = 10, 10_000
_MODES = {mesh_pb2.PREFILL_MODE_REMOTE: Mode.REMOTE, mesh_pb2.PREFILL_MODE_LOCAL: Mode.LOCAL}

Translate = Callable[[common_pb2.TokenRequest], Awaitable[EngineRequest]]


class EarlierWeights(Protocol):
    """Weights that the worker has replaced, and has still."""

    def holds(self, weights_hash: str) -> bool:
        """Return whether a request may still be computed with these."""

    def request_for(self, weights_hash: str, wire: common_pb2.TokenRequest, request: EngineRequest) -> EngineRequest:
        """Return the request, to be computed with these."""


@dataclass(frozen=True)
class SubmitValidator:
    """Check messages against this worker's identity. `translate` checks their TokenRequest, and raises InvalidArgument itself.
    `earlier`: weights that requests of an earlier identity are still computed with, if they began so; None: there are none."""

    epoch: int
    identity: common_pb2.Identity
    translate: Translate
    earlier: EarlierWeights | None = None

    async def check(self, request: decode_pb2.SubmitRequest, *, now: float, received_ns: int) -> Submission:
        """Return the submission. Raises InvalidArgument or FailedPrecondition naming the field."""
        check_id("request_id", request.request_id)
        check_id("router_id", request.router_id)
        if request.attempt < 1:
            raise InvalidArgument("attempt", "missing; attempts count from 1")
        if request.mode not in _MODES:
            raise InvalidArgument("mode", "missing; give PREFILL_MODE_REMOTE or PREFILL_MODE_LOCAL")
        earlier = self._check_addressee(request)
        if not request.HasField("request"):
            raise InvalidArgument("request", "missing")
        mode, engine_request = _MODES[request.mode], await self.translate(request.request)
        if earlier and self.earlier is not None:
            engine_request = self.earlier.request_for(earlier, request.request, engine_request)
        unpaced_ns = unpaced_from_ns(received_ns, request.ttft_left_ms)
        engine_request = replace(engine_request, tpot_goal_s=request.tpot_goal_ms / 1000, unpaced_from_ns=unpaced_ns)
        _check_mode(mode, engine_request)
        holder = request.holder if request.HasField("holder") else None
        if holder is not None:
            check_holder(holder, len(engine_request.history))
        return Submission(
            request_id=request.request_id,
            router_id=request.router_id,
            attempt=request.attempt,
            mode=mode,
            request=engine_request,
            deadline=deadline_of(request.time_left_ms, now),
            received_ns=received_ns,
            holder=holder,
        )

    def _check_addressee(self, request: decode_pb2.SubmitRequest) -> str:
        """Return the hash of the weights that the message is about if they are not the present ones, and still here; else an
        empty text. Raises FailedPrecondition for another worker's."""
        if request.epoch and request.epoch != self.epoch:
            raise FailedPrecondition("epoch", f"{request.epoch:#x} is another incarnation of this worker; look it up again")
        earlier = ""
        for field, expected in request.identity.ListFields():
            ours = getattr(self.identity, field.name)
            if field.name == "weights_hash" and ours != expected and _has_begun(request) and self._holds(expected):
                earlier = expected
            elif ours != expected:
                raise FailedPrecondition(
                    f"identity.{field.name}", f"this worker has {ours!r}, not {expected!r}; choose a worker of that identity"
                )
        return earlier

    def _holds(self, weights_hash: str) -> bool:
        return self.earlier is not None and self.earlier.holds(weights_hash)


def _has_begun(request: decode_pb2.SubmitRequest) -> bool:
    """Return whether the weights of the request are decided. A new one is computed with the present ones: a router that expects
    others has not heard of the change yet, and places it again."""
    return request.attempt > 1 or any(choice.token_ids for choice in request.request.emitted)


def check_id(field: str, value: str) -> None:
    if not _ID.fullmatch(value):
        raise InvalidArgument(field, f"{value[:80]!r} is not 1 to 64 of [A-Za-z0-9_-]")


def check_attach(first: decode_pb2.AttachRequest) -> None:
    """Check the first message of a stream. Raises InvalidArgument naming the field."""
    check_id("router_id", first.router_id)
    if first.period_ms and not MIN_PERIOD_MS <= first.period_ms <= MAX_PERIOD_MS:
        raise InvalidArgument("period_ms", f"{first.period_ms} is not 0 (100) or {MIN_PERIOD_MS} to {MAX_PERIOD_MS}")
    for index, point in enumerate(first.resume_points):
        check_id(f"resume_points[{index}].request_id", point.request_id)


def _check_mode(mode: Mode, request: EngineRequest) -> None:
    """Refuse a hand-off of several unfinished choices with emitted tokens, because a hand-off carries only one history."""
    finished = request.finished or (False,) * request.sampling.n
    if mode is Mode.REMOTE and any(request.emitted) and finished.count(False) > 1:
        raise InvalidArgument("mode", "several unfinished choices with emitted tokens cannot be prefilled remotely; use LOCAL")


# Errors for requests that this worker cannot take or continue.


# The answer to a router that asks for finished output too late: another worker can generate the tokens again.
OUTPUT_GONE = Unavailable("it has finished here, and its output is no longer kept")


def no_room(retry_delay_s: float) -> ResourceExhausted:
    """Return the error for a request for which the engine has no blocks or seats now; no state was kept."""
    return ResourceExhausted("no room for the request's KV blocks now", retry_delay_s=retry_delay_s)


def released_by_worker(reason: str) -> Unavailable:
    """Return the error for a request that this worker gives up; another worker may take it."""
    return Unavailable(f"this worker gave the request up: {reason}")


def given_back(reason: str) -> Aborted:
    """Return the error for a request that this worker gives back to its router, and which says nothing about the worker."""
    return Aborted(f"this worker gave the request back: {reason}")


def refusal_of(error: InvalidTransition) -> MeshError:
    """Return the error of a Submit that the state machine does not allow."""
    if isinstance(error, StaleAttempt):
        return Aborted(str(error))
    if isinstance(error, AlreadyRunning):
        return FailedPrecondition("attempt", f"the request runs already: {error}")
    return FailedPrecondition("mode", str(error))
