"""Is this PrefillRequest one that we can act on? Each refusal names the field."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvtransfer.compatibility import check_identity, check_layout
from pdmesh.engine.request import EngineRequest
from pdmesh.runtime.errors import InvalidArgument
from pdmesh.v1 import common_pb2, prefill_pb2
from prefill_service.handoff import Assignment, named

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

Translate = Callable[[common_pb2.TokenRequest], Awaitable[EngineRequest]]


@dataclass(frozen=True)
class PrefillValidator:
    """Checks against what this worker is. `translate` checks the TokenRequest within and raises InvalidArgument itself."""

    identity: common_pb2.Identity
    layout: common_pb2.KVLayout
    translate: Translate

    async def check(self, request: prefill_pb2.PrefillRequest, engine_id: str, *, now: float, received_ns: int) -> Assignment:
        """Raises InvalidArgument, or FAILED_PRECONDITION naming the field of identity or layout that differs."""
        if not _ID.fullmatch(request.request_id):
            raise InvalidArgument("request_id", f"{request.request_id[:80]!r} is not 1 to 64 of [A-Za-z0-9_-]")
        for field in ("request", "reservation", "identity"):
            if not request.HasField(field):
                raise InvalidArgument(field, "missing")
        check_identity(self.identity, request.identity)
        check_layout(self.identity, self.layout, request.reservation.layout)
        engine_request = await self.translate(request.request)
        num_tokens = _num_kv_tokens(engine_request)
        self._check_reservation(request.reservation, num_tokens)
        return Assignment(
            engine_request=named(engine_request, engine_id),
            reservation=request.reservation,
            num_tokens=num_tokens,
            deadline=now + request.time_left_ms / 1000 if request.time_left_ms else None,
            received_ns=received_ns,
        )

    def _check_reservation(self, reservation: common_pb2.Reservation, num_tokens: int) -> None:
        for name, given in (
            ("reservation_id", reservation.reservation_id),
            ("epoch", reservation.epoch),
            ("attempt", reservation.attempt),
            ("token", reservation.token),
            ("endpoints", reservation.endpoints),
        ):
            if not given:
                raise InvalidArgument(f"reservation.{name}", "missing; give the reservation as decode granted it")
        num_cached = reservation.num_cached_tokens
        block_size = reservation.layout.block_size
        if num_cached % block_size or num_cached >= num_tokens:
            raise InvalidArgument(
                "reservation.num_cached_tokens",
                f"{num_cached} must be whole blocks of {block_size}, fewer than the request's {num_tokens} tokens",
            )


def _num_kv_tokens(request: EngineRequest) -> int:
    """Tokens of the prompt, and of the history of the only unfinished choice. Raises InvalidArgument for several with history."""
    finished = request.finished or (False,) * request.sampling.n
    unfinished = [choice for choice in range(request.sampling.n) if not finished[choice]]
    if not any(request.emitted):
        return len(request.prompt)
    if len(unfinished) > 1:
        raise InvalidArgument("request.emitted", "several unfinished choices with history cannot be handed off; prefill locally")
    return len(request.prompt) + len(request.emitted[unfinished[0]])
