"""One request on one decode worker: its id there, its attempts, its tokens, and its end."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Sequence
from typing import Protocol

import grpc
import grpc.aio

from pdmesh.runtime.errors import DataLoss, DeadlineExceeded, InvalidArgument, MeshError, Unavailable, error_from_rpc
from pdmesh.runtime.telemetry.spans import Attributes
from pdmesh.v1 import common_pb2, decode_pb2, mesh_pb2, prefill_pb2
from router.context import RouterContext, time_left_ms, time_left_s
from router.fleet.change_notifier import unless
from router.fleet.incarnation import Incarnation
from router.fleet.worker import Worker
from router.lifecycle.output import DraftTotals, OutputError, TokenChunk
from router.routing.routing_request import tpot_goal_ms, ttft_left_ms
from router.routing.worker_snapshot import Mode, WorkerKey
from router.telemetry.timings import RequestTimings
from router.tokenization.prepared_request import PreparedRequest

MAX_HELD_CHUNKS = 4096
SUBMIT_STEPS = 5
"""How many of the worker's longest steps a Submit may take, beyond `submit_timeout_s`."""
CANCEL_TIMEOUT_S = 1.0
CANCEL_FOR_S = 5.0
WIRE_MODES = {Mode.LOCAL: mesh_pb2.PREFILL_MODE_LOCAL, Mode.REMOTE: mesh_pb2.PREFILL_MODE_REMOTE}

logger = logging.getLogger(__name__)


class WorkerLost(Exception):
    """Report that a decode session ended before the output; the request has to continue on another worker."""


class GivenBack(WorkerLost):
    """Report that a decode worker gave a request back because it goes to sleep: no failure of either."""


class Sink(Protocol):
    """Receive the tokens of a session."""

    drafts: DraftTotals

    def accept(self, chunk: TokenChunk) -> bool:
        """Take new or repeated output; return True when no more is needed. Must return at once. Raises OutputError."""

    def fetch_failed(self, holder: prefill_pb2.KVHolder) -> None:
        """Note a worker that did not send KV to be fetched."""

    def next_indexes(self) -> Sequence[tuple[int, int]]:
        """Return (choice, output index needed next) of each choice that goes on."""


class DecodeSession:
    """Follow a request on a decode worker, from Submit until it ends or is left, through the worker's DecodeStream.

    The id on the wire is the client's with a random tail: a client's id need not be unique, and a worker must not mistake a
    request that returns for an earlier session of it which it still has.
    `started`: the decode worker generates; `delivered`: tokens have come in this session, from either worker; `flowing` is set
    then. `ended` resolves with None when the worker has finished every choice, else with the reason why not.
    """

    def __init__(
        self,
        core: RouterContext,
        worker: Worker,
        incarnation: Incarnation,
        prepared: PreparedRequest,
        sink: Sink,
        timings: RequestTimings,
    ) -> None:
        self.worker = worker
        self.info = incarnation.info
        self._incarnation = incarnation
        self.wire_id = f"{prepared.request_id[:51]}-{random.getrandbits(48):012x}"
        self.attempt = 0
        self.started = False
        self.delivered = False
        self.flowing = asyncio.Event()
        self.ended: asyncio.Future[WorkerLost | MeshError | None] = asyncio.get_running_loop().create_future()
        self._core = core
        self._prepared = prepared
        self._sink = sink
        self._timings = timings
        self._wants_logprobs = prepared.sampling.HasField("logprobs")
        self._waits_for_first = False
        self._got_first = False
        self._held: list[TokenChunk] = []
        self._holder: prefill_pb2.KVHolder | None = None  # of the latest attempt, where that is LOCAL
        self._submitting = False
        self._failed_meanwhile: WorkerLost | MeshError | None = None
        self._submitted = False
        self._unfinished = set(range(prepared.num_choices))

    @property
    def key(self) -> WorkerKey:
        """Return the key of the worker's incarnation."""
        return (self.worker.address, self.info.epoch)

    @property
    def incarnation(self) -> Incarnation:
        """Return the worker's process."""
        return self._incarnation

    async def submit(
        self,
        mode: Mode,
        emitted: list[common_pb2.EmittedChoice],
        *,
        because: str = "",
        holder: prefill_pb2.KVHolder | None = None,
    ) -> common_pb2.Reservation:
        """Submit the next attempt. `because`: why it replaces the current one. `holder`: has KV that it may fetch (LOCAL).
        Raises the MeshError that the worker answered."""
        self.attempt += 1
        waited_before = self._waits_for_first
        self._waits_for_first = waited_before or mode is Mode.REMOTE  # until the answer, output belongs to the attempt before
        self._got_first = False
        self._unfinished -= {choice.index for choice in emitted if choice.finish_reason}
        self.worker.decode_stream.follow(self.wire_id, self.info.epoch, self)
        self._timings.submitting(self._described(mode), because)
        self._failed_meanwhile, self._holder = None, holder
        try:
            response = await self._call_submit(self._submit_request(mode, emitted, holder))
        except MeshError:
            self.attempt -= 1  # the attempt before, if any, is in force again
            if not waited_before or self._got_first:
                self.deliver_first(())  # the decode worker may go on with the attempt before
            if self._failed_meanwhile is not None:
                self.end(self._failed_meanwhile)
            raise
        self._expect_first(mode)
        self._timings.submitted(WIRE_MODES[mode], self.info.worker_id, response.reservation.num_cached_tokens)
        return response.reservation

    def _described(self, mode: Mode) -> Attributes:
        return {"pdmesh.attempt": self.attempt, "pdmesh.mode": mode.value, "pdmesh.decode.worker": self.info.worker_id}

    def _expect_first(self, mode: Mode) -> None:
        """Note that the attempt is in force. Its first tokens come from the prefill worker; LOCAL: from the decode worker."""
        self._waits_for_first = mode is Mode.REMOTE
        if mode is Mode.LOCAL:
            self.deliver_first(())

    def refused(self) -> None:
        """Note that the worker kept nothing of the Submit: no Cancel is due."""
        self._submitted = False

    def finished(self) -> None:
        """Note that every choice ended with its first token, and the decode worker knows: no Cancel is due."""
        self._unfinished.clear()

    def deliver_first(self, chunks: Sequence[TokenChunk]) -> None:
        """Take the first tokens from the prefill worker. Output that the decode worker sent before them follows."""
        self._waits_for_first = False
        self._got_first = True
        held, self._held = self._held, []
        for chunk in (*chunks, *held):
            self.deliver(chunk)

    def deliver(self, chunk: TokenChunk) -> None:
        """Pass output of this session to the sink, in its final order."""
        if not self.delivered:
            self.delivered = True
            self.flowing.set()
        try:
            if self._sink.accept(chunk):
                self.end(None)
        except OutputError as error:
            self.end(WorkerLost(f"{self.info.worker_id}: {error}"))

    def _hold_back(self, chunk: TokenChunk) -> None:
        """Hold output back until the prefill worker's first tokens, which have log-probabilities and timings; the decode worker
        repeats them without. The two streams overtake each other by little."""
        self._held.append(chunk)
        if len(self._held) > MAX_HELD_CHUNKS:
            self.end(WorkerLost(f"tokens come from {self.info.worker_id}, but no first tokens from the prefill worker"))

    def end(self, result: WorkerLost | MeshError | None) -> None:
        """Resolve `ended`; the first result stays."""
        if not self.ended.done():
            self.ended.set_result(result)

    def leave(self, reason: str) -> None:
        """Stop following. If the worker may still have state of the request, cancel it there in the background."""
        self.worker.decode_stream.unfollow(self.wire_id)
        if self._submitted and self._unfinished:
            self._submitted = False
            self._core.background.spawn(self._cancel(reason), f"cancel {self.wire_id}")

    def on_output(self, output: decode_pb2.SequenceOutput) -> None:
        """Take new output of one choice. Per-token path."""
        if output.finish_reason:
            self._unfinished.discard(output.choice)
        if output.num_drafted:
            self._sink.drafts.note(self.wire_id, output.choice, output.num_drafted, output.num_accepted)
        self.started = True
        logprobs = output.logprobs if self._wants_logprobs else ()
        chunk = TokenChunk(output.choice, output.first_index, output.token_ids[:], logprobs, output.finish_reason)
        if output.prompt_logprobs:
            chunk.prompt_logprobs = output.prompt_logprobs[:]
        if self._waits_for_first:
            self._hold_back(chunk)
        else:
            self.deliver(chunk)

    def on_event(self, event: decode_pb2.RequestEvent) -> None:
        """Take an event. STARTED brings timings; FAILED ends the session unless it names an earlier attempt (0: no attempt)."""
        if event.kind == decode_pb2.REQUEST_EVENT_KIND_STARTED and event.attempt == self.attempt:
            self._on_started(event)
        elif event.kind == decode_pb2.REQUEST_EVENT_KIND_FAILED and self._is_about_now(event.attempt):
            self.end(self._failure(event))
        elif event.kind == decode_pb2.REQUEST_EVENT_KIND_FAILED and self._submitting and event.attempt == self.attempt - 1:
            self._failed_meanwhile = self._failure(event)  # counts only if the new attempt is refused

    def on_lost(self, reason: str) -> None:
        """End the session: the worker is gone, or was out of reach for too long."""
        self.end(WorkerLost(reason))

    def next_indexes(self) -> Sequence[tuple[int, int]]:
        """Return the indexes from which a re-attached stream has to start."""
        return self._sink.next_indexes()

    def _is_about_now(self, attempt: int) -> bool:
        # If a re-attach overtakes a Submit, the worker does not know the request yet and answers with attempt 0.
        return attempt == self.attempt or (attempt == 0 and not self._submitting)

    def _on_started(self, event: decode_pb2.RequestEvent) -> None:
        self.started = True
        parts = self._timings.parts
        parts.decode_queue_ns, parts.decode_cached_tokens = event.decode_queue_ns, event.num_cached_tokens
        parts.kv_bytes, parts.transport = event.kv_bytes, event.transport
        self._timings.rounded(event.num_rounded_tokens)
        if event.HasField("local_prefill"):
            self._timings.prefilled(event.local_prefill)
            self._incarnation.prefilled(event.local_prefill)
            if event.local_prefill.fetch_failed and self._holder is not None:
                self._sink.fetch_failed(self._holder)

    def _failure(self, event: decode_pb2.RequestEvent) -> WorkerLost | MeshError:
        if event.code == grpc.StatusCode.DATA_LOSS.value[0]:  # every worker would compute the same
            return DataLoss(event.message)
        if event.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]:  # only a stock engine refuses after its Submit
            return InvalidArgument("request", f"{self.info.worker_id} refused it: {event.message}")
        if event.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]:
            return DeadlineExceeded(event.message or "the deadline passed on the decode worker")
        if event.code == grpc.StatusCode.ABORTED.value[0]:
            return GivenBack(f"decode worker {self.info.worker_id}: {event.message}")
        return WorkerLost(f"decode worker {self.info.worker_id} gave the request up (code {event.code}): {event.message}")

    async def _call_submit(self, request: decode_pb2.SubmitRequest) -> decode_pb2.SubmitResponse:
        """Call Submit. Raises MeshError, also when the worker falls silent meanwhile."""
        self._submitting = self._submitted = True
        self._timings.spans.took_part(self.worker)
        try:
            response = await unless(self._incarnation.lost, self._rpc(request))
        finally:
            self._submitting = False
        if response is None:
            raise Unavailable(f"decode worker {self.info.worker_id} fell silent")
        return response

    async def _rpc(self, request: decode_pb2.SubmitRequest) -> decode_pb2.SubmitResponse:
        try:
            metadata = self._timings.spans.submit_metadata
            return await self.worker.decode.Submit(request, timeout=self._submit_timeout_s(), metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error

    def _submit_request(
        self, mode: Mode, emitted: list[common_pb2.EmittedChoice], holder: prefill_pb2.KVHolder | None
    ) -> decode_pb2.SubmitRequest:
        return decode_pb2.SubmitRequest(
            request_id=self.wire_id,
            router_id=self._core.router_id,
            attempt=self.attempt,
            mode=WIRE_MODES[mode],
            request=self._prepared.token_request(emitted),
            time_left_ms=time_left_ms(self._prepared.deadline),
            identity=self.info.identity,
            epoch=self.info.epoch,
            tpot_goal_ms=tpot_goal_ms(self._core, self._prepared),
            holder=holder,
            ttft_left_ms=0 if emitted else ttft_left_ms(self._core, self._prepared, self._timings.received_ns),
        )

    def _submit_timeout_s(self) -> float:
        """Return the limit of the call to a worker that is alive: an engine may have to end a step before it answers."""
        left_s = time_left_s(self._prepared.deadline)
        limit_s = max(self._core.config.submit_timeout_s, SUBMIT_STEPS * self._incarnation.longest_step_s)
        return limit_s if left_s is None else min(limit_s, left_s)

    async def _cancel(self, reason: str) -> None:
        """Call Cancel until the worker answers, is another incarnation, or has had the time to miss the request itself."""
        request = decode_pb2.CancelRequest(request_id=self.wire_id, reason=reason)
        backoff_s = 0.1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_FOR_S):
                while not self._is_gone():
                    try:
                        await self.worker.decode.Cancel(request, timeout=CANCEL_TIMEOUT_S)
                        return
                    except grpc.aio.AioRpcError as error:
                        logger.info(
                            "cancel of %s on %s failed (%s), trying again", self.wire_id, self.info.worker_id, error.code().name
                        )
                    except grpc.aio.UsageError:  # the channel was closed: the worker has been forgotten
                        return
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(1.0, 2 * backoff_s)

    def _is_gone(self) -> bool:
        current = self.worker.current
        return current is not None and current.info.epoch != self.info.epoch
