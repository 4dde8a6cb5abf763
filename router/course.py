"""The course of one request through the mesh, until every choice has ended.

place ─► Submit ─┬─ REMOTE ─► Prefill ─► committed ─┬─► tokens until the end
                 │      ▲  └─ failed ─► Submit(attempt + 1) on another prefill worker, else LOCAL
                 └─ LOCAL ──────────────────────────┘
leg lost ─► place again, with prompt + what was emitted: indexes go on, tokens are the same
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from protos.v1 import common_pb2, mesh_pb2, prefill_pb2
from router.book import Book, Span
from router.core import Core
from router.decode_leg import DecodeLeg, LegLost
from router.job import Job
from router.outbox import Outbox
from router.placer import Need, Placed, Placer
from router.prefill_call import PrefillCall, PrefillEnd, PrefillTarget
from router.timings import RequestTimings
from router.views import Mode, WorkerKey
from router.worker_views import kind_of
from runtime.errors import DeadlineExceeded, FailedPrecondition, MeshError, Unavailable

OUTCOME_GRACE_S = 1.0
"""How long a Prefill call may still report its hand-off when every choice has ended already."""

Render = Callable[[Span], mesh_pb2.GenerateResponse | None]
logger = logging.getLogger(__name__)


class Course:
    """Acts for one request; its tokens come out of `outbox`, in order, each index once, or an error does.

    `is_winding_up`: workers have finished every choice; what is left to do ends by itself, soon.
    """

    def __init__(self, core: Core, job: Job, book: Book, timings: RequestTimings, render: Render) -> None:
        self.outbox = Outbox(core.config.max_buffered_tokens, render)
        self.is_winding_up = False
        self._core = core
        self._job = job
        self._book = book
        self._timings = timings
        self._placer = Placer(core)
        self._avoid: frozenset[WorkerKey] = frozenset()
        self._kind: tuple[object, ...] | None = None

    async def run(self) -> None:
        """To the end. Errors go to the outbox; on cancellation both legs are told in the background."""
        limit = asyncio.timeout_at(self._job.deadline)
        try:
            async with limit:
                while not self._book.all_finished:
                    await self._run_leg()
        except MeshError as error:
            self.outbox.fail(error)
        except TimeoutError as error:
            self.outbox.fail(DeadlineExceeded("the deadline of the request has passed") if limit.expired() else error)
        except Exception as error:  # noqa: BLE001 - the client gets INTERNAL instead of a stream that hangs
            self.outbox.fail(error)

    def accept(self, span: Span) -> bool:
        """Tokens from whichever worker; True when no more are needed. Raises BookError. Per-token path."""
        spans = self._book.accept(span)
        if spans:
            self._timings.first_token()
        for new in spans:
            self.outbox.put(new)
            if new.finish_reason and self._book.all_finished:
                self.is_winding_up = True
        return self.is_winding_up or self.outbox.failed

    def next_indexes(self) -> Sequence[tuple[int, int]]:
        """For a stream that re-attaches."""
        choices = range(self._job.num_choices)
        return [(choice, self._book.next_index(choice)) for choice in choices if not self._book.is_finished(choice)]

    async def _run_leg(self) -> None:
        """One stay on one decode worker. A loss is noted, and the caller goes on."""
        need = self._need()
        placed = await self._placer.place(need)
        try:
            await self._serve(placed, need)
            placed.finished()
        except LegLost as loss:
            self._note_loss(placed.leg, loss)
        finally:
            placed.leg.leave("the request has ended")

    async def _serve(self, placed: Placed, need: Need) -> None:
        """From the reservation to the end of the leg. Raises LegLost, MeshError."""
        leg, prefill, reservation = placed.leg, placed.prefill, placed.reservation
        tried: frozenset[WorkerKey] = frozenset()
        while prefill is not None:
            end, committed = await self._prefill(leg, prefill, reservation)
            if committed:
                break
            tried |= {prefill.key}
            self._timings.failed()
            self._timings.parts.num_retries += 1
            logger.warning("%s attempt %d: %s", leg.wire_id, leg.attempt, end.problem)
            prefill = self._next_prefill(leg, need, tried) if end.retryable else None
            retried = await self._submit_again(leg, prefill)
            if retried is None:
                break
            reservation = retried
        result = await leg.ended
        if result is not None:
            raise result
        self._check_outbox()

    async def _prefill(
        self, leg: DecodeLeg, prefill: PrefillTarget, reservation: common_pb2.Reservation
    ) -> tuple[PrefillEnd, bool]:
        """One Prefill call; the flag says that nothing is left to do for prefill: committed, or the leg has ended.

        Where first tokens end every choice, the call may still report: then decode has been told already and needs no Cancel.
        """
        call = PrefillCall(prefill, lambda first: self._on_first_tokens(leg, first))
        self._timings.prefilling(call.worker_id)
        request = self._job.token_request(self._book.history())
        running = asyncio.create_task(call.run(leg, self._job, reservation, request), name=f"prefill {leg.wire_id}")
        try:
            await asyncio.wait((running, leg.ended), return_when=asyncio.FIRST_COMPLETED)
            if self.is_winding_up:
                await asyncio.wait((running,), timeout=OUTCOME_GRACE_S)
            if not running.done():
                return PrefillEnd(None, None), True
            return running.result(), self._is_committed(leg, prefill, call, running.result())
        finally:
            running.cancel()

    def _is_committed(self, leg: DecodeLeg, prefill: PrefillTarget, call: PrefillCall, end: PrefillEnd) -> bool:
        """Does decode go on by itself? Raises LegLost when it does but the first tokens, which only prefill had, did not come."""
        if end.problem is None:
            if not call.got_first_tokens:
                raise LegLost(f"prefill worker {call.worker_id} reported a hand-off without first tokens")
            self._note_handoff(leg, prefill, end)
            return True
        if leg.ended.done():
            return True
        if leg.started and not call.got_first_tokens:
            raise LegLost(f"{end.problem}; the hand-off was done, its first tokens are lost")
        return leg.started

    async def _submit_again(self, leg: DecodeLeg, prefill: PrefillTarget | None) -> common_pb2.Reservation | None:
        """The next attempt at the same reservation; None when decode runs already: the last attempt has succeeded after all."""
        try:
            return await leg.submit(Mode.REMOTE if prefill is not None else Mode.LOCAL, self._book.history())
        except FailedPrecondition as error:
            if leg.delivered:
                return None
            raise LegLost(f"attempt {leg.attempt} on {leg.info.worker_id} was refused: {error.message}") from error
        except MeshError as error:
            raise LegLost(f"attempt {leg.attempt} on {leg.info.worker_id} failed: {error.message}") from error

    def _next_prefill(self, leg: DecodeLeg, need: Need, tried: frozenset[WorkerKey]) -> PrefillTarget | None:
        """Several choices under way can only be continued LOCAL."""
        if self._job.num_choices > 1 and self._book.anything_emitted:
            return None
        return self._placer.next_prefill(leg, need, tried)

    def _on_first_tokens(self, leg: DecodeLeg, first: prefill_pb2.FirstTokens) -> None:
        self._timings.prefilled(first.timings)
        wants_logprobs = self._job.sampling.HasField("logprobs")
        spans = [
            Span(token.choice, token.index, [token.token_id], (token.logprobs,) if wants_logprobs else (), token.finish_reason)
            for token in first.tokens
        ]
        leg.deliver_first(spans)

    def _note_handoff(self, leg: DecodeLeg, prefill: PrefillTarget, end: PrefillEnd) -> None:
        if end.outcome is None:
            return
        if end.outcome.status == prefill_pb2.HANDOFF_STATUS_FINISHED:
            if not end.outcome.message:  # else decode could not be told, and holds its blocks until we cancel
                leg.finished()
            return
        parts = self._timings.parts
        parts.kv_exposed_ns = end.outcome.kv_exposed_ns
        parts.kv_bytes, parts.transport = end.outcome.kv_bytes, end.outcome.transport
        decode = leg.worker.current
        holders = (prefill.incarnation,) if decode is None else (prefill.incarnation, decode)
        self._placer.remember(self._job, holders)

    def _note_loss(self, leg: DecodeLeg, loss: LegLost) -> None:
        parts = self._timings.parts
        logger.warning("%s: %s; %d tokens are out, it goes on elsewhere", leg.wire_id, loss, self._book.num_tokens)
        self._timings.failed()
        self._book.drop_early()
        self._avoid = frozenset({(leg.worker.address, leg.info.epoch)})
        if self._book.anything_emitted:
            self._kind = kind_of(leg.info)
        parts.num_resubmissions += 1
        if parts.num_resubmissions > self._core.config.max_resubmissions:
            raise Unavailable(
                f"lost {parts.num_resubmissions} times (max_resubmissions), the last time because {loss}; resume it"
            )

    def _check_outbox(self) -> None:
        """A client that is too slow has ended the leg: the error waits in the outbox, and the book must not be filled further."""
        if self.outbox.failed:
            raise Unavailable("the client's stream has failed")

    def _need(self) -> Need:
        return Need(
            job=self._job,
            emitted=self._book.history(),
            sink=self,
            timings=self._timings,
            kind=self._kind,
            avoid=self._avoid,
        )
