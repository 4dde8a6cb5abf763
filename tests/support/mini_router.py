"""A router's side that is as small as can be: it attaches, remembers what it is told, and drives requests by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc.aio

from pdmesh.v1 import common_pb2, decode_pb2, mesh_pb2, prefill_pb2
from tests.support.waiting import eventually
from tests.support.worker_mesh import REMOTE, Peer


@dataclass
class Seen:
    """What a router has been told about one request."""

    tokens: dict[int, dict[int, int]] = field(default_factory=dict)  # choice → index → token
    finished: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, dict[int, common_pb2.Logprobs]] = field(default_factory=dict)
    events: list[decode_pb2.RequestEvent] = field(default_factory=list)
    repeated: int = 0

    def note(self, choice: int, index: int, token: int) -> None:
        known = self.tokens.setdefault(choice, {})
        assert known.get(index, token) == token, f"choice {choice} index {index}: {known[index]} became {token}"
        self.repeated += index in known
        known[index] = token

    def output(self, choice: int = 0) -> list[int]:
        """Tokens in order; a gap is an error."""
        known = self.tokens.get(choice, {})
        indexes = sorted(known)
        assert indexes == list(range(indexes[0], indexes[0] + len(indexes))) if indexes else True, f"a gap in {indexes}"
        return [known[index] for index in indexes]

    def kinds(self) -> list[int]:
        return [event.kind for event in self.events]

    @property
    def failure(self) -> decode_pb2.RequestEvent | None:
        failed = [event for event in self.events if event.kind == decode_pb2.REQUEST_EVENT_KIND_FAILED]
        return failed[0] if failed else None

    @property
    def started(self) -> decode_pb2.RequestEvent | None:
        started = [event for event in self.events if event.kind == decode_pb2.REQUEST_EVENT_KIND_STARTED]
        return started[0] if started else None


class MiniRouter:
    """Attaches to decode workers and remembers what they say; drives requests by hand or as a router would."""

    def __init__(self, router_id: str = "router-1") -> None:
        self.router_id = router_id
        self.seen: dict[str, Seen] = {}
        self.frames: list[decode_pb2.Frame] = []
        self.ended: list[grpc.StatusCode] = []
        self.silent = False
        self.waiting: set[str] = set()  # named in heartbeats
        self.paused = asyncio.Event()
        self.paused.set()
        self._call: grpc.aio.StreamStreamCall[decode_pb2.AttachRequest, decode_pb2.Frame] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def of(self, request_id: str) -> Seen:
        return self.seen.setdefault(request_id, Seen())

    async def attach(self, peer: Peer, resume: Sequence[tuple[str, int, int]] = (), *, period_ms: int = 0) -> None:
        points = [decode_pb2.ResumePoint(request_id=r, choice=c, next_index=i) for r, c, i in resume]
        call = peer.decode.Attach()
        await call.write(decode_pb2.AttachRequest(router_id=self.router_id, resume_points=points, period_ms=period_ms))
        self._call = call
        num_frames = len(self.frames)
        self._tasks += [asyncio.create_task(self._read(call)), asyncio.create_task(self._beat(call))]
        await eventually(lambda: len(self.frames) > num_frames or self.ended)

    async def detach(self) -> None:
        """Breaks the stream."""
        if self._call is not None:
            self._call.cancel()
            self._call = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _beat(self, call: grpc.aio.StreamStreamCall[decode_pb2.AttachRequest, decode_pb2.Frame]) -> None:
        while True:
            await asyncio.sleep(0.05)
            if call.done():
                return
            if not self.silent:
                await call.write(decode_pb2.AttachRequest(router_id=self.router_id, waiting_request_ids=self.waiting))

    async def _read(self, call: grpc.aio.StreamStreamCall[decode_pb2.AttachRequest, decode_pb2.Frame]) -> None:
        while True:
            await self.paused.wait()
            try:
                frame = await call.read()
            except grpc.aio.AioRpcError:
                frame = None
            if not isinstance(frame, decode_pb2.Frame):
                self.ended.append(await call.code())
                return
            self.take(frame)

    def take(self, frame: decode_pb2.Frame) -> None:
        self.frames.append(frame)
        for output in frame.outputs:
            seen = self.of(output.request_id)
            for offset, token in enumerate(output.token_ids):
                seen.note(output.choice, output.first_index + offset, token)
                if output.logprobs:
                    seen.logprobs.setdefault(output.choice, {}).setdefault(output.first_index + offset, output.logprobs[offset])
            if output.finish_reason:
                seen.finished[output.choice] = output.finish_reason
        for event in frame.events:
            self.of(event.request_id).events.append(event)

    async def submit(
        self,
        peer: Peer,
        request_id: str,
        request: common_pb2.TokenRequest,
        *,
        mode: mesh_pb2.PrefillMode.ValueType = REMOTE,
        attempt: int = 1,
        time_left_ms: int = 0,
        epoch: int = 0,
        identity: common_pb2.Identity | None = None,
    ) -> common_pb2.Reservation:
        self.waiting.add(request_id)
        response = await peer.decode.Submit(
            decode_pb2.SubmitRequest(
                request_id=request_id,
                router_id=self.router_id,
                attempt=attempt,
                mode=mode,
                request=request,
                time_left_ms=time_left_ms,
                epoch=epoch,
                identity=identity,
            )
        )
        return response.reservation

    async def prefill(
        self,
        prefiller: Peer,
        decoder: Peer,
        request_id: str,
        request: common_pb2.TokenRequest,
        reservation: common_pb2.Reservation,
        *,
        time_left_ms: int = 0,
    ) -> tuple[prefill_pb2.FirstTokens | None, prefill_pb2.HandoffOutcome]:
        """Runs the prefill leg to its outcome, and notes the first tokens."""
        call = prefiller.prefill.Prefill(
            prefill_pb2.PrefillRequest(
                request_id=request_id,
                request=request,
                reservation=reservation,
                identity=decoder.info.identity,
                time_left_ms=time_left_ms,
            )
        )
        first = None
        async for event in call:
            if event.HasField("outcome"):
                return first, event.outcome
            first = event.first_tokens
            self.note_first(request_id, first)
        raise AssertionError("the stream ended without an outcome")

    def note_first(self, request_id: str, first: prefill_pb2.FirstTokens) -> None:
        seen = self.of(request_id)
        for token in first.tokens:
            seen.note(token.choice, token.index, token.token_id)
            if token.HasField("logprobs"):
                seen.logprobs.setdefault(token.choice, {})[token.index] = token.logprobs
            if token.finish_reason:
                seen.finished[token.choice] = token.finish_reason

    async def generate(
        self, prefiller: Peer, decoder: Peer, request_id: str, request: common_pb2.TokenRequest
    ) -> tuple[Seen, prefill_pb2.HandoffOutcome]:
        """One separated request from Submit to its last token."""
        reservation = await self.submit(decoder, request_id, request)
        _, outcome = await self.prefill(prefiller, decoder, request_id, request, reservation)
        await self.until_finished(request_id, request.sampling.n)
        return self.of(request_id), outcome

    async def until_finished(self, request_id: str, n: int = 1) -> None:
        await eventually(lambda: len(self.of(request_id).finished) == n)
