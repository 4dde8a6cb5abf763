"""What trainers call over HTTP to steer a rollout engine, by the names that vLLM and SGLang gave it: pause, sleep, other weights.

    vLLM, in the query     POST /pause /resume /sleep /wake_up           GET /is_paused /is_sleeping
    SGLang, in the body    POST /pause_generation /continue_generation /release_memory_occupation /resume_memory_occupation
                           /update_weights_from_disk

All of them are `Mesh.SetServing` and `Mesh.UpdateWeights` (docs/serving.md, docs/weights.md), for every worker of the model: that
of `?model=`, where the mesh serves several. A prefix cache holds blocks by the weights that made them, so to clear it, which both
ask for with their defaults, is never needed. Requests with an `Origin` are refused: no web page may put a mesh to sleep.

Sources: docs.vllm.ai/en/stable/api/vllm/entrypoints/rl/online/api_router, docs.vllm.ai/en/latest/features/sleep_mode,
docs.sglang.io/advanced_features/sglang_for_rl.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Literal, TypeVar

from pydantic import StringConstraints
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdmesh.runtime.errors import Unavailable
from pdmesh.v1 import mesh_pb2, worker_pb2
from router.api.frontend import Frontend
from router.api.http.body import HttpSettings, json_response, parsed, read_body
from router.api.http.errors import HttpError
from router.api.http.headers import authorization_of
from router.api.http.openapi import Endpoint
from router.api.http.types import AnswerBody, Body, Ignored, checked
from router.api.validation import refuse
from router.auth import identity
from router.fleet.model_changes.weights import MAX_FOLDER_CHARS

RUNNING, PAUSED, ASLEEP = (
    worker_pb2.SERVING_STATE_RUNNING,
    worker_pb2.SERVING_STATE_PAUSED,
    worker_pb2.SERVING_STATE_ASLEEP,
)
DAY_MS = 24 * 3600 * 1000
ABORT, WAIT, KEEP = {"abort_running": True}, {"finish_running": True, "timeout_ms": DAY_MS}, dict[str, bool | int]()
VLLM_MODES: Mapping[str, Mapping[str, bool | int]] = {"abort": ABORT, "wait": WAIT, "keep": KEEP}
SGLANG_MODES: Mapping[str, Mapping[str, bool | int]] = {"abort": ABORT, "retract": KEEP, "in_place": KEEP}
LEVELS = ("1", "2")
TAGS = ("weights", "kv_cache")
WEIGHTS_ONLY = {"weights"}
TRUTH = {"true": True, "1": True, "false": False, "0": False}

MODEL = {"model": "The model whose workers are meant; it may be left out where the mesh serves one."}
MODE = {"mode": "abort: what runs or waits ends with the tokens that it has (reason abort); wait: it ends first; keep: it stays."}
PAUSE = {
    **MODE,
    "clear_cache": "Ignored: cached blocks are those of the weights that made them.",
    "wait_for_inflight_requests": "true: as mode=wait.",
    **MODEL,
}
SLEEP = {
    "level": "1 or 2, which are the same here: KV and weights are given back, and weights are read again from their file.",
    **MODE,
}
WAKE_UP = {
    "tags": "weights: the memory is there, and no step runs yet, so that weights can be replaced; kv_cache, or none: all runs."
}


class NoBody(Body):
    """An object without fields."""


class PauseBody(Body):
    """What SGLang's clients send to /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = "abort"
    """abort: what runs or waits ends with the tokens that it has; else it stays, and goes on where it was."""


class MemoryBody(Body):
    """What SGLang's clients send to /release_memory_occupation and /resume_memory_occupation."""

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None
    """To release: any, KV and weights go together. To resume: weights alone, no step runs yet; else all runs."""


class WeightsBody(Body):
    """What SGLang's clients send to /update_weights_from_disk."""

    model_path: Annotated[str, StringConstraints(min_length=1, max_length=MAX_FOLDER_CHARS)]
    """A folder as the workers see it."""
    load_format: Ignored = None
    abort_all_requests: bool = False
    """What runs or waits ends before, with the tokens that it has."""
    weight_version: Ignored = None
    is_async: Ignored = None
    torch_empty_cache: Ignored = None
    keep_pause: Ignored = None
    recapture_cuda_graph: Ignored = None
    token_step: Ignored = None
    flush_cache: Ignored = None


class Done(AnswerBody):
    """The mesh is in the state."""

    status: str


class IsPaused(AnswerBody):
    """Whether all workers of the model are paused or asleep."""

    is_paused: bool


class IsSleeping(AnswerBody):
    """Whether all workers of the model are asleep."""

    is_sleeping: bool


class Updated(AnswerBody):
    """What became of the weights."""

    success: bool
    message: str
    """How many workers compute with them, and what others say."""
    num_paused_requests: int
    """Always 0: requests that have tokens go on with the weights that they began with."""


B = TypeVar("B", bound=Body)


class Handlers:
    """Handle the endpoints of one router."""

    def __init__(self, frontend: Frontend, settings: HttpSettings) -> None:
        self._frontend = frontend
        self._settings = settings

    async def pause(self, request: Request) -> Response:
        """Handle POST /pause."""
        query = self._query(request, PAUSE)
        waits = _one_of(query, "wait_for_inflight_requests", TRUTH, "false")
        _one_of(query, "clear_cache", TRUTH, "true")
        how = WAIT if waits else _one_of(query, "mode", VLLM_MODES, "abort")
        await self._set(request, PAUSED, how)
        return json_response({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        """Handle POST /resume."""
        self._query(request, MODEL)
        await self._set(request, RUNNING)
        return json_response({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        """Handle GET /is_paused."""
        self._query(request, MODEL)
        return json_response({"is_paused": self._is(request, (PAUSED, ASLEEP))})

    async def sleep(self, request: Request) -> Response:
        """Handle POST /sleep."""
        query = self._query(request, {**SLEEP, **MODEL})
        _one_of(query, "level", dict.fromkeys(LEVELS), "1")
        await self._set(request, ASLEEP, _one_of(query, "mode", VLLM_MODES, "abort"))
        return json_response({"status": "asleep"})

    async def wake_up(self, request: Request) -> Response:
        """Handle POST /wake_up."""
        self._query(request, {**WAKE_UP, **MODEL})
        tags = request.query_params.getlist("tags")
        for tag in tags:
            if tag not in TAGS:
                refuse("tags", f"{tag[:40]!r} is none of {', '.join(TAGS)}")
        await self._set(request, _woken(tags))
        return json_response({"status": "awake"})

    async def is_sleeping(self, request: Request) -> Response:
        """Handle GET /is_sleeping."""
        self._query(request, MODEL)
        return json_response({"is_sleeping": self._is(request, (ASLEEP,))})

    async def pause_generation(self, request: Request) -> Response:
        """Handle POST /pause_generation."""
        asked = await self._body(request, PauseBody)
        await self._set(request, PAUSED, SGLANG_MODES[asked.mode])
        return json_response({"status": "paused"})

    async def continue_generation(self, request: Request) -> Response:
        """Handle POST /continue_generation."""
        await self._body(request, NoBody)
        await self._set(request, RUNNING)
        return json_response({"status": "resumed"})

    async def release_memory(self, request: Request) -> Response:
        """Handle POST /release_memory_occupation."""
        await self._body(request, MemoryBody)
        await self._set(request, ASLEEP)
        return json_response({"status": "asleep"})

    async def resume_memory(self, request: Request) -> Response:
        """Handle POST /resume_memory_occupation."""
        asked = await self._body(request, MemoryBody)
        await self._set(request, _woken(asked.tags or ()))
        return json_response({"status": "awake"})

    async def update_weights(self, request: Request) -> Response:
        """Handle POST /update_weights_from_disk."""
        asked = await self._body(request, WeightsBody)
        model = request.query_params.get("model", "")
        was_stopped, is_asleep = self._is(request, (PAUSED, ASLEEP)), self._is(request, (ASLEEP,))
        if asked.abort_all_requests:
            await self._set(request, ASLEEP if is_asleep else PAUSED, ABORT)
        try:
            done = await self._frontend.update_weights(mesh_pb2.MeshUpdateWeightsRequest(model=model, folder=asked.model_path))
        finally:
            if asked.abort_all_requests and not was_stopped:
                await self._set(request, RUNNING)
        failed = [f"{each.worker_id}: {each.error}" for each in done.workers if each.error]
        message = f"{len(done.workers) - len(failed)} of {len(done.workers)} workers compute with {done.weights_hash}"
        answer = {"success": not failed, "message": "; ".join([message, *failed]), "num_paused_requests": 0}
        return json_response(answer, 400 if failed else 200)

    def _query(self, request: Request, known: Mapping[str, str]) -> Mapping[str, str]:
        """Return the query of somebody who may call this. Raises HttpError, MeshError."""
        identity.authenticate_admin(self._settings.keys, authorization_of(request.headers))
        if "origin" in request.headers:
            raise HttpError(403, "Origin: web pages may not call this; call it from a program", param="Origin")
        for name in request.query_params:
            if name not in known:
                refuse(name[:40], f"is not known here; there is {', '.join(known)}")
        return request.query_params

    async def _body(self, request: Request, kind: type[B]) -> B:
        """Return the body of somebody who may call this; none at all is an empty object. Raises HttpError, MeshError."""
        self._query(request, MODEL)
        if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
            return checked(kind, {})
        return await parsed(lambda values: checked(kind, values), await read_body(request, self._settings.max_body_bytes))

    async def _set(
        self, request: Request, state: worker_pb2.ServingState.ValueType, how: Mapping[str, bool | int] = KEEP
    ) -> None:
        """Have the workers be in the state. Raises MeshError, also where only some of them are."""
        serving = worker_pb2.SetServingRequest(
            state=state,
            finish_running=bool(how.get("finish_running")),
            timeout_ms=how.get("timeout_ms", 0),
            abort_running=bool(how.get("abort_running")),
        )
        message = mesh_pb2.MeshSetServingRequest(model=request.query_params.get("model", ""), serving=serving)
        done = await self._frontend.set_serving(message)
        failed = [f"{each.worker_id}: {each.error}" for each in done.workers if each.error]
        if failed:
            raise Unavailable(f"{len(failed)} of {len(done.workers)} workers could not: {'; '.join(failed)}", retry_delay_s=1.0)

    def _is(self, request: Request, states: Iterable[worker_pb2.ServingState.ValueType]) -> bool:
        found = self._frontend.serving_states(request.query_params.get("model", ""))
        return bool(found) and set(found) <= set(states)


def _woken(tags: Iterable[str]) -> worker_pb2.ServingState.ValueType:
    """Return the state after waking what the tags name: with weights alone nothing is to run yet."""
    return PAUSED if set(tags) == WEIGHTS_ONLY else RUNNING


T = TypeVar("T")


def _one_of(query: Mapping[str, str], name: str, known: Mapping[str, T], default: str) -> T:
    text = query.get(name, default)
    if text not in known:
        refuse(name, f"{text[:40]!r} is none of {', '.join(known)}")
    return known[text]


def routes(frontend: Frontend, settings: HttpSettings) -> list[Route]:
    """Return the endpoints for trainers."""
    handlers = Handlers(frontend, settings)
    endpoint = partial(Endpoint, needs_admin=True)
    return [
        endpoint("/pause", handlers.pause, "No step any more, as vLLM has it", query=PAUSE, answer=Done),
        endpoint("/resume", handlers.resume, "Steps again, as vLLM has it", query=MODEL, answer=Done),
        endpoint("/is_paused", handlers.is_paused, "Whether no step runs", method="GET", query=MODEL, answer=IsPaused),
        endpoint("/sleep", handlers.sleep, "Memory given back, as vLLM has it", query={**SLEEP, **MODEL}, answer=Done),
        endpoint("/wake_up", handlers.wake_up, "Memory taken again, as vLLM has it", query={**WAKE_UP, **MODEL}, answer=Done),
        endpoint("/is_sleeping", handlers.is_sleeping, "Whether it is given back", method="GET", query=MODEL, answer=IsSleeping),
        endpoint(
            "/pause_generation", handlers.pause_generation, "No step any more, as SGLang has it",
            query=MODEL, body=PauseBody, answer=Done,
        ),
        endpoint(
            "/continue_generation", handlers.continue_generation, "Steps again, as SGLang has it",
            query=MODEL, body=NoBody, answer=Done,
        ),
        endpoint(
            "/release_memory_occupation", handlers.release_memory, "Memory given back, as SGLang has it",
            query=MODEL, body=MemoryBody, answer=Done,
        ),
        endpoint(
            "/resume_memory_occupation", handlers.resume_memory, "Memory taken again, as SGLang has it",
            query=MODEL, body=MemoryBody, answer=Done,
        ),
        endpoint(
            "/update_weights_from_disk", handlers.update_weights, "Other weights, as SGLang has it",
            query=MODEL, body=WeightsBody, answer=Updated,
        ),
    ]  # fmt: skip
