"""What workers say of a request over OTLP, below the spans of a router that is played by hand."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio
import pytest

from pdmesh.runtime import log
from pdmesh.runtime.telemetry.config import TelemetryConfig
from pdmesh.runtime.telemetry.propagation import SpanContext, inject, submit_metadata
from pdmesh.v1 import decode_pb2, mesh_pb2, prefill_pb2, worker_pb2
from tests.support.mini_router import MiniRouter
from tests.support.otlp_receiver import OtlpReceiver, Received
from tests.support.waiting import eventually
from tests.support.worker_mesh import LOCAL, REMOTE, Model, Peer, running_worker, token_request

PROMPT = list(range(10, 10 + 150))  # 64 tokens a step: three chunks
TRACE = 0xABC


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """What decode's requests log, as the worker's own handler writes it."""
    stream, logger = io.StringIO(), logging.getLogger("decode_service.requests")
    handler, level = logging.StreamHandler(stream), logger.level
    handler.setFormatter(log.JsonFormatter("worker"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)


@dataclass
class Pair:
    """Two workers that trace, and a router that has attached to one."""

    prefill: Peer
    decode: Peer
    router: MiniRouter
    receiver: OtlpReceiver
    is_sampled: bool = True

    def context(self, number: int) -> SpanContext:
        return SpanContext(TRACE, number, self.is_sampled)

    async def submit(self, request_id: str, max_tokens: int, mode: mesh_pb2.PrefillMode.ValueType) -> decode_pb2.SubmitResponse:
        """As attempt 1 (span 1), with the Submit call 2."""
        message = decode_pb2.SubmitRequest(
            request_id=request_id,
            router_id=self.router.router_id,
            attempt=1,
            mode=mode,
            request=token_request(PROMPT, max_tokens=max_tokens),
        )
        return await self.decode.decode.Submit(message, metadata=submit_metadata(self.context(2), self.context(1)))

    async def hand_off(self, request_id: str, max_tokens: int) -> tuple[prefill_pb2.FirstTokens, prefill_pb2.HandoffOutcome]:
        """The Prefill call is span 3."""
        granted = await self.submit(request_id, max_tokens, REMOTE)
        message = prefill_pb2.PrefillRequest(
            request_id=request_id,
            request=token_request(PROMPT, max_tokens=max_tokens),
            reservation=granted.reservation,
            identity=self.decode.info.identity,
        )
        events = [event async for event in self.prefill.prefill.Prefill(message, metadata=inject(self.context(3)))]
        self.router.note_first(request_id, events[0].first_tokens)
        return events[0].first_tokens, events[-1].outcome

    async def spans(self, *names: str) -> dict[str, Received]:
        """Once all of `names` are there; the first of each name, of this trace."""
        await eventually(lambda: set(names) <= {span.name for span in self.receiver.trace(f"{TRACE:032x}")}, timeout_s=20)
        return {span.name: span for span in reversed(self.receiver.trace(f"{TRACE:032x}"))}


@asynccontextmanager
async def pair(model: Model, receiver: OtlpReceiver, *, is_sampled: bool = True) -> AsyncIterator[Pair]:
    telemetry = TelemetryConfig(otlp_endpoint=receiver.endpoint)
    async with (
        running_worker(model, worker_id="p", roles=("prefill",), telemetry=telemetry) as prefill,
        running_worker(model, worker_id="d", roles=("decode",), telemetry=telemetry) as decode,
    ):
        router = MiniRouter()
        await router.attach(decode)
        try:
            yield Pair(prefill, decode, router, receiver, is_sampled)
        finally:
            await router.detach()


async def test_a_hand_off_in_spans(model: Model, receiver: OtlpReceiver) -> None:
    async with pair(model, receiver) as workers:
        first, outcome = await workers.hand_off("a", 12)
        await workers.router.until_finished("a")
        spans = await workers.spans("submit", "prefill", "prefill.queue", "prefill.compute", "kv.push", "kv.exposed", "decode")
        assert {name: span.process for name, span in spans.items()} == {
            "submit": "d", "prefill": "p", "prefill.queue": "p", "prefill.compute": "p", "kv.push": "p", "kv.exposed": "p",
            "decode": "d", "decode.queue": "d",
        }  # fmt: skip
        assert spans["submit"].parent_id == f"{2:016x}" and spans["decode"].parent_id == f"{1:016x}"
        assert spans["prefill"].parent_id == f"{3:016x}"
        assert {spans[name].parent_id for name in ("prefill.queue", "prefill.compute", "kv.push", "kv.exposed")} == {
            spans["prefill"].span_id
        }
        assert spans["decode.queue"].parent_id == spans["decode"].span_id
        timings = first.timings
        assert spans["prefill.queue"].duration_ns == timings.prefill_queue_ns
        assert spans["prefill.compute"].duration_ns == timings.prefill_compute_ns
        assert spans["kv.exposed"].duration_ns == outcome.kv_exposed_ns
        started = workers.router.of("a").started
        assert started is not None and spans["decode.queue"].duration_ns == started.decode_queue_ns
        assert started.kv_bytes == spans["decode"].attributes["pdmesh.kv.bytes"] == outcome.kv_bytes


async def test_chunks_and_parts_are_told_one_by_one(model: Model, receiver: OtlpReceiver) -> None:
    async with pair(model, receiver) as workers:
        _, outcome = await workers.hand_off("a", 12)
        compute = (await workers.spans("prefill.compute", "kv.push"))["prefill.compute"]
        assert [event.attributes["pdmesh.tokens"] for event in compute.events] == [64, 64, 22]
        assert compute.attributes["pdmesh.steps"] == 3
        steps = [event.attributes["pdmesh.step"] for event in compute.events]
        assert steps == sorted(steps) and len(set(steps)) == 3  # type: ignore[type-var]
        await workers.router.until_finished("a")
        pushes = [span for span in receiver.trace(f"{TRACE:032x}") if span.name == "kv.push"]
        assert sum(int(str(span.attributes["pdmesh.kv.bytes"])) for span in pushes) == outcome.kv_bytes
        assert {(span.attributes["pdmesh.kv.transport"], span.attributes["pdmesh.attempt"]) for span in pushes} == {("shm", 1)}
        layers = {
            layer
            for span in pushes
            for layer in range(*(int(str(span.attributes[f"pdmesh.kv.layer_{end}"])) for end in ("start", "end")))
        }
        assert layers == set(range(workers.decode.info.identity.num_layers))


async def test_a_local_stay_in_spans(model: Model, receiver: OtlpReceiver) -> None:
    async with pair(model, receiver) as workers:
        await workers.submit("a", 12, LOCAL)
        await workers.router.until_finished("a")
        spans = await workers.spans("submit", "prefill.queue", "prefill.compute", "decode")
        assert "decode.queue" not in spans
        assert {spans[name].parent_id for name in ("prefill.queue", "prefill.compute")} == {spans["decode"].span_id}
        started = workers.router.of("a").started
        assert started is not None
        assert spans["submit"].duration_ns == started.local_prefill.reserve_ns > 0
        assert spans["prefill.queue"].start_ns == spans["submit"].end_ns
        assert spans["prefill.queue"].duration_ns == started.local_prefill.prefill_queue_ns
        assert spans["prefill.compute"].duration_ns == started.local_prefill.prefill_compute_ns
        assert [event.attributes["pdmesh.step.prefill_tokens"] for event in spans["prefill.compute"].events] == [64, 64, 22]
        assert spans["decode"].start_ns == spans["submit"].start_ns
        attributes = spans["decode"].attributes
        assert (attributes["gen_ai.usage.output_tokens"], attributes["gen_ai.response.finish_reasons"]) == (12, ("length",))
        assert attributes["pdmesh.mode"] == "local" and attributes["pdmesh.steps"] == 12


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_a_stay_that_ends_as_it_begins_is_complete(model: Model, receiver: OtlpReceiver, max_tokens: int) -> None:
    async with pair(model, receiver) as workers:
        await workers.submit("a", max_tokens, LOCAL)
        await workers.router.until_finished("a")
        spans = await workers.spans("prefill.compute", "decode")
        assert spans["decode"].attributes["pdmesh.steps"] == max_tokens


async def test_steps_are_told_in_batches_that_name_whom_they_served(model: Model, receiver: OtlpReceiver) -> None:
    async with pair(model, receiver) as workers:
        await workers.submit("a", 300, LOCAL)
        await workers.router.until_finished("a")
        decode = (await workers.spans("decode"))["decode"]
        await eventually(
            lambda: any(
                decode.attributes["pdmesh.last_step"] == span.attributes["pdmesh.last_step"] for span in batches(receiver)
            )
        )
        found = batches(receiver)
        assert sum(int(str(span.attributes["pdmesh.steps"])) for span in found) == 299  # the first token came with the prompt
        assert all((decode.trace_id, decode.span_id) in span.links for span in found)
        assert all(span.parent_id == "" and span.trace_id != decode.trace_id for span in found)
        assert len({span.trace_id for span in found}) == len(found)


def batches(receiver: OtlpReceiver) -> list[Received]:
    return [span for span in receiver.spans if span.name == "decode.step"]


async def test_the_line_of_a_release_names_its_trace(model: Model, receiver: OtlpReceiver, logged: io.StringIO) -> None:
    """Whoever ends the request: a Cancel without a trace, as here, or the keeper of leases."""
    async with pair(model, receiver) as workers:
        await workers.submit("a", 200, LOCAL)
        await workers.decode.decode.Cancel(decode_pb2.CancelRequest(request_id="a", reason="the client left"))
        lines = [json.loads(line) for line in logged.getvalue().splitlines()]
        [released] = [line for line in lines if "released" in line["message"]]
        assert released["trace_id"] == f"{TRACE:032x}"


async def test_a_stay_that_is_cancelled_says_so(model: Model, receiver: OtlpReceiver) -> None:
    async with pair(model, receiver) as workers:
        await workers.submit("a", 1000, LOCAL)
        await eventually(lambda: workers.router.of("a").tokens)
        await workers.decode.decode.Cancel(decode_pb2.CancelRequest(request_id="a", reason="the client left"))
        decode = (await workers.spans("decode"))["decode"]
        assert decode.attributes["pdmesh.reason"] == "the client left" and not decode.is_failed
        assert decode.attributes["gen_ai.response.finish_reasons"] == ("unfinished",)


async def test_what_is_refused_is_told_as_an_error(model: Model, receiver: OtlpReceiver) -> None:
    async with pair(model, receiver) as workers:
        with pytest.raises(grpc.aio.AioRpcError):
            await workers.decode.decode.Submit(decode_pb2.SubmitRequest(request_id="?"), metadata=inject(workers.context(2)))
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in workers.prefill.prefill.Prefill(prefill_pb2.PrefillRequest(), metadata=inject(workers.context(3))):
                pass
        spans = await workers.spans("submit", "prefill")
        assert {(span.is_failed, span.attributes["error.type"]) for span in spans.values()} == {(True, "INVALID_ARGUMENT")}


async def test_what_was_not_sampled_comes_when_it_is_wanted(model: Model, receiver: OtlpReceiver) -> None:
    async with pair(model, receiver, is_sampled=False) as workers:
        await workers.hand_off("a", 12)
        await workers.router.until_finished("a")
        assert receiver.trace(f"{TRACE:032x}") == []
        for peer in (workers.prefill, workers.decode):
            await peer.control.KeepTraces(worker_pb2.KeepTracesRequest(trace_ids=[TRACE.to_bytes(16, "big")]))
        await workers.spans("submit", "prefill", "prefill.compute", "kv.push", "decode")


async def test_ids_that_are_none_are_refused(model: Model, receiver: OtlpReceiver) -> None:
    async with pair(model, receiver) as workers:
        for ids, named in (([b"short"], "trace_ids[0]"), ([bytes(16)] * 1025, "at most 1024")):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await workers.decode.control.KeepTraces(worker_pb2.KeepTracesRequest(trace_ids=ids))
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT and named in str(raised.value.details())


async def test_requests_without_a_context_are_not_followed(model: Model, receiver: OtlpReceiver) -> None:
    async with pair(model, receiver) as workers:
        await workers.router.submit(workers.decode, "a", token_request(PROMPT, max_tokens=3), mode=LOCAL)
        await workers.router.until_finished("a")
    assert {span.name for span in receiver.spans} <= {"decode.step"}
