"""`POST /v1/embeddings`: from JSON to an EmbedRequest, and from its response to JSON."""

from __future__ import annotations

import base64
import struct
from typing import Annotated, Literal

from pydantic import Field

from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.embedding import MAX_INPUTS
from router.api.http.fields import MAX_UINT32, JsonObject
from router.api.http.types import AnswerBody, Body, Ignored, Text, checked, unsupported
from router.api.validation import refuse

_POOLINGS = {"mean": common_pb2.POOLING_MEAN, "last": common_pb2.POOLING_LAST}
TokenId = Annotated[int, Field(ge=0, le=MAX_UINT32)]
NAMES = {"inputs": "input"}


class EmbeddingsBody(Body):
    """The body of a request. `pooling` and `normalize` are additions to OpenAI's fields."""

    input: Text | list[Text] | list[TokenId] | list[list[TokenId]]
    model: Text = ""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=MAX_UINT32)] | None = None
    pooling: Literal["mean", "last"] = "mean"
    normalize: bool = True
    user: Ignored = None
    truncate_prompt_tokens: unsupported() = None  # type: ignore[valid-type]


class Embedding(AnswerBody):
    """The embedding of one input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Numbers, or as base64 float32 in little-endian order."""


class EmbeddingsUsage(AnswerBody):
    """Counts of tokens."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(AnswerBody):
    """The answer: one embedding for each input, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


def parse(body: JsonObject, options: mesh_pb2.RequestOptions) -> tuple[mesh_pb2.EmbedRequest, EmbeddingsBody]:
    """Return the request. Raises InvalidArgument that names the field."""
    wanted = checked(EmbeddingsBody, body)
    inputs = _inputs(wanted.input)
    if not 1 <= len(inputs) <= MAX_INPUTS:
        refuse("input", f"there are {len(inputs)}; send 1 to {MAX_INPUTS}")
    request = mesh_pb2.EmbedRequest(
        model=wanted.model,
        inputs=inputs,
        pooling=_POOLINGS[wanted.pooling],
        dimensions=wanted.dimensions or 0,
        unnormalized=not wanted.normalize,
        options=options,
    )
    return request, wanted


def _inputs(value: str | list[str] | list[int] | list[list[int]]) -> list[mesh_pb2.EmbedInput]:
    if isinstance(value, str):
        return [mesh_pb2.EmbedInput(text=value)]
    if value and all(isinstance(each, int) for each in value):
        return [mesh_pb2.EmbedInput(tokens=mesh_pb2.TokenIds(ids=[int(each) for each in value if isinstance(each, int)]))]
    return [_input(each) for each in value]


def _input(value: str | list[int] | int) -> mesh_pb2.EmbedInput:
    if isinstance(value, str):
        return mesh_pb2.EmbedInput(text=value)
    return mesh_pb2.EmbedInput(tokens=mesh_pb2.TokenIds(ids=value if isinstance(value, list) else [value]))


def body_of(response: mesh_pb2.EmbedResponse, wanted: EmbeddingsBody) -> JsonObject:
    """Return the body of the response."""
    num_tokens = sum(embedding.num_tokens for embedding in response.embeddings)
    data = [
        {"object": "embedding", "index": index, "embedding": _values(embedding, wanted.encoding_format)}
        for index, embedding in enumerate(response.embeddings)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": response.model, "usage": usage}


def _values(embedding: mesh_pb2.Embedding, encoding_format: str) -> object:
    """Return the values; as base64 they are float32 in little-endian order."""
    if encoding_format == "float":
        return list(embedding.values)
    return base64.b64encode(struct.pack(f"<{len(embedding.values)}f", *embedding.values)).decode("ascii")
