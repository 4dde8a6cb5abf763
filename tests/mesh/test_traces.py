"""The trace of a request through real processes, at a real receiver of OTLP: spans say what the client is told of its time."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from pdmesh.client.client import AsyncClient, Delta
from pdmesh.errors import MeshError
from pdmesh.launcher.plan import LocalMeshConfig
from tests.mesh.checks import assert_whole
from tests.support import trace_figures
from tests.support.trace_figures import DELAY_MS, DELAYS, Delay, medians, moved, under_load
from tests.support.traced_mesh import DECODES, PREFILLS, Traced, traced_mesh, unseen
from tests.support.traces import LOCAL_SPANS, REMOTE_SPANS

ROUNDING_MS = 0.001

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def traced(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Traced]:
    """Two workers of each kind, all of them with failpoints in their engines; what dies is started again."""
    config = LocalMeshConfig(model=str(tiny), port=0, http_port=0, stop_grace_s=30)
    async with traced_mesh(config, tmp_path_factory.mktemp("failpoints")) as traced:
        yield traced


@pytest_asyncio.fixture(loop_scope="module")
async def client(traced: Traced) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(traced.mesh.router_addresses) as client:
        yield client
    traced.disarm()
    await assert_whole(traced.mesh)


async def test_a_separated_request_through_all_processes(traced: Traced, client: AsyncClient) -> None:
    result = await traced.ask(client)
    trace = await traced.trace(result.request_id, REMOTE_SPANS)
    assert {trace.path(span) for span in trace.spans} == trace_figures.REMOTE
    timings = result.timings
    assert trace.root.attributes["pdmesh.kv.bytes"] == timings.kv_bytes > 0
    processes = {span.process for span in trace.spans}
    assert processes == {trace.root.process, timings.prefill_worker, timings.decode_worker}
    assert {span.resource["service.name"] for span in trace.spans} == {"pdmesh-router", "pdmesh-worker"}


async def test_durations_are_those_of_the_timings(traced: Traced, client: AsyncClient) -> None:
    result = await traced.ask(client)
    trace, timings = await traced.trace(result.request_id, REMOTE_SPANS), result.timings
    assert trace.root.duration_ns == timings.total_ns
    durations = {name: sum(span.duration_ns for span in trace.all(name)) for name in trace.names}
    assert {name: durations[name] for name in durations if name in {
        "route", "admission", "reserve", "prefill.queue", "prefill.compute", "first_token_return", "kv.exposed", "decode.queue",
    }} == {
        "route": timings.route_ns,
        "admission": timings.admission_queue_ns,
        "reserve": timings.reserve_ns,
        "prefill.queue": timings.prefill_queue_ns,
        "prefill.compute": timings.prefill_compute_ns,
        "first_token_return": timings.first_token_return_ns,
        "kv.exposed": timings.kv_exposed_ns,
        "decode.queue": timings.decode_queue_ns,
    }  # fmt: skip


async def test_a_local_request(traced: Traced, client: AsyncClient) -> None:
    result = await traced.ask(client, "local")
    trace = await traced.trace(result.request_id, LOCAL_SPANS)
    assert {trace.path(span) for span in trace.spans} == trace_figures.LOCAL
    (submit,), (queue,), (compute,) = trace.all("submit"), trace.all("prefill.queue"), trace.all("prefill.compute")
    timings = result.timings
    assert (submit.duration_ns, queue.duration_ns) == (timings.reserve_ns, timings.prefill_queue_ns)
    assert submit.end_ns == queue.start_ns and queue.end_ns <= compute.start_ns + 1e6


async def test_a_prefill_that_fails_is_retried_in_sight(traced: Traced, client: AsyncClient) -> None:
    traced.arm(PREFILLS, "prefill.accepted", "error@1")
    result = await traced.ask(client)
    num_retries = result.timings.num_retries
    trace = await traced.trace(
        result.request_id, {"retry", "decode"}, lambda trace: len(trace.of("prefill", "prefill")) >= num_retries
    )
    failed = [span for span in trace.all("attempt") if span.is_failed]
    assert len(failed) == num_retries == len(trace.all("retry")) >= 1
    assert sum(span.duration_ns for span in trace.all("retry")) == result.timings.retry_ns
    broken = [span for span in trace.of("prefill", "prefill") if span.is_failed]
    assert len(broken) == len(failed)
    assert {trace.parent(trace.parent(span)).span_id for span in broken} == {span.span_id for span in failed}


async def test_what_a_cancel_leaves(traced: Traced, client: AsyncClient) -> None:
    number = next(traced.numbers)
    stream = client.generate_stream(
        unseen(number, 60), mode="remote", max_tokens=1900, ignore_eos=True, request_id=f"r{number}", timeout=60
    )
    async with stream:
        async for event in stream:
            if isinstance(event, Delta) and event.first_index:  # the first token comes from prefill
                break
    trace = await traced.trace(f"r{number}", {"decode", "generate tiny"})
    assert (trace.root.attributes["error.type"], trace.root.is_failed) == ("CANCELLED", False)
    (decode,) = trace.all("decode")
    assert decode.attributes["gen_ai.response.finish_reasons"] == ("unfinished",) and decode.attributes["pdmesh.reason"]


async def test_what_an_error_leaves(traced: Traced, client: AsyncClient) -> None:
    """A deadline that the router keeps: a client's own would end the call at both ends at once."""
    traced.arm(PREFILLS, "engine.compute", "delay:2000")
    async with httpx.AsyncClient(timeout=60) as http:
        body = {"model": "tiny", "prompt": unseen(next(traced.numbers), 200), "max_tokens": 8}
        headers = {"X-Request-Id": "late", "X-Request-Timeout-Ms": "500", "X-Prefill-Mode": "remote"}
        answer = await http.post(f"{traced.mesh.http_urls[0]}/v1/completions", json=body, headers=headers)
        assert answer.status_code == 504
    trace = await traced.trace("late", {"attempt", "reserve", "prefill"})
    assert (trace.root.is_failed, trace.root.attributes["error.type"]) == (True, "DEADLINE_EXCEEDED")
    assert all(span.end_ns <= trace.root.end_ns for span in trace.spans if span.process == trace.root.process)


async def test_what_is_refused_has_a_trace_without_a_word_of_it(traced: Traced, client: AsyncClient) -> None:
    with pytest.raises(MeshError):
        await client.generate("never to be seen", model="nobody", timeout=5)
    spans = await asyncio.to_thread(
        traced.receiver.wait, lambda spans: any(span.attributes.get("error.type") == "NOT_FOUND" for span in spans)
    )
    assert "never to be seen" not in repr(spans) and "nobody" not in repr(spans)


async def test_parts_add_up_to_ttft_for_each_of_many_requests_under_load(traced: Traced, client: AsyncClient) -> None:
    """Parts that follow one another share a reading of the clock: whoever had the processor meanwhile, nothing lies between."""
    off = []
    for result, trace in await under_load(traced, client, 200):
        assert trace.ttft_ms == result.timings.ttft_ns / 1e6
        if abs(trace.missing_ms) > ROUNDING_MS:
            off.append(f"{result.request_id}: {trace.missing_ms:.2f} of {trace.ttft_ms:.2f} ms: {trace.ttft_parts_ms()}")
    assert not off, "\n".join([f"{len(off)} of 200", *off[:20]])


@pytest.mark.parametrize("delay", DELAYS, ids=lambda delay: delay.part)
async def test_a_delay_moves_its_own_part_alone(traced: Traced, client: AsyncClient, delay: Delay) -> None:
    """Medians of a few prompts of one step each; what other processes do to this machine meanwhile is in both."""
    parts = await moved(traced, client, delay)
    assert parts[delay.part] > 0.9 * DELAY_MS
    assert all(abs(parts[name]) < DELAY_MS / 2 for name in parts if name != delay.part), parts


async def test_a_failed_attempt_is_retry_and_nothing_else(traced: Traced, client: AsyncClient) -> None:
    before = await medians(traced, client)
    traced.arm(PREFILLS, "prefill.accepted", "error@1")
    traced.arm(DECODES, "decode.reserved", f"delay:{DELAY_MS}@1")
    result = await traced.ask(client, length=40, max_tokens=3)
    trace = await traced.trace(result.request_id, {"retry", "decode", "first_token_return"})
    parts = trace.ttft_parts_ms()
    assert parts["retry"] > 0.9 * DELAY_MS
    assert all(parts[name] - before[name] < DELAY_MS / 2 for name in parts if name != "retry"), (parts, before)


async def test_steps_link_to_the_requests_that_they_served(traced: Traced, client: AsyncClient) -> None:
    result = await traced.ask(client, max_tokens=600)
    trace = await traced.trace(result.request_id, REMOTE_SPANS)
    (decode,) = trace.all("decode")
    batches = [
        span
        for span in await asyncio.to_thread(
            traced.receiver.wait, lambda spans: any((decode.trace_id, decode.span_id) in span.links for span in spans)
        )
        if (decode.trace_id, decode.span_id) in span.links
    ]
    assert {span.name for span in batches} == {"decode.step"} and {span.process for span in batches} == {decode.process}
    first, last = decode.attributes["pdmesh.first_step"], decode.attributes["pdmesh.last_step"]
    assert all(span.attributes["pdmesh.first_step"] <= last and span.attributes["pdmesh.last_step"] >= first for span in batches)  # type: ignore[operator]


async def test_a_request_that_moves(traced: Traced, client: AsyncClient) -> None:
    """Its worker is told to stop. Last: it has to start again."""
    result = await trace_figures.moved_one(traced, client)
    assert {result.left, result.finished_by} == set(DECODES)
    assert await trace_figures.missing(traced, result.request_id, trace_figures.MOVED) == set()
    trace = await traced.trace(result.request_id, {"decode"}, lambda trace: len(trace.all("decode")) == 2)
    (move,) = trace.all("migrate")
    assert (move.attributes["pdmesh.from.worker"], move.attributes["pdmesh.moved"]) == (result.left, True)
    assert {span.process for span in trace.all("decode")} == set(DECODES)
