"""One Prefill call: first tokens, then the outcome of the hand-off, or the news that its worker fell silent."""

from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from pdmesh.runtime import failpoints
from pdmesh.runtime.telemetry.propagation import Metadata
from pdmesh.v1 import common_pb2, prefill_pb2
from router.context import time_left_ms, time_left_s
from router.fleet.change_notifier import unless
from router.fleet.worker import Dispatched, Incarnation, Worker
from router.lifecycle.decode_session import DecodeSession
from router.routing.worker_snapshot import WorkerKey
from router.tokenization.prepared_request import PreparedRequest

_INNOCENT = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.FAILED_PRECONDITION)

OnFirstTokens = Callable[[prefill_pb2.FirstTokens], None]


@dataclass(frozen=True)
class PrefillEnd:
    """How a call ended: `outcome` as reported (None: the call broke), the problem in words unless it went well.

    `at_fault`: the problem speaks against the worker; one that is full or about to go has just said so."""

    outcome: prefill_pb2.HandoffOutcome | None
    problem: str | None
    retryable: bool = True
    at_fault: bool = True


@dataclass(frozen=True)
class PrefillTarget:
    """The worker that is to compute a prompt. `sent` counts as its load until it has.

    `predicted_s`: when the policy expects the first token, from the call on; None when it does not."""

    worker: Worker
    incarnation: Incarnation
    sent: Dispatched
    predicted_s: float | None = None

    @property
    def key(self) -> WorkerKey:
        """What tells incarnations apart."""
        return (self.worker.address, self.incarnation.info.epoch)

    def computed(self) -> None:
        """The first tokens have come, or never will; idempotent."""
        self.worker.done(self.sent)


class PrefillCall:
    """`run` to its end in a task; cancelling that cancels compute and push on the worker."""

    def __init__(self, target: PrefillTarget, on_first_tokens: OnFirstTokens) -> None:
        self.got_first_tokens = False
        self.worker_id = target.incarnation.info.worker_id
        self._target = target
        self._on_first_tokens = on_first_tokens

    async def run(
        self,
        session: DecodeSession,
        prepared: PreparedRequest,
        reservation: common_pb2.Reservation,
        request: common_pb2.TokenRequest,
        metadata: Metadata | None = None,
    ) -> PrefillEnd:
        """Never raises but when cancelled: whatever goes wrong is a reason to try elsewhere."""
        message = prefill_pb2.PrefillRequest(
            request_id=session.wire_id,
            request=request,
            reservation=reservation,
            identity=session.info.identity,
            time_left_ms=time_left_ms(prepared.deadline),
        )
        call = self._target.worker.prefill.Prefill(message, timeout=time_left_s(prepared.deadline), metadata=metadata)
        try:
            end = await unless(self._target.incarnation.lost, self._read(call))
            return end or PrefillEnd(None, f"prefill worker {self.worker_id} fell silent")
        finally:
            call.cancel()
            self._target.computed()

    async def _read(self, call: grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillEvent]) -> PrefillEnd:
        try:
            async for event in call:
                if event.HasField("first_tokens"):
                    await failpoints.hit_async("router.first_token")
                    self.got_first_tokens = True
                    self._target.computed()
                    self._on_first_tokens(event.first_tokens)
                elif event.HasField("outcome"):
                    return self._end_of(event.outcome)
        except grpc.aio.AioRpcError as error:
            problem = f"prefill worker {self.worker_id} answered {error.code().name}: {error.details()}"
            return PrefillEnd(None, problem, at_fault=error.code() not in _INNOCENT and not _is_draining(self._target))
        return PrefillEnd(None, f"prefill worker {self.worker_id} ended its stream without an outcome")

    def _end_of(self, outcome: prefill_pb2.HandoffOutcome) -> PrefillEnd:
        if outcome.status in (prefill_pb2.HANDOFF_STATUS_COMMITTED, prefill_pb2.HANDOFF_STATUS_FINISHED):
            return PrefillEnd(outcome, None)
        return PrefillEnd(outcome, f"hand-off from {self.worker_id} failed: {outcome.message}", outcome.retryable)


def _is_draining(target: PrefillTarget) -> bool:
    return target.incarnation.load.draining
