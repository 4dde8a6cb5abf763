"""The trace of a request at its router: which spans there are, whose children, how long; and which traces are kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from pdmesh.runtime.errors import ResourceExhausted
from pdmesh.runtime.telemetry.propagation import SpanContext, inject
from pdmesh.runtime.telemetry.spans import Kind, Span
from pdmesh.runtime.telemetry.tracing import Tracing
from pdmesh.v1 import common_pb2, mesh_pb2
from router.fleet.worker import Dispatched
from router.lifecycle.hedging import HedgeLimits
from router.telemetry.timings import MAX_PARTS, LiveSpans, RequestTimings
from tests.router.mesh import Mesh, expected, request, running_mesh
from tests.runtime.telemetry.collected import Collected
from tests.support.waiting import eventually

REMOTE, LOCAL = mesh_pb2.PREFILL_MODE_REMOTE, mesh_pb2.PREFILL_MODE_LOCAL
Metadata = tuple[tuple[str, str], ...]


@dataclass
class Traced:
    """A mesh whose router's spans are collected."""

    mesh: Mesh
    client_stream: Collected

    async def ask(self, message: mesh_pb2.GenerateRequest, metadata: Metadata = ()) -> mesh_pb2.Timings:
        timings = mesh_pb2.Timings()
        async for response in self.mesh.stub.Generate(message, timeout=30, metadata=metadata):
            if response.HasField("completed"):
                timings = response.completed.timings
        await self.root()
        return timings

    async def root(self, count: int = 1) -> Span:
        """The latest `generate`, when there are so many."""
        await eventually(lambda: sum(span.name.startswith("generate") for span in self.client_stream.spans) >= count)
        return [span for span in self.client_stream.spans if span.name.startswith("generate")][-1]

    def all(self, name: str) -> list[Span]:
        return sorted((span for span in self.client_stream.spans if span.name == name), key=lambda span: span.start_ns)

    def one(self, name: str) -> Span:
        (span,) = self.all(name)
        return span

    def parent(self, span: Span) -> str:
        """Its parent's name."""
        (name,) = [each.name for each in self.client_stream.spans if each.context.span_id == span.parent_id]
        return name


@asynccontextmanager
async def traced(
    folder: Path, *, share: float = 1.0, prefill: int = 1, decode: int = 1, **settings: object
) -> AsyncIterator[Traced]:
    async with running_mesh(folder, prefill=prefill, decode=decode, **settings) as mesh:
        client_stream = Collected()
        mesh.router.core.tracing = Tracing(client_stream, share=share)
        yield Traced(mesh, client_stream)
        await mesh.until_whole()


def duration_ns(*spans: Span) -> int:
    return sum(span.end_ns - span.start_ns for span in spans)


async def test_spans_of_a_separated_request_last_as_long_as_its_timings_say(model_folder: Path) -> None:
    async with traced(model_folder) as seen:
        timings = await seen.ask(request(mode=REMOTE))
        root = await seen.root()
        assert (root.name, root.kind, root.parent_id) == ("generate tiny", Kind.SERVER, 0)
        assert duration_ns(root) == timings.total_ns
        for name, part_ns in {
            "route": timings.route_ns,
            "admission": timings.admission_queue_ns,
            "reserve": timings.reserve_ns,
            "first_token_return": timings.first_token_return_ns,
        }.items():
            assert duration_ns(*seen.all(name)) == part_ns, name
        parents = {name: seen.parent(seen.all(name)[0]) for name in ("route", "admission", "attempt", "reserve", "prefill")}
        assert parents == {
            "route": "generate tiny", "admission": "generate tiny", "attempt": "generate tiny", "reserve": "attempt",
            "prefill": "attempt",
        }  # fmt: skip
        attempt = seen.one("attempt")
        assert attempt.attributes == {
            "pdmesh.attempt": 1, "pdmesh.mode": "remote", "pdmesh.decode.worker": "d0", "pdmesh.prefill.worker": "p0",
        }  # fmt: skip
        assert (seen.one("reserve").kind, seen.one("prefill").kind) == (Kind.CLIENT, Kind.CLIENT)
        assert seen.one("prefill").attributes["pdmesh.kv.bytes"] == 4096
        assert not any(span.is_failed or span.is_open for span in seen.client_stream.spans)
        (context,) = seen.mesh["d0"].contexts
        assert context is not None
        assert (context.call, context.attempt) == (seen.one("reserve").context, attempt.context)


async def test_what_the_conventions_ask_for(model_folder: Path) -> None:
    async with traced(model_folder) as seen:
        message = request(max_tokens=6, temperature=0.5, n=2, seed=2**64 - 1)
        message.options.request_id, message.options.slo_ttft_ms, message.options.slo_tpot_ms = "mine", 60_000, 60_000
        timings = await seen.ask(message)
        attributes = (await seen.root()).attributes
        assert {key: value for key, value in attributes.items() if key.startswith("gen_ai.")} == {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "pdmesh",
            "gen_ai.request.model": "tiny",
            "gen_ai.response.model": "tiny",
            "gen_ai.response.id": "mine",
            "gen_ai.request.max_tokens": 6,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": attributes["gen_ai.request.top_p"],
            "gen_ai.request.top_k": 0,
            "gen_ai.request.seed": str(2**64 - 1),
            "gen_ai.request.choice.count": 2,
            "gen_ai.usage.input_tokens": 50,
            "gen_ai.usage.output_tokens": 12,
            "gen_ai.response.finish_reasons": ["length", "length"],
            "gen_ai.response.time_to_first_chunk": timings.ttft_ns / 1e9,
        }
        assert attributes["pdmesh.slo.met"] is True
        assert (attributes["pdmesh.decode.worker"], attributes["pdmesh.prefill.worker"]) == ("d0", "p0")


async def test_a_session_is_an_attribute_of_the_request_alone(model_folder: Path) -> None:
    async with traced(model_folder) as seen:
        message = request(mode=LOCAL)
        message.options.session_id = "agent-42"
        await seen.ask(message)
        root = await seen.root()
        assert root.attributes["session.id"] == "agent-42"
        others = [span for span in seen.all("attempt") if "agent-42" in f"{span.attributes} {span.name}"]
        assert seen.all("attempt") and not others


async def test_local_has_an_attempt_without_prefill(model_folder: Path) -> None:
    async with traced(model_folder) as seen:
        await seen.ask(request(mode=LOCAL))
        assert seen.one("attempt").attributes["pdmesh.mode"] == "local"
        assert not seen.all("prefill")


async def test_a_failed_prefill_is_an_attempt_and_a_retry(model_folder: Path) -> None:
    async with traced(model_folder, prefill=2) as seen:
        seen.mesh["p0"].prefill_plan = seen.mesh["p1"].prefill_plan = ["break"]
        timings = await seen.ask(request())
        failed, *others = seen.all("attempt")
        assert failed.is_failed and not others[-1].is_failed and len(others) == timings.num_retries
        assert duration_ns(*seen.all("retry")) == timings.retry_ns > 0
        retry = seen.all("retry")[0]
        assert (retry.start_ns, retry.end_ns) == (failed.start_ns, failed.end_ns)
        assert "broke the stream" in str(retry.attributes["pdmesh.reason"])
        assert seen.all("prefill")[0].is_failed
        assert {seen.parent(span) for span in seen.all("prefill")} == {"attempt"}


async def test_a_refused_submit_is_an_attempt_too(model_folder: Path) -> None:
    async with traced(model_folder, decode=2) as seen:
        for name in ("d0", "d1"):
            seen.mesh[name].submit_errors = [ResourceExhausted("no room", retry_delay_s=0.1)]
        await seen.ask(request())
        attempts = seen.all("attempt")
        assert [span.is_failed for span in attempts] == [True, True, False]
        assert [span.problem for span in attempts[:2]] == ["no room", "no room"]


async def test_a_lost_decode_worker_is_followed_by_an_attempt_elsewhere(model_folder: Path) -> None:
    async with traced(model_folder, decode=2) as seen:
        for name in ("d0", "d1"):
            seen.mesh[name].pause_at = 5
        asking = asyncio.create_task(seen.ask(request(max_tokens=20)))
        decodes = [seen.mesh["d0"], seen.mesh["d1"]]
        await eventually(lambda: any(worker.held for worker in decodes))
        first, other = decodes if decodes[0].held else decodes[::-1]
        await eventually(lambda: sum(map(len, next(iter(first.held.values())).tokens.values())) >= 5)
        other.pause_at = None
        first.fail(first.submits[0].request_id, grpc.StatusCode.UNAVAILABLE)
        timings = await asking
        assert timings.num_resubmissions == 1
        assert [span.attributes["pdmesh.decode.worker"] for span in seen.all("attempt")] == [first.name, other.name]
        assert not seen.all("retry"), "the client had its first token: no part of TTFT"
        assert (await seen.root()).attributes["pdmesh.resubmissions"] == 1


def prefer(mesh: Mesh, name: str) -> None:
    other = "p1" if name == "p0" else "p0"
    mesh.router.core.fleet.workers[mesh[other].address].dispatched(Dispatched(tokens=10_000))


async def test_a_hedge_fences_the_attempt_before(model_folder: Path) -> None:
    async with traced(model_folder, prefill=2) as seen:
        seen.mesh.router.core.hedging.limits = HedgeLimits(unknown_s=0.3)
        prefer(seen.mesh, "p0")
        seen.mesh["p0"].prefill_plan = ["mute"]
        timings = await seen.ask(request())
        late, hedge = seen.all("attempt")
        assert late.is_failed and not hedge.is_failed
        assert [span.attributes["pdmesh.prefill.worker"] for span in (late, hedge)] == ["p0", "p1"]
        assert duration_ns(seen.one("retry")) == timings.retry_ns and "fenced" in str(
            seen.one("retry").attributes["pdmesh.reason"]
        )
        assert duration_ns(seen.all("reserve")[-1]) == timings.reserve_ns
        assert late.end_ns <= hedge.start_ns


async def test_a_hedge_that_is_refused_leaves_the_attempt_as_it_was(model_folder: Path) -> None:
    async with traced(model_folder, prefill=2) as seen:
        seen.mesh.router.core.hedging.limits = HedgeLimits(unknown_s=0.3)
        prefer(seen.mesh, "p0")
        seen.mesh["p0"].prefill_plan = ["late"]
        seen.mesh["d0"].frames_mute = True
        asking = asyncio.create_task(seen.ask(request()))
        await eventually(lambda: len(seen.mesh["d0"].submits) == 2)
        seen.mesh["d0"].frames_mute = False
        timings = await asking
        late, refused = seen.all("attempt")
        assert not late.is_failed and refused.is_failed
        assert not seen.all("retry") and timings.retry_ns == 0
        assert duration_ns(seen.all("reserve")[0]) == timings.reserve_ns
        assert late.attributes["pdmesh.prefill.worker"] == "p0" and not seen.one("prefill").is_failed


async def test_a_move_is_a_span_with_the_next_stay_in_it(model_folder: Path) -> None:
    async with traced(model_folder, decode=2) as seen:
        for name in ("d0", "d1"):
            seen.mesh[name].pause_at = 5
        asking = asyncio.create_task(seen.ask(request(max_tokens=40)))
        decodes = [seen.mesh["d0"], seen.mesh["d1"]]
        await eventually(lambda: any(worker.held for worker in decodes))
        first, other = decodes if decodes[0].held else decodes[::-1]
        await eventually(lambda: sum(map(len, next(iter(first.held.values())).tokens.values())) >= 5)
        other.pause_at = None
        first.draining = True
        await asking
        move = seen.one("migrate")
        assert (move.attributes["pdmesh.from.worker"], move.attributes["pdmesh.to.worker"]) == (first.name, other.name)
        assert move.attributes["pdmesh.moved"] is True and "about to leave" in str(move.attributes["pdmesh.reason"])
        stay = seen.all("attempt")[-1]
        assert seen.parent(stay) == "migrate" and seen.parent(move) == "generate tiny"
        assert {seen.parent(span) for span in seen.all("prefill")} == {"attempt"}


async def test_a_client_that_leaves_has_made_no_error(model_folder: Path) -> None:
    async with traced(model_folder, share=0.0) as seen:
        seen.mesh["d0"].pause_at = 3
        seen.mesh.router.core.tracing = Tracing(seen.client_stream, share=1.0)
        call = seen.mesh.stub.Generate(request(max_tokens=20))
        async for message in call:
            if message.delta.token_ids:
                break
        call.cancel()
        root = await seen.root()
        assert (root.attributes["error.type"], root.is_failed) == ("CANCELLED", False)
        assert root.attributes["gen_ai.response.finish_reasons"] == ["unfinished"]
        assert root.attributes["pdmesh.ttft_ms"]
        assert all(not span.is_open for span in seen.client_stream.spans)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (request(max_tokens=0), "INVALID_ARGUMENT"),
        (request(stop=["secret" * 1000]), "INVALID_ARGUMENT"),
        (request(constraint=common_pb2.Constraint(json_schema='{"secret": ')), "INVALID_ARGUMENT"),
        (mesh_pb2.GenerateRequest(model="?" * 500, text="secret words"), "NOT_FOUND"),
    ],
)
async def test_what_is_refused_has_a_trace_without_its_text(
    model_folder: Path, message: mesh_pb2.GenerateRequest, code: str
) -> None:
    async with traced(model_folder) as seen:
        with pytest.raises(grpc.aio.AioRpcError):
            await seen.ask(message)
        root = await seen.root()
        assert (root.is_failed, root.attributes["error.type"]) == (True, code)
        shown = f"{root.attributes} {root.name} {root.problem}"
        assert "secret" not in shown and len(shown) < 2000


async def test_a_callers_trace_goes_on(model_folder: Path) -> None:
    async with traced(model_folder, share=0.0) as seen:
        caller = SpanContext(0xABC, 0xDEF, True, "vendor=1")
        await seen.ask(request(), inject(caller))
        root = await seen.root()
        assert (root.context.trace_id, root.parent_id, root.context.state) == (0xABC, 0xDEF, "vendor=1")
        (context,) = seen.mesh["d0"].contexts
        assert context is not None and context.call.trace_id == 0xABC and context.call.state == "vendor=1"


@pytest.mark.parametrize("traceparent", ["00-abc", f"00-{0:032x}-{1:016x}-01", "x" * 300])
async def test_a_malformed_context_is_no_error(model_folder: Path, traceparent: str) -> None:
    async with traced(model_folder) as seen:
        await seen.ask(request(), (("traceparent", traceparent),))
        assert (await seen.root()).parent_id == 0


async def test_a_trace_that_is_not_sampled_is_kept_when_its_request_misses_an_objective(model_folder: Path) -> None:
    async with traced(model_folder, share=0.0) as seen:
        fine, bad = request(mode=REMOTE), request(mode=REMOTE, seed=6)
        async for _ in seen.mesh.stub.Generate(fine, timeout=30):
            pass
        assert seen.client_stream.spans == []
        bad.options.slo_ttft_ms = 1
        seen.mesh["p0"].prefill_plan = ["break"]  # takes longer than a millisecond
        await seen.ask(bad)
        root = await seen.root()
        assert root.attributes["pdmesh.slo.met"] is False
        assert {span.context.trace_id for span in seen.client_stream.spans} == {root.context.trace_id}
        assert {"route", "admission", "attempt", "reserve", "prefill"} <= set(seen.client_stream.names)
        trace_id = root.context.trace_id.to_bytes(16, "big")
        await eventually(lambda: seen.mesh["p0"].kept == seen.mesh["d0"].kept == [trace_id])


async def test_errors_are_kept(model_folder: Path) -> None:
    async with traced(model_folder, share=0.0) as seen:
        with pytest.raises(grpc.aio.AioRpcError):
            await seen.ask(request(max_tokens=0))
        assert (await seen.root()).is_failed


async def test_off_sends_no_metadata_and_gives_the_same_tokens(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        assert (await mesh.generate(request())).tokens() == expected(8)
        assert mesh["d0"].contexts == [None]


def test_very_many_parts_are_counted_only() -> None:
    client_stream = Collected()
    tracing = Tracing(client_stream)
    root = tracing.begin("generate", None, start_ns=0)
    timings = RequestTimings(0, spans=LiveSpans(tracing, root, set()))
    for number in range(MAX_PARTS + 5):
        timings.queued(number)
    assert len(client_stream.spans) == MAX_PARTS and root.attributes["pdmesh.dropped_parts"] == 5


@pytest.mark.parametrize("is_accepted", [True, False])
def test_a_token_that_comes_while_a_hedge_is_asked_for_is_the_late_attempts(is_accepted: bool) -> None:
    client_stream = Collected()
    tracing = Tracing(client_stream)
    timings = RequestTimings(0, spans=LiveSpans(tracing, tracing.begin("generate", None, start_ns=0), set()))
    timings.submitting({"pdmesh.attempt": 1})
    timings.submitted(REMOTE, "d", 0)
    timings.prefilling("p")
    before = (timings.submit_ns, timings.call_ns, timings.parts.retry_ns)
    timings.submitting({"pdmesh.attempt": 2}, "late")
    timings.first_token()
    if is_accepted:
        timings.submitted(LOCAL, "d", 0)
    else:
        timings.withdrawn("it has just committed")
    timings.spans.filled()
    assert (timings.submit_ns, timings.call_ns, timings.parts.retry_ns) == before
    assert "retry" not in client_stream.names
    first = next(span for span in client_stream.spans if span.name == "attempt" and span.attributes["pdmesh.attempt"] == 1)
    assert not first.is_failed and first.end_ns == timings.first_received_ns


def test_withdrawn_timings_are_those_of_the_attempt_before() -> None:
    timings = RequestTimings(0)
    timings.submitting()
    timings.submitted(REMOTE, "d", 0)
    timings.prefilling("p")
    before = (timings.attempt_ns, timings.submit_ns, timings.call_ns, timings.first_local, timings.parts.retry_ns)
    timings.submitting(reason="late")
    assert timings.parts.retry_ns > 0
    timings.withdrawn("it has just committed")
    after = (timings.attempt_ns, timings.submit_ns, timings.call_ns, timings.first_local, timings.parts.retry_ns)
    assert after == before
