"""A link passes everything, until it is told to swallow, slow down or reset; it listens as long as the process behind it."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chaos.links import Link, free_ports, listening_ports

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="all of 127.0.0.0/8 is loopback on Linux only")

HOST = "127.7.1.1"
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1000):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@pytest_asyncio.fixture
async def link() -> AsyncIterator[Link]:
    """In front of a server that repeats what it is told."""
    (port,) = free_ports(("127.0.0.1", HOST), 1)
    server = await asyncio.start_server(_echo, "127.0.0.1", port)
    link = Link("echo", HOST, port)
    await link.follow(listening_ports())
    yield link
    await link.close()
    server.close()


async def connect(link: Link) -> Ends:
    return await asyncio.open_connection(link.host, link.port)


async def say(ends: Ends, text: bytes) -> bytes:
    ends[1].write(text)
    return await asyncio.wait_for(ends[0].readexactly(len(text)), 5)


async def test_it_passes_bytes_and_the_end(link: Link) -> None:
    ends = await connect(link)
    assert await say(ends, b"x" * 100_000) == b"x" * 100_000
    ends[1].write_eof()
    assert await ends[0].read() == b""
    ends[1].close()


async def test_a_reset_reaches_the_client(link: Link) -> None:
    ends = await connect(link)
    await say(ends, b"there")
    assert link.reset() == 1
    with pytest.raises(ConnectionResetError):
        await ends[0].read()
    ends[1].close()


async def test_a_black_hole_holds_bytes_until_it_ends(link: Link) -> None:
    ends = await connect(link)
    await say(ends, b"there")
    link.black_hole()
    ends[1].write(b"lost?")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ends[0].readexactly(5), 0.1)
    link.mend()
    assert await asyncio.wait_for(ends[0].readexactly(5), 5) == b"lost?"
    ends[1].close()


async def test_a_dropped_connection_is_silent_and_a_new_one_is_not(link: Link) -> None:
    ends = await connect(link)
    await say(ends, b"there")
    assert link.drop() == 1
    ends[1].write(b"lost")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ends[0].readexactly(4), 0.1)
    new = await connect(link)
    assert await say(new, b"there") == b"there"
    new[1].close()
    ends[1].close()


async def test_a_lossy_link_passes_everything_late(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = await connect(link)
    await say(ends, b"there")
    drawn = iter((0.1, 0.3, 0.9))  # lost, lost again, passes
    monkeypatch.setattr("tests.chaos.links.random.random", lambda: next(drawn, 0.9))
    link.lose(0.5)
    began = time.monotonic()
    assert await say(ends, b"123456") == b"123456"
    assert time.monotonic() - began > 0.6
    link.mend()
    ends[1].close()


async def test_a_new_connection_into_a_black_hole_gets_nothing(link: Link) -> None:
    link.black_hole()
    ends = await connect(link)
    ends[1].write(b"hello")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ends[0].read(1), 0.1)
    link.mend()
    assert await asyncio.wait_for(ends[0].readexactly(5), 5) == b"hello"
    ends[1].close()


async def test_a_slow_link_takes_its_time(link: Link) -> None:
    ends = await connect(link)
    link.slow(delay_s=0.05, bytes_per_s=1e6)
    began = time.monotonic()
    await say(ends, b"x")
    assert time.monotonic() - began >= 0.1  # there and back
    link.mend()
    ends[1].close()


async def test_it_listens_only_while_somebody_does_behind_it(link: Link) -> None:
    await link.follow(listening_ports() - {link.port})
    with pytest.raises(ConnectionRefusedError):
        await connect(link)
    await link.follow(listening_ports())
    assert await say(await connect(link), b"again") == b"again"
