"""The prefill half of a stub worker: plays a plan, one word for each call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

import grpc

from pdmesh.runtime.errors import Aborted, DataLoss, ResourceExhausted, Unavailable
from pdmesh.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from tests.router import stub_model
from tests.support.waiting import eventually


class Decode(Protocol):
    """The decode stub that a reservation leads to."""

    @property
    def held(self) -> Mapping[str, object]:
        """Requests by id."""

    def commit(self, request_id: str) -> None:
        """The KV is there."""

    def forget(self, request_id: str) -> None:
        """Every choice ended with its first token."""


BY_TOKEN: dict[bytes, tuple[Decode, str]] = {}
"""How a stub prefill worker "pushes": the reservation's token leads to the decode stub and its request."""


class StubPrefill(prefill_pb2_grpc.PrefillServiceServicer):
    """`prefill_plan` is empty when all goes well, else one word for each call:

    reject | not_finite | mute | break | lie | late | fail | final | break_after_first | committed_but_failed | tokenless | untold
    unanswered (decode does not answer in time) | busy (the same on a machine that has no time for heartbeats, either)
    """

    watch_mute: bool

    def __init__(self) -> None:
        self.prefill_plan: list[str] = []
        self.prefills: list[prefill_pb2.PrefillRequest] = []
        self.embeds: list[prefill_pb2.EmbedPromptRequest] = []
        self.num_cancelled_prefills = 0

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: object) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        self.prefills.append(request)
        plan = self.prefill_plan.pop(0) if self.prefill_plan else "ok"
        try:
            if plan == "reject":
                raise ResourceExhausted("the queue is full")
            if plan == "not_finite":
                raise DataLoss.of_logits()
            if plan == "mute":
                await asyncio.Event().wait()
            if plan == "break":
                raise Aborted("the stub broke the stream")
            if plan == "lie":  # the commit went through, nobody hears of it
                self._push(request)
                raise Aborted("the stub broke the stream after the commit")
            if plan == "busy":
                self.watch_mute = True
                await asyncio.sleep(0.3)  # of 50 ms between heartbeats
                self.watch_mute = False
                await asyncio.sleep(0.1)
            if plan == "late":  # decode has sent everything before the first tokens are out
                self._push(request)
                await _drained(request)
            if plan not in ("fail", "final", "tokenless", "unanswered", "busy"):
                yield prefill_pb2.PrefillEvent(first_tokens=_first_tokens(request.request))
            if plan == "committed_but_failed":
                self._push(request)
            if plan in ("break_after_first", "committed_but_failed"):
                raise Aborted("the stub broke the stream")
            yield prefill_pb2.PrefillEvent(outcome=self._outcome(request, plan))
        except asyncio.CancelledError:
            self.num_cancelled_prefills += 1
            raise

    async def Embed(self, request: prefill_pb2.EmbedPromptRequest, context: object) -> prefill_pb2.EmbedPromptResponse:
        """The embedding is `stub_embedding`. Of the plan's words: reject, not_finite, mute, break."""
        self.embeds.append(request)
        plan = self.prefill_plan.pop(0) if self.prefill_plan else "ok"
        try:
            if plan == "reject":
                raise ResourceExhausted("the queue is full")
            if plan == "not_finite":
                raise DataLoss.of_logits()
            if plan == "mute":
                await asyncio.Event().wait()
            if plan == "break":
                raise Unavailable("the stub is going")
        except asyncio.CancelledError:
            self.num_cancelled_prefills += 1
            raise
        values = stub_embedding(request.request.prompt_token_ids, request.pooling)
        return prefill_pb2.EmbedPromptResponse(values=values, timings=TIMINGS)

    def _outcome(self, request: prefill_pb2.PrefillRequest, plan: str) -> prefill_pb2.HandoffOutcome:
        if plan in ("unanswered", "busy"):
            code = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
            status = prefill_pb2.HANDOFF_STATUS_FAILED
            return prefill_pb2.HandoffOutcome(
                status=status, message="the receiver did not answer in time", retryable=True, code=code
            )
        if plan in ("fail", "final"):
            status = prefill_pb2.HANDOFF_STATUS_FAILED
            return prefill_pb2.HandoffOutcome(status=status, message="as planned", retryable=plan == "fail")
        if request.request.sampling.max_tokens == 1 + max(stub_model.start_indexes(request.request).values()):
            if plan == "untold":
                return prefill_pb2.HandoffOutcome(status=prefill_pb2.HANDOFF_STATUS_FINISHED, message="decode could not be told")
            decode, request_id = BY_TOKEN[request.reservation.token]
            decode.forget(request_id)
            return prefill_pb2.HandoffOutcome(status=prefill_pb2.HANDOFF_STATUS_FINISHED)
        if plan != "late":
            self._push(request)
        status = prefill_pb2.HANDOFF_STATUS_COMMITTED
        return prefill_pb2.HandoffOutcome(status=status, kv_bytes=4096, transport="tcp", kv_exposed_ns=5000)

    def _push(self, request: prefill_pb2.PrefillRequest) -> None:
        decode, request_id = BY_TOKEN[request.reservation.token]
        decode.commit(request_id)


def stub_embedding(prompt: Sequence[int], pooling: common_pb2.Pooling.ValueType) -> list[float]:
    """What tells prompt and pooling; its length is not 1."""
    return [float(len(prompt)), float(prompt[0]), float(prompt[-1]), float(pooling)]


TIMINGS = common_pb2.PrefillTimings(
    prefill_queue_ns=1000, prefill_compute_ns=2000, return_ns=500, service_ns=4000, num_cached_tokens=16, num_computed_tokens=48
)


def _first_tokens(request: common_pb2.TokenRequest) -> prefill_pb2.FirstTokens:
    tokens = []
    for choice, index in stub_model.start_indexes(request).items():
        token_id = stub_model.token(request, choice, index)
        logprobs = stub_model.logprobs(request, token_id)
        tokens.append(
            prefill_pb2.FirstToken(
                choice=choice,
                index=index,
                token_id=token_id,
                logprobs=logprobs[0] if logprobs else None,
                finish_reason=stub_model.finish_reason(request, index),
            )
        )
    return prefill_pb2.FirstTokens(tokens=tokens, timings=TIMINGS)


async def _drained(request: prefill_pb2.PrefillRequest) -> None:
    """Until decode has sent all of the request's tokens, and the router has had a moment to read them."""
    decode, request_id = BY_TOKEN[request.reservation.token]
    await eventually(lambda: request_id not in decode.held)
    await asyncio.sleep(0.05)
