"""The trace of a request through real processes, at a real receiver of OTLP: spans say what the client is told of its time."""

import asyncio
import os
import signal
import statistics
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from benchmarks.chaos.arming import Arming
from pdmesh.client import AsyncClient, Completed, Delta
from pdmesh.client_types import Generation
from pdmesh.errors import MeshError
from pdmesh.launcher import LocalMesh
from pdmesh.launcher_plan import LocalMeshConfig, ProcessPlan
from tests.mesh import oracle
from tests.mesh.checks import assert_whole
from tests.mesh.traces import LOCAL_SPANS, REMOTE_SPANS, Trace, trace_of
from tests.otlp_receiver import OtlpReceiver

pytestmark = pytest.mark.asyncio(loop_scope="module")
SLOW_ENGINE = Path(__file__).parent / "slow_engine"
PREFILLS, DECODES = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
DELAY_MS = 50
_numbers = count(9000)


@dataclass(frozen=True)
class Traced:
    """A mesh, its collector, and the failpoints of each process."""

    mesh: LocalMesh
    receiver: OtlpReceiver
    armings: dict[str, Arming]

    async def ask(self, client: AsyncClient, mode: str = "remote", *, length: int = 150, **options: object) -> Generation:
        """A prompt that nobody has seen; the request's name is that of the answer."""
        number = next(_numbers)
        settings = {"temperature": 0, "max_tokens": 16, "ignore_eos": True, "timeout": 60, **options}
        prompt = oracle.prompt_of(number, length)
        return await client.generate(prompt, mode=mode, request_id=f"r{number}", **settings)  # type: ignore[arg-type]

    async def trace(self, request_id: str, wanted: set[str], enough: Callable[[Trace], bool] = lambda _: True) -> Trace:
        return await trace_of(self.receiver, request_id, wanted, enough)

    def disarm(self) -> None:
        for arming in self.armings.values():
            for name in list(arming._armed):
                arming.disarm(name)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def traced(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Traced]:
    """Two workers of each kind, all of them with failpoints in their engines; what dies is started again."""
    folder = tmp_path_factory.mktemp("failpoints")
    armings = {name: Arming(folder / name) for name in ("router-0", *PREFILLS, *DECODES)}

    def adjust(plan: ProcessPlan) -> ProcessPlan:
        env = {**plan.env, **armings[plan.name].environment}
        if plan.name != "router-0":
            env["PYTHONPATH"] = f"{SLOW_ENGINE}{os.pathsep}{env['PYTHONPATH']}"
        return replace(plan, env=env)

    with OtlpReceiver() as receiver:
        config = LocalMeshConfig(
            model=str(tiny),
            num_prefill=2,
            num_decode=2,
            port=0,
            http_port=0,
            num_threads=1,
            stop_grace_s=30,
            router_args=("--policy=least-loaded", "--hedge-share=0", "--rebalance=off"),
            otlp_endpoint=receiver.endpoint,
            adjust=adjust,
        )
        async with LocalMesh(config) as mesh:
            yield Traced(mesh, receiver, armings)


@pytest_asyncio.fixture(loop_scope="module")
async def client(traced: Traced) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(traced.mesh.router_addresses) as client:
        yield client
    traced.disarm()
    await assert_whole(traced.mesh)


async def test_a_separated_request_through_all_processes(traced: Traced, client: AsyncClient) -> None:
    result = await traced.ask(client)
    trace = await traced.trace(result.request_id, REMOTE_SPANS)
    attempt, prefill = "generate@router/attempt@router", "generate@router/attempt@router/prefill@router/prefill@prefill"
    assert {trace.path(span) for span in trace.spans} == {
        "generate@router",
        "generate@router/route@router",
        "generate@router/admission@router",
        "generate@router/first_token_return@router",
        attempt,
        f"{attempt}/reserve@router",
        f"{attempt}/reserve@router/submit@decode",
        f"{attempt}/prefill@router",
        prefill,
        f"{prefill}/prefill.queue@prefill",
        f"{prefill}/prefill.compute@prefill",
        f"{prefill}/kv.push@prefill",
        f"{prefill}/kv.exposed@prefill",
        f"{attempt}/decode@decode",
        f"{attempt}/decode@decode/decode.queue@decode",
    }
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
    decode = "generate@router/attempt@router/decode@decode"
    assert {trace.path(span) for span in trace.all("prefill.queue") + trace.all("prefill.compute")} == {
        f"{decode}/prefill.queue@decode",
        f"{decode}/prefill.compute@decode",
    }
    assert not {"prefill", "kv.push", "kv.exposed", "decode.queue"} & trace.names


async def test_a_prefill_that_fails_is_retried_in_sight(traced: Traced, client: AsyncClient) -> None:
    for name in PREFILLS:
        traced.armings[name].arm("prefill.accepted", "error@1")
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
    number = next(_numbers)
    stream = client.generate_stream(
        oracle.prompt_of(number, 60), mode="remote", max_tokens=1900, ignore_eos=True, request_id=f"r{number}", timeout=60
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
    for name in PREFILLS:
        traced.armings[name].arm("engine.compute", "delay:2000")
    async with httpx.AsyncClient(timeout=60) as http:
        body = {"model": "tiny", "prompt": oracle.prompt_of(next(_numbers), 200), "max_tokens": 8}
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
    """Within 2 % or a millisecond."""
    gate = asyncio.Semaphore(8)

    async def one(number: int) -> tuple[Generation, Trace]:
        async with gate:
            mode = ("remote", "local")[number % 2]
            result = await traced.ask(client, mode, length=40 + 13 * (number % 17), max_tokens=4)
        return result, await traced.trace(result.request_id, REMOTE_SPANS if mode == "remote" else LOCAL_SPANS)

    off = []
    for result, trace in await asyncio.gather(*(one(number) for number in range(200))):
        ttft_ms = result.timings.ttft_ns / 1e6
        assert trace.root.attributes["pdmesh.ttft_ms"] == ttft_ms
        missing_ms = ttft_ms - sum(trace.ttft_parts_ms().values())
        if abs(missing_ms) > max(1.0, 0.02 * ttft_ms):
            off.append(f"{result.request_id}: {missing_ms:.2f} of {ttft_ms:.2f} ms: {trace.ttft_parts_ms()}")
    assert not off, "\n".join([f"{len(off)} of 200", *off[:20]])


@pytest.mark.parametrize(
    ("part", "processes", "point"),
    [
        ("route", ("router-0",), "router.route"),
        ("admission", ("router-0",), "router.admission"),
        ("reserve", DECODES, "decode.reserved"),
        ("prefill.queue", PREFILLS, "prefill.accepted"),
        ("prefill.compute", PREFILLS, "engine.compute"),
        ("first_token_return", ("router-0",), "router.first_token"),
        ("kv.exposed", PREFILLS, "push.before_commit"),
        ("decode.queue", DECODES, "engine.step"),
    ],
)
async def test_a_delay_moves_its_own_part_alone(
    traced: Traced, client: AsyncClient, part: str, processes: tuple[str, ...], point: str
) -> None:
    """Medians of a few prompts of one step each; what other processes do to this machine meanwhile is in both."""
    before = await _medians(traced, client)
    for name in processes:
        traced.armings[name].arm(point, f"delay:{DELAY_MS}")
    after = await _medians(traced, client)
    moved = {name: after[name] - before[name] for name in after}
    assert moved[part] > 0.9 * DELAY_MS
    assert all(abs(moved[name]) < DELAY_MS / 2 for name in moved if name != part), moved


async def _medians(traced: Traced, client: AsyncClient) -> dict[str, float]:
    parts: list[dict[str, float]] = []
    for _ in range(5):
        result = await traced.ask(client, length=40, max_tokens=3)
        trace = await traced.trace(result.request_id, REMOTE_SPANS)
        parts.append(trace.ttft_parts_ms() | trace.gap_parts_ms())
    return {name: statistics.median(each[name] for each in parts) for name in parts[0]}


async def test_a_failed_attempt_is_retry_and_nothing_else(traced: Traced, client: AsyncClient) -> None:
    before = await _medians(traced, client)
    for name in PREFILLS:
        traced.armings[name].arm("prefill.accepted", "error@1")
    for name in DECODES:
        traced.armings[name].arm("decode.reserved", f"delay:{DELAY_MS}@1")
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
    number, is_told = next(_numbers), False
    stream = client.generate_stream(
        oracle.prompt_of(number, 60), mode="remote", max_tokens=1900, ignore_eos=True, request_id=f"r{number}", timeout=100
    )
    for name in DECODES:
        traced.armings[name].arm("engine.step", "delay:5")  # a tiny model is done before anybody can move it
    left = ""
    async with stream:
        async for event in stream:
            if isinstance(event, Delta) and event.token_ids and not is_told:
                is_told, left = True, await _holder(traced)
                traced.mesh.kill(left, signal.SIGTERM)
            if isinstance(event, Delta) and event.first_index > 1000:
                traced.disarm()
            if isinstance(event, Completed):
                assert event.timings.decode_worker != left
    trace = await traced.trace(f"r{number}", {"migrate"}, lambda trace: len(trace.all("submit")) == 2)
    (move,) = trace.all("migrate")
    assert (move.attributes["pdmesh.from.worker"], move.attributes["pdmesh.moved"]) == (left, True)
    assert trace.parent(move) is trace.root
    inside = {trace.path(span) for span in trace.below(move)}
    stay = "generate@router/migrate@router/attempt@router"
    assert {stay, f"{stay}/reserve@router", f"{stay}/reserve@router/submit@decode"} <= inside
    trace = await traced.trace(f"r{number}", {"decode"}, lambda trace: len(trace.all("decode")) == 2)
    assert {span.process for span in trace.all("decode")} == set(DECODES)
    await traced.mesh.wait_ready(60)


async def _holder(traced: Traced) -> str:
    async with AsyncClient(traced.mesh.router_addresses) as client:
        while True:
            status = await client.status(timeout=10)
            for worker in status.workers:
                if worker.info.worker_id in DECODES and worker.load.num_running:
                    return worker.info.worker_id
            await asyncio.sleep(0.05)
