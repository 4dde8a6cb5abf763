"""Run prompts through a mesh of real processes, also while a process is killed."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from benchmarks.engine_runs import Draw
from pdmesh.client.client import AsyncClient, Completed, Delta
from pdmesh.client.types import Timings

Disturb = Callable[[], Awaitable[None]]


class Stream:
    """One request's stream: the tokens of choice 0 so far, the text and, at the end, the timings."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.prompt = prompt
        self.token_ids: list[int] = []
        self.text = ""
        self.timings: Timings | None = None
        self.cached_tokens = 0
        self.num_resumes = 0
        self.grown = asyncio.Event()

    async def run(self, client: AsyncClient, draw: Draw, num_tokens: int, mode: str | None) -> None:
        options = {"mode": mode} if mode else {}
        stream = client.generate_stream(
            list(self.prompt),
            max_tokens=num_tokens,
            temperature=draw.temperature,
            seed=draw.seed,
            timeout=600,
            **options,  # type: ignore[arg-type]
        )
        async with stream:
            async for event in stream:
                if isinstance(event, Delta):
                    self._add(event)
                elif isinstance(event, Completed):
                    self.timings = event.timings
                    self.cached_tokens = event.usage.cached_tokens
                    self.num_resumes = event.num_resumes
        self.grown.set()

    def _add(self, delta: Delta) -> None:
        if delta.token_ids and delta.first_index != len(self.token_ids):
            raise AssertionError(f"index {delta.first_index} follows {len(self.token_ids)} tokens: lost or repeated")
        self.token_ids.extend(delta.token_ids)
        self.text += delta.text
        if len(self.token_ids) >= DISTURB_AFTER:
            self.grown.set()


# A stream is in the middle once it has so many tokens.
DISTURB_AFTER = 4


async def run(
    routers: Sequence[str],
    prompts: Sequence[Sequence[int]],
    draw: Draw,
    num_tokens: int,
    *,
    mode: str | None = None,
    together: bool = False,
    disturb: Disturb | None = None,
) -> list[Stream]:
    """Stream every prompt, one after the other or together; `disturb` strikes once half of the streams are in the middle."""
    streams = [Stream(prompt) for prompt in prompts]
    async with AsyncClient(routers) as client:
        if not together:
            for stream in streams:
                await stream.run(client, draw, num_tokens, mode)
            return streams
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(stream.run(client, draw, num_tokens, mode))
            if disturb:
                await _half_grown(streams)
                await disturb()
    return streams


async def _half_grown(streams: Sequence[Stream]) -> None:
    """Returns once half of the streams are in the middle; the others still wait, or are in prefill or hand-off."""
    grown = [asyncio.ensure_future(stream.grown.wait()) for stream in streams]
    while sum(future.done() for future in grown) * 2 < len(grown):
        await asyncio.wait([future for future in grown if not future.done()], return_when=asyncio.FIRST_COMPLETED)
    for future in grown:
        future.cancel()


def tokens(streams: Sequence[Stream]) -> list[list[int]]:
    return [stream.token_ids for stream in streams]
