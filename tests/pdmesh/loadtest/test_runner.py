"""The open loop, against real servers with known latencies. Bounds are one-sided: a busy machine only adds delay."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdmesh.errors import Overloaded
from pdmesh.loadtest.arrivals import fixed
from pdmesh.loadtest.measure import Measurement, measure
from pdmesh.loadtest.record import ObjectiveBook, Objectives, Outcome
from pdmesh.loadtest.runner import RunLog, Runner, RunSettings
from pdmesh.loadtest.targets.grpc import GrpcSettings, GrpcTarget
from pdmesh.loadtest.targets.openai import OpenAiSettings, OpenAiTarget
from pdmesh.loadtest.targets.target import Target, TargetError
from pdmesh.loadtest.workload import Arrivals, TrafficClass, Workload, plan
from pdmesh.v1.mesh_pb2 import GenerateRequest
from tests.pdmesh.fake_mesh import Script, start_router
from tests.support.loadtest_stub import Latencies, Stub, serve_grpc, serve_http
from tests.support.waiting import eventually

QUICK = Latencies(ttft_s=0.05, sigma=0.3, gap_s=0.01)
HANGS = Latencies(ttft_s=1000.0, sigma=0.0)
SHORT = (TrafficClass(input_tokens=fixed(20), output_tokens=fixed(4)),)
KINDS = pytest.mark.parametrize("kind", ["grpc", "http"])


@asynccontextmanager
async def serving(kind: str, latencies: Latencies, settings: OpenAiSettings | None = None) -> AsyncIterator[tuple[Stub, Target]]:
    stub = Stub(latencies)
    if kind == "grpc":
        grpc_server, address = await serve_grpc(stub)
        target: Target = GrpcTarget(address, GrpcSettings())
    else:
        http_server, url = await serve_http(stub)
        target = OpenAiTarget(url, settings or OpenAiSettings())
    try:
        await target.check()
        yield stub, target
    finally:
        await target.close()
        if kind == "grpc":
            await grpc_server.stop(None)
        else:
            http_server.close()


async def run(target: Target, workload: Workload, duration_s: float, settings: RunSettings | None = None) -> RunLog:
    return await Runner(target, settings or RunSettings()).run(plan(workload, 1, duration_s))


def constant(rate: float) -> Workload:
    return Workload(Arrivals("constant", rate), SHORT)


@KINDS
async def test_every_request_is_answered_and_none_faster_than_the_truth(kind: str) -> None:
    async with serving(kind, QUICK) as (_, target):
        log = await run(target, constant(40), 1.0)
    assert len(log.records) == 40
    for record in log.records:
        assert record.outcome is Outcome.OK and record.output_tokens == 4 and record.input_tokens == 20
        assert record.ttft_s is not None and record.ttft_s >= QUICK.ttft(record.session) - 0.001
        assert record.e2e_s is not None and record.e2e_s >= QUICK.ttft(record.session) + 3 * QUICK.gap_s - 0.001
        assert record.ttft_from_sent_s is not None and record.ttft_from_sent_s <= record.ttft_s
        assert record.sent_s >= record.scheduled_s


@KINDS
async def test_a_stall_of_the_server_is_in_all_requests_that_were_due_meanwhile(kind: str) -> None:
    """Coordinated omission: a tool that waits for answers sends nothing during a stall and reports one slow request."""
    latencies = Latencies(ttft_s=0.02, sigma=0.0, gap_s=0.001, stall_at_s=0.3, stall_s=0.8)
    async with serving(kind, latencies) as (stub, target):
        log = await run(target, constant(50), 1.5)
    assert stub.started is not None
    begin = stub.started - log.started_at + 0.3
    end = begin + 0.8
    during = [record for record in log.records if begin < record.scheduled_s < end]
    assert len(during) >= 39
    for record in during:
        assert record.ttft_s is not None and record.ttft_s >= end - record.scheduled_s + 0.02 - 0.001
    # Nobody waited for anybody: they were sent while nothing was answered.
    assert sum(record.sent_s < end for record in during) >= 30


async def test_a_stall_of_the_load_test_itself_is_in_the_latencies_and_makes_the_result_invalid() -> None:
    async with serving("grpc", QUICK) as (_, target):
        measurement = Measurement(constant(50), ObjectiveBook(Objectives()), 1, duration_s=1.0)
        asyncio.get_running_loop().call_later(0.4, time.sleep, 0.3)
        result = await measure(target, measurement)
    assert not result.valid and "late" in result.reasons[0]
    # A request was due every 20 ms: one of them right after the stall began.
    assert result.lateness.max >= 250 and result.summary.ttft.max >= result.lateness.max


async def test_what_is_due_beyond_the_bound_is_not_sent_and_never_waits() -> None:
    async with serving("grpc", HANGS) as (stub, target):
        log = await run(target, constant(20), 0.3, RunSettings(timeout_s=0.6, max_concurrency=2))
        await eventually(lambda: stub.num_running == 0)
    outcomes = [record.outcome for record in sorted(log.records, key=lambda record: record.scheduled_s)]
    assert outcomes == [Outcome.TIMEOUT] * 2 + [Outcome.NOT_SENT] * 4
    assert all(record.end_s - record.scheduled_s < 0.5 for record in log.records if record.outcome is Outcome.NOT_SENT)


@KINDS
async def test_cancelled_requests_end_at_the_server_too(kind: str) -> None:
    workload = Workload(Arrivals("constant", 20), SHORT, cancel_share=1.0, cancel_after_s=fixed(0.2))
    async with serving(kind, HANGS) as (stub, target):
        log = await run(target, workload, 0.3)
        await eventually(lambda: stub.num_running == 0)
    assert [record.outcome for record in log.records] == [Outcome.CANCELLED] * 6
    assert all(0.2 <= record.end_s - record.scheduled_s < 5 for record in log.records)


@pytest.mark.parametrize(
    ("kind", "settings", "num_input"),
    [("grpc", None, [20, 20 + 4 + 20, 20 + 8 + 40]), ("http", OpenAiSettings(endpoint="chat"), None)],
)
async def test_a_conversation_waits_for_its_answers_and_repeats_them(
    kind: str, settings: OpenAiSettings | None, num_input: list[int] | None
) -> None:
    workload = Workload(Arrivals("constant", 10), SHORT, turns=fixed(3), think_s=fixed(0.05))
    async with serving(kind, QUICK, settings) as (_, target):
        log = await run(target, workload, 0.1)
    assert [(record.turn, record.outcome) for record in log.records] == [(turn, Outcome.OK) for turn in range(3)]
    for before, after in zip(log.records, log.records[1:], strict=False):
        assert after.scheduled_s >= before.end_s + 0.05
    if num_input is not None:
        assert [record.input_tokens for record in log.records] == num_input


async def test_no_turn_starts_after_the_run() -> None:
    workload = Workload(Arrivals("constant", 10), SHORT, turns=fixed(3), think_s=fixed(10.0))
    async with serving("grpc", QUICK) as (_, target):
        log = await run(target, workload, 0.1, RunSettings(stop_turns_s=0.1))
    assert [record.turn for record in log.records] == [0]


async def test_refusals_and_a_router_that_is_not_there() -> None:
    router = await start_router(Script(failure=Overloaded("no room", retry_delay_s=1.0), num_failures=2))
    target = GrpcTarget(router.address, GrpcSettings())
    log = await run(target, constant(20), 0.2)
    await router.stop()
    assert sorted(record.outcome.value for record in log.records) == ["ok", "ok", "refused", "refused"]
    assert {record.error for record in log.records} == {"", "no room"}
    with pytest.raises(TargetError):
        await target.check()
    await target.close()


async def test_an_interrupted_run_reports_what_it_has() -> None:
    async with serving("grpc", Latencies(ttft_s=0.02, sigma=0.0)) as (stub, target):
        workload = Workload(Arrivals("constant", 50), (TrafficClass(output_tokens=fixed(2)), TrafficClass("long", 1)))
        measurement = Measurement(workload, ObjectiveBook(Objectives()), 1, duration_s=60.0)
        task = asyncio.create_task(measure(target, measurement))
        await asyncio.sleep(0.6)
        task.cancel()
        result = await task
        await eventually(lambda: stub.num_running == 0)
    assert result.interrupted and result.window.end_s < 30
    assert set(result.summary.outcomes) == {"ok"} and result.summary.num_requests > 3


async def test_another_run_has_other_prompts_and_the_same_seed_the_same() -> None:
    """Or the target's prefix cache would know the second run from the first."""
    router = await start_router(script := Script())
    target = GrpcTarget(router.address, GrpcSettings())
    for seed in (1, 2, 1):
        await measure(target, Measurement(constant(10), ObjectiveBook(Objectives()), seed, duration_s=0.1))
    await target.close()
    await router.stop()
    first, second, again = (list(request.tokens.ids) for request in script.requests if isinstance(request, GenerateRequest))
    assert first == again != second
    assert first[:4] != second[:4]


@pytest.mark.parametrize(("send", "told"), [(True, [(1, 0), (250, 41)]), (False, [(0, 0), (0, 0)])])
async def test_the_mesh_is_told_the_objectives_of_each_class(send: bool, told: list[tuple[int, int]]) -> None:
    router = await start_router(script := Script())
    target = GrpcTarget(router.address, GrpcSettings(send_objectives=send))
    book = ObjectiveBook(Objectives(ttft_ms=250, tpot_ms=40.6, e2e_ms=9e3), {"other": Objectives(ttft_ms=0.2)})
    classes = (TrafficClass(), TrafficClass("other", priority="batch"))
    workload = Workload(Arrivals("constant", 50), classes)
    await measure(target, Measurement(workload, book, 1, duration_s=0.3))
    await target.close()
    await router.stop()
    options = [request.options for request in script.requests]
    assert sorted({(of.slo_ttft_ms, of.slo_tpot_ms) for of in options}) == sorted(set(told))
    assert len({of.priority for of in options}) == 2
