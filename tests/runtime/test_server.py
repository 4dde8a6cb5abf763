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

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.errors import error_from_rpc
from pdmesh.runtime.rpc import server as rpc_server
from pdmesh.runtime.rpc.channel import Channels, connect
from pdmesh.runtime.rpc.server import MAX_METADATA_BYTES, ConnectionLimits, GrpcServer
from tests.runtime.echo import SERVICE, Behaviours, add_to_server, call, serving
from tests.support.waiting import eventually

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


def num_calls(server: GrpcServer) -> int:
    assert server.bound is not None
    return server.bound.num_calls


def stream_on(channel: grpc.aio.Channel, method: str) -> grpc.aio.StreamStreamCall[bytes, bytes]:
    """An open call; whether the server streams is its affair."""
    opened: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"/{SERVICE}/{method}")
    return opened()


async def hold(requests: AsyncIterator[StringValue], context: object) -> AsyncIterator[StringValue]:
    """A stream that is open for as long as its client likes."""
    async for request in requests:
        yield request


async def echo(request: StringValue, context: object) -> StringValue:
    return request


async def test_the_calls_of_all_connections_are_bounded() -> None:
    async with serving({"StreamStream": hold, "UnaryUnary": echo}, limits=ConnectionLimits(max_calls=3)) as (server, channel):
        async with connect(server.address) as other:
            held = [stream_on(each, "StreamStream") for each in (channel, other, other)]
            for stream in held:
                await stream.write(b"")
                assert await stream.read() == b""
            for refused in (channel, other):
                with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED") as error:
                    await call(refused, "UnaryUnary")
                assert error_from_rpc(error.value).retry_delay_s == rpc_server.RETRY_DELAY_S
                assert await health_of(refused, SERVICE) == SERVING  # it is full, not dead
            held[0].cancel()
            await held[1].done_writing()
            await eventually(lambda: num_calls(server) == 1)
            assert await call(channel, "UnaryUnary") == ["x"]
        await eventually(lambda: num_calls(server) == 0)  # with its connection a call has ended


async def test_calls_that_never_send_their_request_take_places_and_are_refused_at_once() -> None:
    async with serving({"UnaryUnary": echo, "StreamUnary": hold}, limits=ConnectionLimits(max_calls=2)) as (server, channel):
        held = [stream_on(channel, "UnaryUnary") for _ in range(2)]
        await eventually(lambda: num_calls(server) == 2)
        refused = stream_on(channel, "UnaryUnary")
        assert await asyncio.wait_for(refused.code(), 10) is grpc.StatusCode.RESOURCE_EXHAUSTED
        for each in held:
            each.cancel()
        await eventually(lambda: num_calls(server) == 0)
        assert await call(channel, "UnaryUnary") == ["x"]


async def test_refusals_do_not_wear_the_bound_out() -> None:
    """Neither does it let more in after a burst, nor fewer."""
    running, release = 0, asyncio.Event()

    async def wait(request: StringValue, context: object) -> StringValue:
        nonlocal running
        running += 1
        await release.wait()
        running -= 1
        return request

    async with serving({"UnaryUnary": wait}, limits=ConnectionLimits(max_calls=5)) as (server, channel):
        for _ in range(4):
            calls = [asyncio.create_task(call(channel, "UnaryUnary")) for _ in range(20)]
            await eventually(lambda calls=calls: sum(each.done() for each in calls) == 15)  # type: ignore[misc]
            assert (running, num_calls(server)) == (5, 5)
            release.set()
            ended = await asyncio.gather(*calls, return_exceptions=True)
            assert sum(each == ["x"] for each in ended) == 5
            await eventually(lambda: num_calls(server) == 0)
            release.clear()


async def test_a_connection_without_calls_is_closed() -> None:
    async with serving({"UnaryUnary": echo, "StreamStream": hold}, limits=ConnectionLimits(max_idle_s=0.2)) as (server, channel):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        stream = stream_on(channel, "StreamStream")
        await stream.write(b"")
        assert await stream.read() == b""
        async with asyncio.timeout(10):  # the silent one ends, however little it says
            while await reader.read(4096):
                pass
        writer.close()
        await stream.write(b"")
        assert await stream.read() == b""  # what has a call does not
        stream.cancel()
