"""The endpoints of the Responses API: `POST /v1/responses`, and GET and DELETE of responses that are kept."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdmesh.v1 import mesh_pb2
from router.api.frontend import Frontend
from router.api.http.body import HttpSettings, json_response
from router.api.http.errors import HttpError
from router.api.http.exchange import Exchange
from router.api.http.headers import GENERATION_HEADERS, authorization_of, options_of, request_id_of
from router.api.http.openapi import Endpoint
from router.api.responses.answer import Answer, Identity, ServedModels
from router.api.responses.kept import KeepSettings, KeptResponses, completed
from router.api.responses.requests import Call, CreateResponse, parse
from router.api.responses.schema import DeletedResponse, ResponseEvent, ResponseObject
from router.api.validation import refuse
from router.auth import identity
from router.config import RouterConfig
from router.telemetry.request_trace import CHAT

ID_BYTES = 12


class Handlers:
    """Handle the endpoints of one router. Without a `store` nothing is kept."""

    def __init__(self, frontend: Frontend, settings: HttpSettings, store: KeptResponses | None) -> None:
        self._frontend = frontend
        self._settings = settings
        self._store = store
        self._exchange = Exchange(frontend, settings)
        self._models = ServedModels(self._defaults_of, self._spelling_of)

    async def create(self, request: Request) -> Response:
        """Handle POST /v1/responses."""

        def make(call: Call, request_id: str) -> Answer:
            named = Identity(secrets.token_hex(ID_BYTES), int(time.time()))
            return Answer(call, named, self._models, time.time, is_kept=self._store is not None and call.body.store is not False)

        return await self._exchange.run(request, parse, make, CHAT, complete=self._complete, at_end=self._keep)

    async def get(self, request: Request) -> Response:
        """Handle GET /v1/responses/{response_id}."""
        store, tenant, response_id = self._asked(request)
        if request.query_params.get("stream", "false") != "false":
            refuse("stream", "only a new response is streamed; leave it out")
        found = await store.get(tenant, response_id)
        if found is None:
            raise _absent(response_id)
        return json_response(found.response)

    async def delete(self, request: Request) -> Response:
        """Handle DELETE /v1/responses/{response_id}."""
        store, tenant, response_id = self._asked(request)
        if not await store.delete(tenant, response_id):
            raise _absent(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def _complete(self, call: Call) -> Call:
        """Return a call with what it needs of kept responses. Raises HttpError, MeshError."""
        if call.body.store and self._store is not None:
            await self._store.check()
        return await completed(call, _tenant_of(call.request.options), self._store)

    async def _keep(self, call: Call, answer: Answer) -> None:
        """Keep a response that is whole; one that could not be kept says so (`store`)."""
        if self._store is None or not answer.is_kept:
            return
        tenant = _tenant_of(call.request.options)
        answer.is_kept = await self._store.put(tenant, answer.body(), list(call.conversation))

    def _asked(self, request: Request) -> tuple[KeptResponses, str, str]:
        """Return the store, the tenant and the response's id. Raises HttpError, MeshError."""
        identity.authenticate(self._settings.keys, authorization_of(request.headers))
        tenant = _tenant_of(options_of(request.headers, request_id_of(request.scope)))
        if self._store is None:
            raise HttpError(404, "responses are not kept here; start the router with --http-keep-responses-s")
        return self._store, tenant, request.path_params["response_id"]

    def _defaults_of(self, model: str) -> Mapping[str, float]:
        return self._frontend.model_of(model).sampling_defaults if model else {}

    def _spelling_of(self, model: str, token_id: int) -> bytes:
        return self._frontend.model_of(model).tokenizer.single_token_bytes(token_id)


def _tenant_of(options: mesh_pb2.RequestOptions) -> str:
    """Return whose responses a request may see: those of its key's tenant. Raises PermissionDenied for another one's."""
    identity.claim(options)
    return options.tenant


def _absent(response_id: str) -> HttpError:
    return HttpError(404, f"there is no response {response_id[:80]!r}, or none any more", param="response_id")


def _store_of(config: RouterConfig) -> KeptResponses | None:
    if not config.http_keep_responses_s:
        return None
    limits = KeepSettings(config.http_keep_responses_s, config.http_keep_responses_max, config.http_keep_responses_bytes)
    return KeptResponses(config.redis, config.mesh, limits)


def routes(frontend: Frontend, settings: HttpSettings) -> list[Route]:
    """Return the endpoints of the Responses API."""
    store = _store_of(frontend.core.config)
    if store is not None:
        frontend.closing.append(store.close)
    handlers = Handlers(frontend, settings, store)
    kept = partial(Endpoint, has_options=True)
    return [
        Endpoint(
            "/v1/responses", handlers.create, "A response to items of input", headers=GENERATION_HEADERS,
            body=CreateResponse, answer=ResponseObject, event=ResponseEvent,
        ),
        kept("/v1/responses/{response_id}", handlers.get, "A response that is kept", method="GET", answer=ResponseObject),
        kept("/v1/responses/{response_id}", handlers.delete, "Forget it", method="DELETE", answer=DeletedResponse),
    ]  # fmt: skip
