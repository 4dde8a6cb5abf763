"""The process: real gRPC, HTTP endpoints, health; and a real Envoy in front of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdmesh.third_party.envoy import ext_proc_pb2 as pb
from pdmesh.third_party.envoy import ext_proc_pb2_grpc as pb_grpc
from router.endpoint_picker.config import PickerConfig
from router.endpoint_picker.main import PickerServer
from router.endpoint_picker.service import SERVICE
from tests.router.endpoint_picker.model_server import ModelServer, running_server
from tests.router.endpoint_picker.test_exchange import BODY, body, endpoint_in, headers
from tests.support.envoy import find_envoy, running_envoy
from tests.support.waiting import eventually

ENVOY = find_envoy()
needs_envoy = pytest.mark.skipif(ENVOY is None, reason="there is no envoy here (make setup fetches one on Linux, x86-64)")
LOAD = (
    'vllm:num_requests_running 0\nvllm:kv_cache_usage_perc 0\nvllm:cache_config_info{block_size="16",num_gpu_blocks="4096"} 1\n'
)


@asynccontextmanager
async def running_picker(config: PickerConfig) -> AsyncIterator[tuple[PickerServer, str]]:
    server = PickerServer(replace(config, port=0))
    address = await server.start()
    try:
        yield server, address
        await eventually(lambda: server.picker.flow.admission.num_inflight == 0)
        assert all(not each.sent for each in server.endpoints.all())
    finally:
        await server.stop()


@asynccontextmanager
async def picker_and_servers(count: int = 3, **settings: object) -> AsyncIterator[tuple[PickerServer, str, list[ModelServer]]]:
    async with AsyncExitStack() as stack:
        servers = [(await stack.enter_async_context(running_server()))[0] for _ in range(count)]
        for each in servers:
            each.metrics = LOAD
        options = {"metrics_period_s": 0.05, "drain_grace_s": 0.2, **settings}
        config = PickerConfig(endpoints=tuple(each.address for each in servers), **options)  # type: ignore[arg-type]
        picker, address = await stack.enter_async_context(running_picker(config))
        await eventually(lambda: picker.endpoints.num_ready == count)
        yield picker, address, servers


async def test_a_stream_gets_an_endpoint_and_its_end_frees_it() -> None:
    async with picker_and_servers() as (picker, address, servers), grpc.aio.insecure_channel(address) as channel:
        call = pb_grpc.ExternalProcessorStub(channel).Process()
        await call.write(headers())
        await call.write(body(BODY))
        answer = await call.read()
        assert isinstance(answer, pb.ProcessingResponse)
        assert endpoint_in(answer).split(",")[0] in {each.address for each in servers}
        assert picker.picker.flow.admission.num_inflight == 1
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
        await eventually(lambda: picker.picker.flow.admission.num_inflight == 0)


async def test_a_gateway_that_goes_away_frees_its_requests() -> None:
    async with picker_and_servers(max_inflight=2) as (picker, address, _servers):
        async with grpc.aio.insecure_channel(address) as channel:
            calls = [pb_grpc.ExternalProcessorStub(channel).Process() for _ in range(6)]
            for call in calls:
                await call.write(headers())
                await call.write(body(BODY))
            await eventually(lambda: picker.picker.flow.admission.num_queued == 4)
        await eventually(lambda: picker.picker.flow.admission.num_inflight == 0)
        assert picker.picker.flow.admission.num_queued == 0


async def test_health_by_the_names_of_the_protocol() -> None:
    async with running_server_without_metrics() as (picker, address, server), grpc.aio.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check

        async def state(name: str) -> int:
            return int((await check(health_pb2.HealthCheckRequest(service=name))).status)

        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        assert await state("liveness") == serving
        assert [await state(name) for name in ("readiness", SERVICE, "")] == [not_serving] * 3
        server.is_silent = False
        await eventually(lambda: picker.endpoints.num_ready == 1)
        assert [await state(name) for name in ("readiness", SERVICE, "")] == [serving] * 3


@asynccontextmanager
async def running_server_without_metrics() -> AsyncIterator[tuple[PickerServer, str, ModelServer]]:
    async with running_server() as (server, _):
        server.is_silent, server.metrics = True, None
        config = PickerConfig(endpoints=(server.address,), metrics_period_s=0.05, metrics_timeout_s=0.1)
        async with running_picker(config) as (picker, address):
            yield picker, address, server


async def test_an_endpoint_that_hangs_or_leaves_is_left_out_and_comes_back() -> None:
    async with picker_and_servers(2, metrics_timeout_s=0.1) as (picker, _address, servers):
        servers[0].is_silent = True
        await eventually(lambda: picker.endpoints.num_ready == 1)
        servers[0].is_silent = False
        await eventually(lambda: picker.endpoints.num_ready == 2)
        servers[1].status = "500 Internal Server Error"
        await eventually(lambda: picker.endpoints.num_ready == 1)
        servers[1].status = "200 OK"
        await eventually(lambda: picker.endpoints.num_ready == 2)
        servers[1].is_leaving = True
        await eventually(lambda: picker.endpoints.num_ready == 1)
        servers[1].is_leaving = False
        await eventually(lambda: picker.endpoints.num_ready == 2)


@pytest.mark.parametrize("raw", [b"", b"\x00" * 64, b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (9 << 20)])
async def test_an_endpoint_that_speaks_no_http_is_left_out(raw: bytes) -> None:
    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with listening, running_picker(PickerConfig(endpoints=(address,), metrics_period_s=0.02)) as (picker, _):
        await asyncio.sleep(0.2)
        assert picker.endpoints.num_ready == 0


@needs_envoy
@pytest.mark.parametrize("body_mode", ["FULL_DUPLEX_STREAMED", "BUFFERED", "NONE"])
async def test_envoy_sends_requests_where_the_picker_says(body_mode: str) -> None:
    assert ENVOY is not None
    async with picker_and_servers() as (picker, address, servers):
        addresses = [each.address for each in servers]
        async with running_envoy(ENVOY, address, addresses, body_mode=body_mode) as url, httpx.AsyncClient(timeout=20) as client:
            by_text: dict[int, set[str]] = {}
            for number in range(12):
                text = f"{number % 3} once upon a time " * 400 + str(number)
                sent = {"model": "m", "messages": [{"role": "user", "content": text}]}
                answer = await client.post(f"{url}/v1/chat/completions", json=sent)
                assert answer.status_code == 200
                by_text.setdefault(number % 3, set()).add(answer.json()["server"])
            received = [json.loads(each) for server in servers for each in server.bodies]
            assert len(received) == 12
            if body_mode != "NONE":
                assert all(len(places) == 1 for places in by_text.values()), "a prompt goes where its beginning is"
            assert (await client.get(f"{url}/v1/models")).status_code == 200
        assert len(picker.endpoints.blocks) > 0 or body_mode == "NONE"


@needs_envoy
async def test_a_large_body_comes_through_envoy_unchanged() -> None:
    assert ENVOY is not None
    async with picker_and_servers(1) as (_picker, address, (server,)):  # noqa: SIM117
        async with running_envoy(ENVOY, address, [server.address]) as url, httpx.AsyncClient(timeout=20) as client:
            sent = json.dumps({"model": "m", "prompt": "abcdefghij" * 40_000}).encode()
            answer = await client.post(f"{url}/v1/completions", content=sent)
            assert answer.status_code == 200
            assert server.bodies == [sent]
            too_large = await client.post(f"{url}/v1/completions", content=b"x" * (5 << 20))
            assert too_large.status_code == 413
            assert too_large.json()["error"]["code"] == "body_too_large"


@needs_envoy
async def test_envoy_falls_back_when_the_picked_endpoint_is_gone() -> None:
    assert ENVOY is not None
    async with AsyncExitStack() as stack:
        (first, end_first), (second, _) = [await stack.enter_async_context(running_server()) for _ in range(2)]
        config = PickerConfig(endpoints=(first.address, second.address), metrics_period_s=60, drain_grace_s=0.2)
        picker, address = await stack.enter_async_context(running_picker(config))
        await eventually(lambda: picker.endpoints.num_ready == 2)
        url = await stack.enter_async_context(running_envoy(ENVOY, address, config.endpoints))
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=20))
        end_first()
        for number in range(6):
            answer = await client.post(f"{url}/v1/completions", json={"model": "m", "prompt": f"{number}" * 2000})
            assert (answer.status_code, answer.json()) == (200, {"server": second.address})


@needs_envoy
async def test_refusals_reach_the_client() -> None:
    assert ENVOY is not None
    async with picker_and_servers(1, max_inflight=1, max_queued=0) as (picker, address, (server,)):
        server.delay_s = 0.5
        async with running_envoy(ENVOY, address, [server.address]) as url, httpx.AsyncClient(timeout=20) as client:
            asked = [client.post(f"{url}/v1/completions", json={"model": "m", "prompt": "x"}) for _ in range(4)]
            statuses = sorted(answer.status_code for answer in await asyncio.gather(*asked))
            assert statuses[0] == 200
            assert 429 in statuses
            picker.endpoints.found([])
            answer = await client.post(f"{url}/v1/completions", json={"model": "m", "prompt": "x"})
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "no_endpoint"
            assert answer.headers["retry-after"] == "1"
