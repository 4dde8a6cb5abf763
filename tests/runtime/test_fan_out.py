"""A stream that several calls pass on: all get all of it in order, and none that ends early stops the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from pdmesh.runtime.rpc.fan_out import AHEAD, FanOut, Reader


class Source:
    """Numbers; it counts how many were taken."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.taken, self._count, self._error = 0, count, error

    async def numbers(self) -> AsyncIterator[int]:
        for number in range(self._count):
            self.taken += 1
            yield number
        if self._error is not None:
            raise self._error


async def read(reader: Reader[int], most: int = 1000) -> list[int]:
    seen = []
    try:
        async for number in reader:
            seen.append(number)
            if len(seen) == most:
                break
    finally:
        reader.close()
    return seen


async def test_all_get_all_of_it() -> None:
    fan_out = FanOut[int]()
    readers = [fan_out.reader() for _ in range(3)]
    _, *seen = await asyncio.gather(fan_out.run(Source(50).numbers()), *map(read, readers))
    assert seen == [list(range(50))] * 3


async def test_one_that_ends_early_stops_no_other() -> None:
    fan_out = FanOut[int]()
    early, whole = fan_out.reader(), fan_out.reader()
    _, some, seen = await asyncio.gather(fan_out.run(Source(50).numbers()), read(early, 1), read(whole))
    assert (some, seen) == ([0], list(range(50)))


async def test_it_goes_at_the_pace_of_the_slowest() -> None:
    fan_out, source = FanOut[int](), Source(50)
    slow, fast = fan_out.reader(), fan_out.reader()
    running = asyncio.gather(fan_out.run(source.numbers()), read(fast))
    await asyncio.sleep(0.05)
    assert source.taken <= AHEAD + 1
    assert await read(slow) == list(range(50))
    await running


async def test_nobody_that_reads_ends_it() -> None:
    fan_out, source = FanOut[int](), Source(1000)
    await asyncio.gather(fan_out.run(source.numbers()), read(fan_out.reader(), 1))
    assert source.taken <= AHEAD + 2


async def test_an_error_of_the_stream_reaches_all() -> None:
    fan_out = FanOut[int]()
    readers = [fan_out.reader() for _ in range(2)]
    running = asyncio.create_task(fan_out.run(Source(3, OSError("gone")).numbers()))
    ends = await asyncio.gather(*map(read, readers), return_exceptions=True)
    assert [str(end) for end in ends] == ["gone", "gone"]
    await running
