"""Simulated sockets carry bytes whole and in order, and fail as TCP does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.simulation.environment import byte_stream
from tests.simulation.environment.byte_stream import StreamSocket
from tests.simulation.environment.network import Network
from tests.simulation.environment.socket_loop import StreamServer, StreamTransport
from tests.simulation.world import MILLISECOND, Process, World

ADDRESS = ("10.0.0.1", 7)
DATA = bytes(range(256)) * 2000


class Two:
    """Two processes of a world: one listens at ADDRESS, one connects to it."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.network = Network(self.world)
        self.network.hosts[ADDRESS[0]] = "server"
        byte_stream._installed[:] = [lambda: self.network]
        self.server, self.client = self.world.process("server"), self.world.process("client")

    def run(self, talk: Callable[[], Awaitable[Any]]) -> Any:
        """Run `talk` in the client's process, to its end."""

        async def main() -> Any:
            async def inside() -> Any:
                return await talk()

            return await self.client.start(inside())

        return self.world.run(main())

    def serve(self, handle: Callable[[Any], Awaitable[object]]) -> None:
        """Listen in the server's process; `handle` gets each accepted socket."""

        async def inside() -> None:
            listener: Any = StreamSocket()
            listener.bind(ADDRESS)
            listener.listen()
            while True:
                sock, _ = await asyncio.get_running_loop().sock_accept(listener)
                await handle(sock)

        self.server.start(inside())


async def connected() -> Any:
    await asyncio.sleep(0.1)  # of virtual time: the server listens by then
    sock: Any = StreamSocket()
    await asyncio.get_running_loop().sock_connect(sock, ADDRESS)
    return sock


async def read_all(sock: Any) -> bytes:
    found = bytearray()
    while data := await asyncio.get_running_loop().sock_recv(sock, 5000):
        found += data
    return bytes(found)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("is_cut", [False, True])
def test_bytes_arrive_whole_and_in_order(seed: int, is_cut: bool) -> None:
    two, got = Two(seed), []

    async def handle(sock: Any) -> None:
        got.append(await read_all(sock))

    async def talk() -> None:
        sock = await connected()
        if is_cut:
            asyncio.get_running_loop().call_later(0.001, two.network.cut, "client", "server")
            asyncio.get_running_loop().call_later(0.5, two.network.heal, "client", "server")
        await asyncio.get_running_loop().sock_sendall(sock, DATA)
        sock.close()
        await asyncio.sleep(2.0)

    two.serve(handle)
    two.run(talk)
    assert got == [DATA]


@pytest.mark.parametrize("seed", range(5))
def test_a_severed_connection_loses_bytes_and_its_sender_learns_it(seed: int) -> None:
    two, got = Two(seed), list[bytes]()

    async def handle(sock: Any) -> None:
        data = b""
        try:
            while data := await asyncio.get_running_loop().sock_recv(sock, 5000):
                got.append(data)
        except ConnectionResetError:
            pass

    async def talk() -> None:
        sock = await connected()
        asyncio.get_running_loop().call_later(0.002, two.network.sever, "client", "server")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while True:
                await asyncio.get_running_loop().sock_sendall(sock, DATA)
                await asyncio.sleep(0.001)

    two.serve(handle)
    two.run(talk)
    whole = b"".join(got)
    assert whole == (DATA * (len(whole) // len(DATA) + 1))[: len(whole)]


def test_where_nothing_listens_it_is_refused_and_without_power_nothing_answers() -> None:
    two = Two(1)

    async def talk() -> None:
        with pytest.raises(ConnectionRefusedError):
            await connected()
        two.server.kill()
        two.network.lose_power(two.server)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await connected()
        two.network.get_power("server")
        with pytest.raises(ConnectionRefusedError):
            await connected()

    two.run(talk)


def test_a_connection_to_a_killed_process_ends() -> None:
    two = Two(3)

    async def handle(sock: Any) -> None:
        await asyncio.get_running_loop().create_future()

    async def talk() -> None:
        sock = await connected()

        def kill() -> None:
            two.server.kill()
            two.network.died(two.server)

        asyncio.get_running_loop().call_later(0.01, kill)
        with contextlib.suppress(ConnectionResetError):
            assert await read_all(sock) == b""

    two.serve(handle)
    two.run(talk)


@pytest.mark.parametrize("seed", range(3))
def test_streams_of_asyncio_run_on_it(seed: int) -> None:
    two = Two(seed)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(len(DATA)))
        await writer.drain()
        writer.close()

    def protocol() -> asyncio.StreamReaderProtocol:
        reader = asyncio.StreamReader()
        return asyncio.StreamReaderProtocol(reader, answer)

    async def serve() -> None:
        listener: Any = StreamSocket()
        listener.bind(ADDRESS)
        listener.listen()
        StreamServer(listener, protocol)

    async def talk() -> bytes:
        sock = await connected()
        reader = asyncio.StreamReader()
        asking = asyncio.StreamReaderProtocol(reader)
        writer = asyncio.StreamWriter(StreamTransport(sock, asking), asking, reader, asyncio.get_running_loop())
        writer.write(DATA)
        await writer.drain()
        return await reader.read(-1)

    two.server.start(serve())
    assert two.run(talk) == DATA


def test_a_clock_that_is_slow_waits_longer() -> None:
    world = World(1)
    slow: Process = world.process("slow")
    slow.clock_ppm = -20_000

    async def wait() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(10.0)
        return loop.time() - began

    async def main() -> float:
        return await slow.start(wait())

    by_its_clock = world.run(main())
    assert abs(by_its_clock - 10.0) < 0.2
    assert 10_190 < world.now_ns / MILLISECOND < 10_500
