"""Embeddings, for every protocol of clients: one request for each input, and the form of the values."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pdmesh.runtime.errors import InvalidArgument, MeshError
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.validation import ContextOverflow, refuse

MAX_INPUTS = 2048
AT_ONCE = 8
"""Inputs of one request that are computed at the same time: the others of a long list do not fill the queue of all clients."""
_ID_CHARS = 64

T = TypeVar("T")
EmbedOne = Callable[[mesh_pb2.GenerateRequest], Awaitable[mesh_pb2.Embedding]]


async def embed(request: mesh_pb2.EmbedRequest, embed_one: EmbedOne) -> list[mesh_pb2.Embedding]:
    """Return the embeddings of all inputs. The first error ends the others. Raises MeshError naming the field."""
    _check(request)
    room = asyncio.Semaphore(AT_ONCE)

    async def of(number: int) -> mesh_pb2.Embedding:
        async with room:
            try:
                return shaped(await embed_one(_request_of(request, number)), request.dimensions, request.unnormalized)
            except MeshError as error:
                raise _named(error, number) from error

    return await _together([of(number) for number in range(len(request.inputs))])


def shaped(embedding: mesh_pb2.Embedding, dimensions: int, unnormalized: bool) -> mesh_pb2.Embedding:
    """Return an embedding with its first `dimensions` values (0: all) and, unless it is to be left, with the length 1. Raises
    InvalidArgument."""
    values = list(embedding.values)
    if dimensions > len(values):
        refuse("dimensions", f"{dimensions} is more than the model's {len(values)}")
    values = values[: dimensions or None]
    length = math.sqrt(math.fsum(value * value for value in values))
    if not unnormalized and length:
        values = [value / length for value in values]
    return mesh_pb2.Embedding(values=values, num_tokens=embedding.num_tokens, num_cached_tokens=embedding.num_cached_tokens)


def _check(request: mesh_pb2.EmbedRequest) -> None:
    if not 1 <= len(request.inputs) <= MAX_INPUTS:
        refuse("inputs", f"there are {len(request.inputs)}; send 1 to {MAX_INPUTS}")
    if request.pooling not in common_pb2.Pooling.values():
        refuse("pooling", f"{request.pooling} is none of {', '.join(common_pb2.Pooling.keys())}")
    for number, wanted in enumerate(request.inputs):
        if wanted.WhichOneof("input") is None:
            refuse(f"inputs[{number}]", "is empty; send a text or token ids")


def _request_of(request: mesh_pb2.EmbedRequest, number: int) -> mesh_pb2.GenerateRequest:
    """Return the request for one input, by which it is checked, tokenized and admitted."""
    sampling = common_pb2.SamplingParams(max_tokens=1, temperature=0.0, seed=0, n=1)
    wanted = mesh_pb2.GenerateRequest(model=request.model, sampling=sampling, options=request.options)
    if request.inputs[number].WhichOneof("input") == "text":
        wanted.text = request.inputs[number].text
    else:
        wanted.tokens.CopyFrom(request.inputs[number].tokens)
    if len(request.inputs) > 1 and wanted.options.request_id:
        suffix = f"-{number}"
        wanted.options.request_id = wanted.options.request_id[: _ID_CHARS - len(suffix)] + suffix
    return wanted


def _named(error: MeshError, number: int) -> MeshError:
    """Return an error about the prompt with the name of the input."""
    field = error.field or ""
    if not field.startswith(("prompt", "tokens.ids", "sampling")):
        return error
    param = f"inputs[{number}]" + field.removeprefix("prompt").removeprefix("tokens.ids").removeprefix("sampling.max_tokens")
    if isinstance(error, ContextOverflow):
        return MeshError(f"{param}: {error.words('input')}", code=error.code, field=param, reason=error.reason)
    return InvalidArgument(param, f"{param}: {error.message.removeprefix(f'{field}: ')}")


async def _together(works: Sequence[Awaitable[T]]) -> list[T]:
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
