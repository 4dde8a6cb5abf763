"""A mesh with a batch folder, and openai's client of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai

from router.config import BatchConfig
from tests.router import stub_model
from tests.router.mesh import Mesh, expected, running_mesh
from tests.router.openai.conftest import client_of

ENDED = ("failed", "completed", "expired", "cancelled")


def line(number: int, **body: object) -> dict[str, Any]:
    """A request whose output follows from its number."""
    wanted = {"model": "tiny", "prompt": prompt_of(number), "max_tokens": 4, "seed": number, **body}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": wanted}


def prompt_of(number: int) -> list[int]:
    return [64 + number % 20] * 40


def text_for(number: int, num_tokens: int = 4) -> str:
    """What the stub model answers to `line(number)`."""
    return stub_model.text_of(expected(num_tokens, prompt=prompt_of(number), seed=number))


def jsonl(lines: Sequence[object]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def settings(folder: Path, **changed: Any) -> dict[str, Any]:
    return {"http_port": 0, "batches": BatchConfig(**{"http_batch_folder": str(folder), **changed})}


@asynccontextmanager
async def batch_mesh(model: Path, folder: Path, **changed: Any) -> AsyncIterator[tuple[Mesh, openai.AsyncOpenAI]]:
    async with running_mesh(model, **settings(folder, **changed)) as mesh, client_of(mesh) as client:
        yield mesh, client


async def upload(client: openai.AsyncOpenAI, content: bytes, **more: Any) -> openai.types.FileObject:
    return await client.files.create(file=("input.jsonl", content), purpose="batch", **more)


async def begin(client: openai.AsyncOpenAI, lines: Sequence[object], **more: Any) -> openai.types.Batch:
    file = await upload(client, jsonl(lines))
    wanted: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h", **more}
    return await client.batches.create(input_file_id=file.id, **wanted)


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> openai.types.Batch:
    """The batch once it has ended."""
    return await batch_when(client, batch_id, lambda batch: batch.status in ENDED)


async def batch_when(
    client: openai.AsyncOpenAI, batch_id: str, condition: Callable[[openai.types.Batch], object]
) -> openai.types.Batch:
    """The batch once the condition is true; it is asked for again and again, as clients do."""
    for _ in range(1500):
        batch = await client.batches.retrieve(batch_id)
        if condition(batch):
            return batch
        await asyncio.sleep(0.02)
    raise AssertionError(f"not within 30 s: {batch}")


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    """The results in a file by custom_id, each of which must be there once."""
    if file_id is None:
        return {}
    content = (await client.files.content(file_id)).content.decode()
    results = [json.loads(each) for each in content.splitlines()]
    by_id = {each["custom_id"]: each for each in results}
    assert len(by_id) == len(results)
    return by_id
