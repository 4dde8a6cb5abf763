"""One request from admission to completion: what the client's stream is made of."""

import asyncio
import time
from collections.abc import AsyncGenerator

from pdmesh.runtime import failpoints
from pdmesh.runtime.errors import DeadlineExceeded, InvalidArgument, MeshError, ResourceExhausted
from pdmesh.v1 import common_pb2, mesh_pb2
from router.context import RouterContext
from router.flow_control.slo_admission import Ticket
from router.flow_control.ttft_predictor import flow_item_of, num_emitted
from router.lifecycle.decode_stage import RequestDispatcher
from router.lifecycle.output import Output, OutputTracker, ResumeMismatch
from router.routing.cost_model import Overhead, Prediction
from router.routing.decisions import Decision
from router.telemetry.request_trace import Yield
from router.telemetry.timings import RequestTimings, now_ns
from router.telemetry.traffic import ModelTraffic, Visit
from router.tokenization.prepared_request import PreparedRequest

# What a request that has ended teaches the policy: how far predictions were off, what hand-offs cost, how long outputs get.


def learn(
    core: RouterContext, prepared: PreparedRequest, decision: Decision | None, timings: mesh_pb2.Timings, num_tokens: int
) -> None:
    """`num_tokens` of all choices. A request that was tried again or lost teaches nothing about a smooth one."""
    core.output_lengths.observe(prepared.model.name, prepared.tenant, num_tokens // prepared.num_choices)
    if decision is None or timings.num_retries or timings.num_resubmissions or prepared.emitted:
        return
    core.decisions.compare(decision)
    chosen, tpot_s = decision.placement.chosen, decision.observed_tpot_s
    if chosen is not None and chosen.prediction is not None:
        _count(core.traffic.of(prepared.model.name), decision, chosen.prediction)
        if tpot_s:
            core.overheads.observe_tpot(chosen.decode, chosen.prediction.steps_tpot_s, tpot_s)
    seen = _overhead(decision, timings)
    if seen is not None:
        core.overheads.observe(decision.placement.prefill, decision.placement.decode, seen)


def _count(traffic: ModelTraffic, decision: Decision, predicted: Prediction) -> None:
    """What came beside what had been predicted, for the autoscaler."""
    if decision.observed_ttft_s is not None:
        traffic.ttft.add(decision.observed_ttft_s, predicted.ttft_s)
    if decision.observed_tpot_s is not None:
        traffic.tpot.add(decision.observed_tpot_s, predicted.tpot_s)


def _overhead(decision: Decision, timings: mesh_pb2.Timings) -> Overhead | None:
    """All of TTFT that the worker's queue and steps did not take, and what the hand-off added behind it."""
    ttft_s = decision.observed_ttft_s
    if ttft_s is None:
        return None
    on_worker_ns = timings.prefill_queue_ns + timings.prefill_compute_ns
    after_ns = timings.kv_exposed_ns + timings.decode_queue_ns if decision.placement.prefill is not None else 0
    return Overhead(max(0.0, ttft_s - on_worker_ns / 1e9), after_ns / 1e9)


# How long a complete answer waits for the rest of its timings. The report is on its way already: it takes a millisecond or two.
SETTLE_S = 0.1


class Request:
    """Owns a place in admission and a course; `close` gives both up, as often as one likes."""

    def __init__(self, core: RouterContext, prepared: PreparedRequest, timings: RequestTimings) -> None:
        self.prepared = prepared
        self._core = core
        self._timings = timings
        self._tracker = OutputTracker(prepared.num_choices, prepared.emitted)
        self._output = Output(prepared, self._tracker)
        self._dispatcher = RequestDispatcher(core, prepared, self._tracker, timings, self._output.render)
        self._ticket: Ticket | None = None
        self._visit: Visit | None = None
        self._task: asyncio.Task[None] | None = None
        self._submitted = False
        self._failed = False
        self.is_complete = False  # the last message was made

    async def messages(self) -> AsyncGenerator[mesh_pb2.GenerateResponse, None]:
        """`started`, deltas, `completed`. Raises MeshError. However it ends, the request's work ends with it."""
        try:
            ended = self._replay()
            self._arrive()
            await self._admit()
            self._task = self._core.background.spawn(self._dispatcher.run(), f"request {self.prepared.request_id}")
            yield self._started()
            for message in ended:
                yield message
            take, handed = self._dispatcher.client_stream.take, self._timings.handed
            while not self._output.done:
                for message in await take():
                    delta = message.delta
                    handed(delta.choice, len(delta.token_ids))
                    yield message
            await self._settle()
            yield self._completed()
        except MeshError as error:
            self._failed = not isinstance(error, DeadlineExceeded)
            if self._visit is not None and not self._submitted and isinstance(error, ResourceExhausted):
                self._visit.refused()
            raise
        finally:
            self.close()

    async def _settle(self) -> None:
        """A short answer can end before prefill's report of the hand-off has been read: the timings of `completed` need it."""
        if self._task is not None and self._dispatcher.is_winding_up:
            await asyncio.wait((self._task,), timeout=SETTLE_S)

    @property
    def num_generated(self) -> int:
        """Output tokens, without those that the client had before."""
        return self._tracker.num_tokens - num_emitted(self.prepared)

    @property
    def brought(self) -> Yield:
        """What has come of it so far."""
        drafts = self._dispatcher.drafts
        return Yield(self._output.num_tokens, self._tracker.finish_reasons, drafts.num_drafted, drafts.num_accepted)

    def fail(self, error: MeshError) -> None:
        """End the stream with `error` after what is queued."""
        self._dispatcher.client_stream.fail(error)

    def close(self) -> None:
        """Give place and workers back. The workers are told in the background."""
        if self._task is not None and not self._dispatcher.is_winding_up:
            self._task.cancel()
        if self._visit is not None:
            self._visit.ended(self.num_generated, self._timings.parts.prefill_cached_tokens)
        if self._ticket is not None:
            self._core.flow_control.leave(self._ticket, self._used_tokens())
            self._ticket = None
            self._core.num_token_mismatches += self._tracker.num_mismatches
            self._core.fleet.openings.fire()

    def _used_tokens(self) -> int:
        """What its tenant pays for: what was generated, and the prompt once a worker was asked to compute it: leaving before the
        first token gives no work away. Only what the mesh failed to answer at all is free."""
        generated = self._tracker.num_tokens
        for_nothing = self._failed and generated <= num_emitted(self.prepared)
        return len(self.prepared.prompt) + generated if self._submitted and not for_nothing else 0

    def _replay(self) -> list[mesh_pb2.GenerateResponse]:
        try:
            return self._output.replay(self.prepared.emitted)
        except ResumeMismatch as error:
            field = f"resume.emitted[{error.choice}].token_ids"
            raise InvalidArgument(field, f"{field}: {error}; send what was received, no more") from error

    def _arrive(self) -> None:
        prepared = self.prepared
        self._visit = self._core.traffic.of(prepared.model.name).arrive(
            len(prepared.prompt),
            time.monotonic(),
            is_batch=prepared.priority == common_pb2.PRIORITY_BATCH,
            is_new=prepared.attempt == 0,
        )

    async def _admit(self) -> None:
        began_ns = now_ns()
        try:
            ticket = self._ticket = await self._core.flow_control.enter(flow_item_of(self._core, self.prepared))
            await failpoints.hit_async("router.admission")
        finally:
            self._timings.queued(began_ns)
        self._timings.on_submitting = lambda: self._submitting(ticket)

    def _teach(self) -> None:
        """A smooth request says whether admission's forecast was right."""
        first_ns, parts = self._timings.first_received_ns, self._timings.parts
        if self._ticket is not None and first_ns is not None and not (parts.num_retries or self.prepared.emitted):
            self._core.flow_control.admission.answered(self._ticket, first_ns / 1e9)

    def _submitting(self, ticket: Ticket) -> None:
        self._submitted = True
        if self._visit is not None:
            self._visit.placed()
        self._core.flow_control.placed(ticket)

    def _started(self) -> mesh_pb2.GenerateResponse:
        started = mesh_pb2.Started(
            request_id=self.prepared.request_id,
            seed=self.prepared.sampling.seed,
            model=self.prepared.model.name,
            num_prompt_tokens=len(self.prepared.prompt),
        )
        return mesh_pb2.GenerateResponse(started=started)

    def _completed(self) -> mesh_pb2.GenerateResponse:
        timings = self._timings.message()
        self.is_complete = True
        self._teach()
        usage = mesh_pb2.Usage(
            prompt_tokens=len(self.prepared.prompt),
            completion_tokens=self._output.num_tokens,
            cached_tokens=min(timings.prefill_cached_tokens, len(self.prepared.prompt)),
            drafted_tokens=self._dispatcher.drafts.num_drafted,
            accepted_tokens=self._dispatcher.drafts.num_accepted,
        )
        learn(self._core, self.prepared, self._timings.decision, timings, self._output.num_tokens)
        return mesh_pb2.GenerateResponse(completed=mesh_pb2.Completed(usage=usage, timings=timings))
