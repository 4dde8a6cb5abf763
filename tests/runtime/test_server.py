"""Health, reflection, binding and drain of a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from runtime.channel import Channels, connect
from runtime.config import ConfigError
from runtime.server import MAX_METADATA_BYTES, ConnectionLimits, GrpcServer
from tests.runtime.echo import SERVICE, Behaviours, add_to_server, call, serving

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(channel: grpc.aio.Channel, service: str) -> int:
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)


async def test_health_of_the_server_and_of_each_service() -> None:
    server = GrpcServer("127.0.0.1", 0)
    server.register(add_to_server, {}, SERVICE)
    port = await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        assert [await health_of(channel, name) for name in ("", SERVICE)] == [NOT_SERVING, NOT_SERVING]
        await server.set_serving(True)
        assert [await health_of(channel, name) for name in ("", SERVICE)] == [SERVING, SERVING]
        await server.set_serving(False, [SERVICE])
        assert [await health_of(channel, name) for name in ("", SERVICE)] == [SERVING, NOT_SERVING]
        with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
            await health_of(channel, "no.such.Service")
    await server.drain(0)


async def test_reflection_lists_the_services() -> None:
    async with serving({}) as (_, channel):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
        answers = [answer async for answer in stub.ServerReflectionInfo(iter(requests))]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names


async def test_a_taken_port_is_a_clear_error() -> None:
    async with serving({}) as (first, _):
        second = GrpcServer("127.0.0.1", first.port)
        with pytest.raises(
            ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{first.port}: Address already in use; choose another"
        ):
            await second.start()


async def test_a_foreign_host_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1:0: Cannot assign requested address"):
        await GrpcServer("203.0.113.1", 0).start()


async def test_a_drain_waits_for_running_calls_and_takes_no_new_ones() -> None:
    entered, release = asyncio.Event(), asyncio.Event()

    async def wait(request: StringValue, context: object) -> StringValue:
        entered.set()
        await release.wait()
        return request

    async with serving({"UnaryUnary": wait}) as (server, channel):
        running = asyncio.create_task(call(channel, "UnaryUnary"))
        await entered.wait()
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        draining = asyncio.create_task(server.drain(30))
        assert (await watch.read()).status == NOT_SERVING
        async with connect(server.address) as other:
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await call(other, "UnaryUnary")
        assert not draining.done()
        release.set()
        assert await running == ["x"]
        # The health watch has no end of its own and must not hold up the drain for its 30 s.
        await asyncio.wait_for(draining, 10)


async def test_a_drain_ends_what_outlives_its_grace() -> None:
    entered, ended = asyncio.Event(), asyncio.Event()

    async def stream(request: StringValue, context: object) -> AsyncIterator[StringValue]:
        try:
            entered.set()
            await asyncio.Event().wait()
            yield request
        finally:
            ended.set()

    async with serving({"UnaryStream": stream}) as (server, channel):
        running = asyncio.create_task(call(channel, "UnaryStream"))
        await entered.wait()
        await asyncio.wait_for(server.drain(0.05), 10)
        await asyncio.wait_for(ended.wait(), 10)
        with pytest.raises(grpc.aio.AioRpcError):
            await running


async def test_an_idle_server_drains_at_once() -> None:
    async with serving({}) as (server, _):
        await asyncio.wait_for(server.drain(60), 10)


async def test_channels_are_shared_by_address_and_can_be_forgotten() -> None:
    async def echo(request: StringValue, context: object) -> StringValue:
        return request

    async with serving({"UnaryUnary": echo}) as (server, _):
        channels = Channels()
        first = channels.get(server.address)
        assert channels.get(server.address) is first
        assert await call(first, "UnaryUnary") == ["x"]
        await channels.forget(server.address)
        assert channels.get(server.address) is not first
        assert await call(channels.get(server.address), "UnaryUnary") == ["x"]
        await channels.close()


async def test_a_channel_finds_a_restarted_server_soon() -> None:
    async def echo(request: StringValue, context: object) -> StringValue:
        return request

    async with serving({"UnaryUnary": echo}) as (server, _):
        port = server.port
    async with connect(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await call(channel, "UnaryUnary")
        again = GrpcServer("127.0.0.1", port)
        behaviours: Behaviours = {"UnaryUnary": echo}
        again.register(add_to_server, behaviours, SERVICE)
        await again.start()
        stub = channel.unary_unary(f"/{SERVICE}/UnaryUnary", StringValue.SerializeToString, StringValue.FromString)
        assert (await stub(StringValue(value="back"), wait_for_ready=True, timeout=10)).value == "back"
        await again.drain(0)


async def test_metadata_are_bounded() -> None:
    async def echo(request: StringValue, context: object) -> StringValue:
        return request

    async def noted(size: int) -> StringValue:
        method = channel.unary_unary(f"/{SERVICE}/UnaryUnary", StringValue.SerializeToString, StringValue.FromString)
        return await method(StringValue(value="x"), metadata=(("x-note", "a" * size),))

    async with serving({"UnaryUnary": echo}) as (_, channel):
        assert (await noted(4096)).value == "x"
        with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
            await noted(2 * MAX_METADATA_BYTES)


async def test_a_connection_has_a_bounded_number_of_calls() -> None:
    entered, release = asyncio.Semaphore(0), asyncio.Event()

    async def wait(request: StringValue, context: object) -> StringValue:
        entered.release()
        await release.wait()
        return request

    async with serving({"UnaryUnary": wait}, limits=ConnectionLimits(max_streams=2)) as (server, channel):
        first = [asyncio.create_task(call(channel, "UnaryUnary")) for _ in range(2)]
        for _ in first:
            await entered.acquire()
        third = asyncio.create_task(call(channel, "UnaryUnary"))
        async with connect(server.address) as other:  # not held up by that one's
            fourth = asyncio.create_task(call(other, "UnaryUnary"))
            await entered.acquire()
            assert entered.locked() and not third.done()
            release.set()
            assert [await running for running in (*first, third, fourth)] == [["x"]] * 4
