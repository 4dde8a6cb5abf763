"""One embedding: the engine computes a prompt and pools its hidden states; nothing is handed over."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace

from pdmesh.engine.errors import InvalidRequest, NotLoaded, RequestTooLarge
from pdmesh.engine.interface import ServingEngine, Sinks
from pdmesh.engine.request import EngineRequest, Pooling
from pdmesh.runtime.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, ResourceExhausted
from pdmesh.v1 import common_pb2, prefill_pb2
from prefill_service.first_tokens import RETRY_DELAY_S, FirstTokens, FirstTokensSink

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_POOLINGS = {
    common_pb2.POOLING_UNSPECIFIED: Pooling.MEAN,
    common_pb2.POOLING_MEAN: Pooling.MEAN,
    common_pb2.POOLING_LAST: Pooling.LAST,
}
LOOK_S = 60.0


async def embedding_request(
    request: prefill_pb2.EmbedPromptRequest,
    translate: Callable[[common_pb2.TokenRequest], Awaitable[EngineRequest]],
    engine_id: str,
) -> EngineRequest:
    """Return what the engine gets. Raises InvalidArgument naming the field."""
    if not _ID.fullmatch(request.request_id):
        raise InvalidArgument("request_id", f"{request.request_id[:80]!r} is not 1 to 64 of [A-Za-z0-9_-]")
    if not request.HasField("request"):
        raise InvalidArgument("request", "missing")
    if request.pooling not in _POOLINGS:
        raise InvalidArgument("pooling", f"{request.pooling} is none of {', '.join(common_pb2.Pooling.keys())}")
    return replace(await translate(request.request), request_id=engine_id, pooling=_POOLINGS[request.pooling])


async def embed(
    engine: ServingEngine, sinks: Sinks, wanted: EngineRequest, received_ns: int, time_left_ms: int
) -> prefill_pb2.EmbedPromptResponse:
    """Return the embedding. Cancelling ends the computation. Raises MeshError."""
    sink = FirstTokensSink()
    sinks.add(wanted.request_id, sink)
    try:
        async with asyncio.timeout(time_left_ms / 1000 if time_left_ms else None):
            first = await _computed(engine, sink, wanted)
    except TimeoutError as error:
        raise DeadlineExceeded("the request's deadline has passed during its computation") from error
    except NotLoaded as error:
        raise FailedPrecondition(error.field, str(error)) from error
    except (InvalidRequest, RequestTooLarge) as error:
        field, _, problem = str(error).partition(": ")
        raise _refused(field, problem) from error
    finally:
        sinks.remove(wanted.request_id)
        await asyncio.shield(engine.release(wanted.request_id))
    return prefill_pb2.EmbedPromptResponse(values=first.updates[0].pooled, timings=first.timings(received_ns))


async def _computed(engine: ServingEngine, sink: FirstTokensSink, wanted: EngineRequest) -> FirstTokens:
    if not await engine.add(wanted):
        raise ResourceExhausted("this worker's prefill queue is full", retry_delay_s=RETRY_DELAY_S)
    while (first := await sink.wait(LOOK_S)) is None:
        pass
    return first


def _refused(field: str, problem: str) -> InvalidArgument | FailedPrecondition:
    """Return the error for an engine that refuses: it gives no hidden states, or the request is wrong."""
    if field == "pooling":
        return FailedPrecondition("pooling", f"pooling: {problem}")
    return InvalidArgument(f"request.{field}", problem or field)
