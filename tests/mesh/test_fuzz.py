"""Nonsense at every door: any message, any bytes, any Redis value. Each gets a status; no process dies, hangs or leaks."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
import pytest_asyncio
import redis.asyncio
from google.protobuf.descriptor import MethodDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdmesh.client.client import AsyncClient
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.sampling_params import SamplingParams
from pdmesh.v1 import decode_pb2, mesh_pb2, prefill_pb2, worker_pb2
from tests.mesh import oracle
from tests.mesh.checks import Footprint, abstract_sockets, assert_whole
from tests.support.protobuf_strategies import messages

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVICES = {
    "router-0": [mesh_pb2.DESCRIPTOR.services_by_name["Mesh"]],
    "decode-0": [
        decode_pb2.DESCRIPTOR.services_by_name["DecodeService"],
        worker_pb2.DESCRIPTOR.services_by_name["WorkerControl"],
    ],
    "prefill-0": [prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"]],
}
# Not SetRoles: a valid message changes roles, which is what it is for; invalid ones are in tests/worker.
METHODS = [
    (member, method)
    for member, services in SERVICES.items()
    for service in services
    for method in service.methods
    if method.name != "SetRoles"
]
# A crash or a bug, as a status; everything else is an answer.
BAD = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
CALLS_PER_METHOD = 60


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fuzzed(tiny: Path) -> AsyncIterator[LocalMesh]:
    config = LocalMeshConfig(model=str(tiny), port=0, restart=False, num_threads=1)
    async with LocalMesh(config) as mesh:
        footprint = Footprint.of(mesh)
        yield mesh
        assert mesh.pids == footprint.pids, "a process died"
    footprint.assert_gone()


async def _once(item: bytes) -> AsyncIterator[bytes]:
    yield item


def _stream(channel: grpc.aio.Channel, method: MethodDescriptor, path: str, body: bytes) -> AsyncIterator[bytes]:
    """The answers of a streaming method, for half a second at most; bytes go out and come in unparsed."""
    if method.client_streaming:
        return cast(AsyncIterator[bytes], cast(Any, channel).stream_stream(path)(_once(body), timeout=0.5))
    return cast(AsyncIterator[bytes], cast(Any, channel).unary_stream(path)(body, timeout=0.5))


async def call(channel: grpc.aio.Channel, method: MethodDescriptor, body: bytes) -> grpc.StatusCode:
    """Send raw bytes to a method of any kind; returns its status."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    try:
        if not method.server_streaming:
            await cast(Any, channel).unary_unary(path)(body, timeout=10)
            return grpc.StatusCode.OK
        async for _ in _stream(channel, method, path, body):
            pass
    except grpc.aio.AioRpcError as error:
        assert error.code() is not grpc.StatusCode.INVALID_ARGUMENT or error.details()
        return error.code()
    return grpc.StatusCode.OK


def _bodies(method: MethodDescriptor, number: int) -> Iterator[bytes]:
    """`number` bodies: most of them messages of the right type, some raw bytes."""
    found: list[bytes] = []

    @settings(max_examples=number, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(messages(method.input_type).map(lambda message: message.SerializeToString()) | st.binary(max_size=64))
    def collect(body: bytes) -> None:
        found.append(body)

    collect()
    yield from found


@pytest.mark.parametrize(("member", "method"), METHODS, ids=[method.full_name for _, method in METHODS])
async def test_any_message_gets_a_status(fuzzed: LocalMesh, member: str, method: MethodDescriptor) -> None:
    async with grpc.aio.insecure_channel(fuzzed.member(member).address) as channel:
        places = asyncio.Semaphore(8)

        async def one(body: bytes) -> grpc.StatusCode:
            async with places:
                return await call(channel, method, body)

        codes = await asyncio.gather(*(one(body) for body in _bodies(method, CALLS_PER_METHOD)))
    assert not BAD & set(codes)
    if method.name == "SetServing":  # a valid message pauses workers, or lets them sleep
        async with AsyncClient(fuzzed.router_addresses) as client:
            done = await client.set_serving("running", timeout=30)
            assert not any(worker.error for worker in done.workers)
    await _still_serves(fuzzed)


async def test_garbage_in_redis(fuzzed: LocalMesh) -> None:
    assert fuzzed.redis_url is not None
    client = redis.asyncio.from_url(fuzzed.redis_url)
    prefix = b"pdmesh:default:worker:"
    await client.set(prefix + b"ghost", b"\xff\x00garbage")
    await client.set(prefix + b"\xff\xfe", b"{}")
    await client.lpush(prefix + b"list", b"x")
    await client.hset(prefix + b"hash", "a", "b")
    await client.set(prefix + b"big", b"x" * 3_000_000)
    await client.set(prefix + b"decode-0", b"stolen")
    await asyncio.sleep(1.2)  # two polls of the registry's watchers
    await _still_serves(fuzzed)
    await client.flushall()
    await _still_serves(fuzzed)
    await client.aclose()


async def test_garbage_at_the_transfer_sockets(fuzzed: LocalMesh) -> None:
    sockets = abstract_sockets(fuzzed.pids.values())
    assert sockets
    for name in sorted(sockets):
        for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"PDKV\xff\xff\xff\xff", b"PDKV\x04\x00\x00\x00abcd", bytes(5000)):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.settimeout(5)
                peer.connect("\0" + name)
                peer.sendall(garbage)
                peer.shutdown(socket.SHUT_WR)
                try:
                    while peer.recv(4096):
                        pass
                except ConnectionResetError:
                    pass
    await _still_serves(fuzzed)


async def _still_serves(mesh: LocalMesh) -> None:
    folder = Path(mesh.config.model)
    async with AsyncClient(mesh.router_addresses) as client:
        result = await client.generate(oracle.prompt_of(7, 40), temperature=0, max_tokens=6, mode="remote", timeout=60)
    assert [list(result.token_ids)] == oracle.answer(folder, oracle.prompt_of(7, 40), SamplingParams(temperature=0, max_tokens=6))
    await assert_whole(mesh)
