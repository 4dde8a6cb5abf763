"""The streams of several prompts as one. Nothing is buffered here: who does not read makes the router's own buffers fill."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from pdmesh.v1 import mesh_pb2

Open = Callable[[], AsyncGenerator[mesh_pb2.GenerateResponse, None]]
"""Begins the stream of a prompt."""

Numbered = tuple[int, mesh_pb2.GenerateResponse]


class PromptError(Exception):
    """What the stream of prompt `number` raised; `__cause__` is that error."""

    def __init__(self, number: int, cause: Exception) -> None:
        super().__init__(str(cause))
        self.number = number
        self.__cause__ = cause


async def merged(prompts: Sequence[Open]) -> AsyncGenerator[Numbered, None]:
    """Each response with the number of its prompt. Raises PromptError. However it ends, every stream is closed."""
    source = _alone(prompts[0]) if len(prompts) == 1 else _together(prompts)
    async with aclosing(source):
        async for item in source:
            yield item


async def _alone(prompt: Open) -> AsyncGenerator[Numbered, None]:
    async with aclosing(prompt()) as stream:
        try:
            async for response in stream:
                yield 0, response
        except Exception as error:
            raise PromptError(0, error) from error


async def _together(prompts: Sequence[Open]) -> AsyncGenerator[Numbered, None]:
    queue: asyncio.Queue[Numbered | PromptError | None] = asyncio.Queue(maxsize=1)
    pumps = [asyncio.create_task(_pump(number, prompt, queue)) for number, prompt in enumerate(prompts)]
    num_running = len(pumps)
    try:
        while num_running:
            item = await queue.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, PromptError):
                raise item
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(number: int, prompt: Open, queue: asyncio.Queue[Numbered | PromptError | None]) -> None:
    """Ends with None or the stream's error."""
    end: PromptError | None = None
    async with aclosing(prompt()) as stream:
        try:
            async for response in stream:
                await queue.put((number, response))
        except Exception as error:  # noqa: BLE001 - the reader raises it
            end = PromptError(number, error)
    await queue.put(end)
