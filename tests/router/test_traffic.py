"""What a router counts of its traffic: sums that only grow, and who waits now."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from pdmesh.client import service_config
from pdmesh.client.client import AsyncClient
from pdmesh.planning.capacity_load import class_of
from pdmesh.runtime.errors import InvalidArgument
from pdmesh.v1 import common_pb2, mesh_pb2, mesh_pb2_grpc
from router.api import frontend
from router.config import RouterConfig
from router.processes import replica_config
from router.telemetry.traffic import ModelTraffic, Traffic, traffic_status
from tests.router.mesh import Mesh, request, running_mesh
from tests.router.test_admission_mesh import read_all
from tests.support.waiting import eventually


async def counted(mesh: Mesh) -> mesh_pb2.TrafficStatus:
    status = await mesh.stub.GetStatus(mesh_pb2.GetStatusRequest())
    assert status.epoch and status.num_processes == 1
    return status.traffic[0]


def test_sums_of_arrivals_and_gaps() -> None:
    traffic = ModelTraffic(began=0.0)
    for at, tokens in ((1.0, 10), (1.5, 20), (3.5, 30)):
        traffic.arrive(tokens, at)
    assert (traffic.inputs.count, traffic.inputs.total, traffic.inputs.squared) == (3, 60.0, 1400.0)
    assert (traffic.gaps.count, traffic.gaps.total, traffic.gaps.squared) == (2, 2.5, 4.25)


def test_who_waits_and_for_how_long() -> None:
    traffic = ModelTraffic(began=0.0)
    batch = traffic.arrive(1, 1.0, is_batch=True)
    first, second = traffic.arrive(1, 2.0), traffic.arrive(1, 3.0)
    assert traffic.num_queued == 3 and traffic.queue_wait_s(5.0) == 3.0, "nobody promised batch anything"
    first.placed()
    first.placed()
    assert traffic.num_queued == 2 and traffic.queue_wait_s(5.0) == 2.0
    second.refused()
    second.ended(0, 0)
    assert traffic.num_queued == 1 and traffic.queue_wait_s(5.0) == 0.0 and traffic.num_refused == 1
    batch.ended(0, 0)
    assert traffic.num_queued == 0 and traffic.outputs.count == 0, "without a token there was no answer"


def test_an_answer_counts_once() -> None:
    traffic = ModelTraffic(began=0.0)
    visit = traffic.arrive(10, 1.0)
    for _ in range(2):
        visit.ended(7, 99)
    assert (traffic.outputs.count, traffic.outputs.total, traffic.outputs.squared) == (1, 7.0, 49.0)
    assert (traffic.answered_inputs, traffic.cached_tokens) == (10.0, 10.0), "no more can be cached than there is"


def test_what_is_tried_again_waits_and_arrives_no_more() -> None:
    traffic = ModelTraffic(began=0.0)
    traffic.arrive(10, 1.0).refused()
    again = traffic.arrive(10, 2.0, is_new=False)
    assert traffic.inputs.count == 1 and traffic.gaps.count == 0 and traffic.num_queued == 2
    again.placed()
    again.ended(7, 0)
    assert traffic.outputs.count == 1 and traffic.answered_inputs == 10.0, "its answer is one"
    traffic.arrive(20, 4.0)
    assert (traffic.inputs.count, traffic.gaps.total) == (2, 3.0), "the gap is one between requests that were new"


def test_the_message_says_all_of_it() -> None:
    traffic = Traffic(["m", "idle"], now=1.0)
    model = traffic.of("m")
    model.arrive(5, 2.0)
    model.ttft.add(0.2, 0.1)
    model.ttft.add(0.4, 0.1)
    told, idle = traffic_status(traffic, 3.5)
    assert (told.model, told.up_ms, told.num_arrived, told.num_queued, told.queue_wait_ms) == ("m", 2500, 1, 1, 1500)
    observed = told.ttft_observed
    assert observed.first == class_of(0.2) and sum(observed.counts) == 2
    assert observed.first + len(observed.counts) - 1 == class_of(0.4)
    assert (told.ttft_predicted.first, list(told.ttft_predicted.counts)) == (class_of(0.1), [2])
    assert (idle.model, idle.up_ms, idle.num_arrived) == ("idle", 2500, 0), "who has had nobody says so"


async def test_a_router_counts_its_requests(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        for _ in range(3):
            await mesh.generate(request(range(64, 64 + 40), max_tokens=6))
        told = await counted(mesh)
        assert (told.num_arrived, told.input_tokens, told.num_gaps) == (3, 120.0, 2)
        assert (told.num_answered, told.output_tokens, told.output_squared) == (3, 18.0, 108.0)
        assert told.answered_input_tokens == 120.0 and told.up_ms > 0
        assert told.num_queued == told.num_refused == told.queue_wait_ms == 0


async def test_a_malformed_request_is_none(model_folder: Path) -> None:
    async with running_mesh(model_folder) as mesh:
        with pytest.raises(grpc.aio.AioRpcError):
            await mesh.generate(request([]))
        assert (await counted(mesh)).num_arrived == 0


async def test_those_who_wait_and_those_who_are_refused(model_folder: Path) -> None:
    async with running_mesh(model_folder, max_inflight=1, max_queued=1) as mesh:
        mesh["d0"].pause_at = 2
        running = asyncio.create_task(mesh.generate(request(max_tokens=20)))
        await eventually(lambda: mesh.router.core.flow_control.admission.num_inflight == 1)
        waiting = asyncio.create_task(mesh.generate(request(max_tokens=1)))
        await eventually(lambda: mesh.router.core.flow_control.admission.num_queued == 1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await mesh.generate(request())
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        told = await counted(mesh)
        assert (told.num_arrived, told.num_queued, told.num_refused) == (3, 1, 1)
        mesh["d0"].pause_at = None
        mesh["d0"].resume.set()
        await asyncio.gather(running, waiting)
        await mesh.until_whole()
        told = await counted(mesh)
        assert (told.num_queued, told.num_answered, told.output_tokens) == (0, 2, 21.0)


async def test_what_a_client_tries_again_arrives_once(model_folder: Path) -> None:
    """Ours, any gRPC client under our service config, and OpenAI's, whose headers come the same way."""
    async with running_mesh(model_folder, max_inflight=1, max_queued=1) as mesh:
        mesh["d0"].pause_at = 2
        running = asyncio.create_task(mesh.generate(request(max_tokens=20)))
        await eventually(lambda: mesh.router.core.flow_control.admission.num_inflight == 1)
        waiting = asyncio.create_task(mesh.generate(request(max_tokens=1)))
        await eventually(lambda: mesh.router.core.flow_control.admission.num_queued == 1)
        address = mesh.router.server.address
        async with AsyncClient([address], retry_overload=True) as ours:
            first = asyncio.create_task(ours.generate(list(range(64, 80)), max_tokens=1))
            await eventually(lambda: mesh.router.core.traffic.of("tiny").num_refused >= 2, timeout_s=20)
            assert (await counted(mesh)).num_arrived == 3
            async with grpc.aio.insecure_channel(address, options=service_config.channel_options()) as channel:
                stub: mesh_pb2_grpc.MeshAsyncStub = mesh_pb2_grpc.MeshStub(channel)
                num_refused = mesh.router.core.traffic.of("tiny").num_refused
                second = asyncio.create_task(read_all(stub.Generate(request(max_tokens=1), timeout=30)))
                await eventually(lambda: mesh.router.core.traffic.of("tiny").num_refused >= num_refused + 3, timeout_s=20)
                assert (await counted(mesh)).num_arrived == 4
                mesh["d0"].pause_at = None
                mesh["d0"].resume.set()
                await asyncio.gather(running, waiting, first, second)


@pytest.mark.parametrize(("name", "value"), [("x-stainless-retry-count", "soon"), ("x-stainless-retry-count", "-1")])
def test_attempts_are_numbers(name: str, value: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a number of attempts") as raised:
        frontend.fill_options(mesh_pb2.RequestOptions(), [(name, value)])
    assert raised.value.field == name


def test_the_field_wins_over_the_count_of_a_library() -> None:
    options = mesh_pb2.RequestOptions(attempt=5)
    frontend.fill_options(options, [("X-Stainless-Retry-Count", "2")])
    assert options.attempt == 5
    options = mesh_pb2.RequestOptions()
    frontend.fill_options(options, [("grpc-previous-rpc-attempts", "2")])
    assert options.attempt == 2


async def test_batch_is_counted_and_its_wait_is_not(model_folder: Path) -> None:
    async with running_mesh(model_folder, max_inflight=1, max_queued=8) as mesh:
        mesh["d0"].pause_at = 2
        running = asyncio.create_task(mesh.generate(request(max_tokens=20)))
        await eventually(lambda: mesh.router.core.flow_control.admission.num_inflight == 1)
        batch = request(max_tokens=1)
        batch.options.priority = common_pb2.PRIORITY_BATCH
        waiting = asyncio.create_task(mesh.generate(batch))
        await eventually(lambda: mesh.router.core.flow_control.admission.num_queued == 1)
        told = await counted(mesh)
        assert told.num_queued == 1 and told.queue_wait_ms == 0
        mesh["d0"].pause_at = None
        mesh["d0"].resume.set()
        await asyncio.gather(running, waiting)


def test_processes_of_one_port_say_how_many_they_are() -> None:
    config = RouterConfig(models=("m=folder",), processes=3)
    assert [replica_config(config, "r", number).sharers for number in range(3)] == [3, 3, 3]
    with pytest.raises(ValueError, match="sharers"):
        RouterConfig(models=("m=folder",), sharers=0).validate()
