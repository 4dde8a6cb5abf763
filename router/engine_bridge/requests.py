"""The requests that run on an engine, and what the router still has to be sent of them.

Submit ─► EngineRequest: one Generate call for each `EngineCall` ─► Outbox ─► the frames of Attach

A request lives as long as the Attach stream: output is not kept for a stream that comes back, since the two ends share a process.
An engine that breaks off costs the router nothing but a new dispatch, with the prompt and the output so far.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from pdmesh.runtime.errors import MeshError, Unavailable, as_mesh_error, error_from_rpc
from pdmesh.third_party.vllm import vllm_engine_pb2 as pb
from pdmesh.v1 import common_pb2, decode_pb2
from router.engine_bridge.translation import EngineCall, finish_reason_of, logprobs_of

Generate = Callable[[pb.GenerateRequest, float | None], "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]"]

logger = logging.getLogger(__name__)


class Outbox:
    """Collect output and events for the next frame."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self._outputs: list[decode_pb2.SequenceOutput] = []
        self._started: list[EngineRequest] = []
        self._events: list[decode_pb2.RequestEvent] = []

    def put(self, output: decode_pb2.SequenceOutput) -> None:
        """Add new output of one choice."""
        self._outputs.append(output)
        self.news.set()

    def started(self, request: EngineRequest) -> None:
        """Report the first token of `request`, with the times until the frame goes out."""
        self._started.append(request)
        self.news.set()

    def failed(self, request_id: str, attempt: int, error: MeshError) -> None:
        """Report that a request ended with `error`."""
        event = decode_pb2.RequestEvent(
            request_id=request_id,
            attempt=attempt,
            kind=decode_pb2.REQUEST_EVENT_KIND_FAILED,
            code=error.code.value[0],
            message=error.message,
        )
        self._events.append(event)
        self.news.set()

    def take(self, frame: decode_pb2.Frame) -> decode_pb2.Frame:
        """Move everything into `frame`, and return it."""
        now_ns = time.monotonic_ns()
        frame.outputs.extend(self._outputs)
        frame.events.extend(self._events)
        frame.events.extend(request.started_event(now_ns) for request in self._started)
        self._outputs, self._started, self._events = [], [], []
        self.news.clear()
        return frame


@dataclass(eq=False)
class EngineRequest:
    """Hold one submitted request, from Submit until every choice has ended or it was given up."""

    submit: decode_pb2.SubmitRequest
    received_ns: int
    outbox: Outbox
    on_end: Callable[[EngineRequest], None]
    on_first: Callable[[EngineRequest], None]
    on_step: Callable[[EngineRequest, int, int], None]
    calls: Sequence[EngineCall] = ()
    sent_ns: int = 0
    first_ns: int = 0
    num_cached_tokens: int = 0
    next_index: dict[int, int] = field(default_factory=dict)  # of each unfinished choice
    answered: asyncio.Event = field(default_factory=asyncio.Event)  # the engine has sent something, or the request has ended
    failure: MeshError | None = None
    is_submitted: bool = False  # a failure before is the answer to Submit
    is_over: bool = False
    _task: asyncio.Task[None] | None = None

    @property
    def request_id(self) -> str:
        """Return the id by which the router knows it."""
        return self.submit.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Return the tokens that its calls compute before their first ones, all together."""
        return sum(call.num_prompt_tokens for call in self.calls)

    @property
    def num_context_tokens(self) -> int:
        """Return the tokens that its unfinished choices attend to."""
        num_prompt = len(self.submit.request.prompt_token_ids)
        return sum(num_prompt + index for index in self.next_index.values())

    def start(self, calls: Sequence[EngineCall], generate: Generate, timeout_s: float | None) -> None:
        """Begin to compute. `timeout_s`: seconds until the request's deadline."""
        self.calls = calls
        self.next_index = dict(choice for call in calls for choice in call.choices)
        self.sent_ns = time.monotonic_ns()
        self._task = asyncio.create_task(self._run(generate, timeout_s), name=f"engine request {self.request_id}")

    def stop(self, failure: MeshError | None = None) -> None:
        """End it, and report `failure` to the router; its calls are cancelled. Idempotent."""
        if self.is_over:
            return
        self.is_over, self.failure = True, failure
        self.answered.set()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        if failure is not None and self.is_submitted:
            self.outbox.failed(self.request_id, self.submit.attempt, failure)
        self.on_end(self)

    def started_event(self, now_ns: int) -> decode_pb2.RequestEvent:
        """Return the event STARTED; `now_ns`: when it is handed over. The engine does not say how long a prompt waits there: all
        time until the first token counts as prefill."""
        timings = common_pb2.PrefillTimings(
            reserve_ns=self.sent_ns - self.received_ns,
            prefill_compute_ns=self.first_ns - self.sent_ns,
            return_ns=now_ns - self.first_ns,
            service_ns=now_ns - self.received_ns,
            num_cached_tokens=self.num_cached_tokens,
            num_computed_tokens=max(0, self.num_prompt_tokens - self.num_cached_tokens),
        )
        return decode_pb2.RequestEvent(
            request_id=self.request_id,
            attempt=self.submit.attempt,
            kind=decode_pb2.REQUEST_EVENT_KIND_STARTED,
            local_prefill=timings,
            num_cached_tokens=self.num_cached_tokens,
        )

    async def _run(self, generate: Generate, timeout_s: float | None) -> None:
        """Run all calls; the first that fails ends the others."""
        try:
            async with asyncio.TaskGroup() as group:
                for call in self.calls:
                    group.create_task(self._follow(call, generate, timeout_s))
        except* Exception as errors:  # noqa: BLE001 - whatever ends a call ends the request
            self.stop(_failure_of(errors.exceptions[0]))
        else:
            self.stop(self._unfinished())

    def _unfinished(self) -> MeshError | None:
        if not self.next_index:
            return None
        return Unavailable(f"the engine ended the stream before the output of {len(self.next_index)} choices")

    async def _follow(self, call: EngineCall, generate: Generate, timeout_s: float | None) -> None:
        messages = generate(call.request, timeout_s)
        try:
            async for message in messages:
                self._take(call, message)
        finally:
            messages.cancel()

    def _take(self, call: EngineCall, message: pb.GenerateResponse) -> None:
        """Take one message of a call. Per-token path."""
        if message.HasField("chunk"):
            if message.chunk.token_ids:
                self._take_chunk(self._choice(call, message.chunk.index), message.chunk)
        else:
            self._take_end(self._choice(call, message.complete.index), message.complete)

    def _choice(self, call: EngineCall, index: int) -> int:
        choice = call.choices[index][0] if index < len(call.choices) else -1
        if choice not in self.next_index:
            raise Unavailable(f"the engine sent output {index} of {len(call.choices)}, or after its end")
        return choice

    def _take_chunk(self, choice: int, chunk: pb.GenerateStreamChunk) -> None:
        if not self.first_ns:
            self._note_first(chunk)
        sampling, first_index = self.submit.request.sampling, self.next_index[choice]
        self.next_index[choice] += len(chunk.token_ids)
        self.on_step(self, choice, len(chunk.token_ids))
        self.outbox.put(
            decode_pb2.SequenceOutput(
                request_id=self.request_id,
                choice=choice,
                first_index=first_index,
                token_ids=chunk.token_ids,
                logprobs=logprobs_of(chunk.output_logprobs, sampling.logprobs) if sampling.HasField("logprobs") else (),
            )
        )

    def _note_first(self, chunk: pb.GenerateStreamChunk) -> None:
        self.first_ns = time.monotonic_ns()
        self.num_cached_tokens = min(chunk.cached_tokens, self.num_prompt_tokens)
        self.answered.set()
        self.on_first(self)
        self.outbox.started(self)

    def _take_end(self, choice: int, complete: pb.GenerateComplete) -> None:
        """End a choice. Its tokens came in chunks; vLLM repeats the last of them here."""
        finish_reason = finish_reason_of(complete)
        if finish_reason is None:
            raise Unavailable(f"the engine ended the request by itself: {complete.finish_reason or 'no finish_reason'}")
        first_index = self.next_index.pop(choice)
        self.answered.set()
        self.outbox.put(
            decode_pb2.SequenceOutput(
                request_id=self.request_id, choice=choice, first_index=first_index, finish_reason=finish_reason
            )
        )


def _failure_of(error: BaseException) -> MeshError:
    failure = error_from_rpc(error) if isinstance(error, grpc.aio.AioRpcError) else as_mesh_error(error)
    if failure.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED):
        return failure
    return Unavailable(f"the engine answered {failure.code.name}: {failure.message}")
