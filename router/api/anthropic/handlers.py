"""The endpoints of Anthropic's Messages API, and its list of models."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from pdmesh.runtime.errors import MeshError, NotFound
from router.api.anthropic.bodies import MessageBody, PromptBody
from router.api.anthropic.errors import REQUEST_ID, error_response
from router.api.anthropic.requests import Call, parse_count, parse_message
from router.api.anthropic.responses import (
    PING,
    Answer,
    MessageAnswer,
    MessageError,
    MessageEvent,
    ModelInfo,
    ModelPage,
    TokenCount,
)
from router.api.frontend import Frontend
from router.api.http.body import Endpoint as Handler
from router.api.http.body import HttpSettings, guarded, json_response, parsed, read_body
from router.api.http.errors import renamed
from router.api.http.exchange import Exchange
from router.api.http.fields import JsonObject
from router.api.http.headers import (
    GENERATION_HEADERS,
    HEADER_NAMES,
    TIME_HEADERS,
    authorization_of,
    options_of,
    request_id_of,
    requested_time_left_s,
)
from router.api.http.openapi import Endpoint
from router.auth import identity
from router.telemetry.request_trace import CHAT

VERSION = b"anthropic-version"
"""Header that every client of Anthropic's API sends. No version changes anything here, so it may be missing."""


class Handlers:
    """Handle the endpoints of one router."""

    def __init__(self, frontend: Frontend, settings: HttpSettings) -> None:
        self._frontend = frontend
        self._settings = settings
        self._exchange = Exchange(frontend, settings, PING)
        self._created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    async def create(self, request: Request) -> Response:
        """Handle POST /v1/messages."""
        return await self._exchange.run(request, parse_message, Answer, CHAT)

    async def count_tokens(self, request: Request) -> Response:
        """Handle POST /v1/messages/count_tokens: the tokens of the prompt that the same request has in `create`."""
        identity.authenticate(self._settings.keys, authorization_of(request.headers))
        options = options_of(request.headers, request_id_of(request.scope))
        sent = await read_body(request, self._settings.max_body_bytes)
        call: Call = await parsed(lambda body: parse_count(body, options), sent)
        try:
            num_tokens = await self._frontend.count_chat(call.request, requested_time_left_s(request.headers))
        except MeshError as error:
            raise renamed(error, {**HEADER_NAMES, **call.names_of(0)}) from error
        return json_response({"input_tokens": num_tokens})

    async def list_models(self, request: Request) -> Response:
        """Handle GET /v1/models: all of them, on one page."""
        identity.authenticate(self._settings.keys, authorization_of(request.headers))
        models = list(self._models())
        ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]} if models else {"first_id": None, "last_id": None}
        return json_response({"data": models, "has_more": False, **ends})

    async def get_model(self, request: Request) -> Response:
        """Handle GET /v1/models/{model}."""
        identity.authenticate(self._settings.keys, authorization_of(request.headers))
        name = request.path_params["model"]
        for model in self._models():
            if model["id"] == name:
                return json_response(model)
        raise NotFound(f"model: {name[:100]!r} is not served here", field="model")

    def _models(self) -> Iterable[JsonObject]:
        for model in self._frontend.models().models:
            yield {
                "type": "model",
                "id": model.name,
                "display_name": model.name,
                "created_at": self._created,
                "lifecycle": "active",
                "max_input_tokens": model.max_context,
                "max_tokens": model.max_context,
            }


class VersionedEndpoint(Endpoint):
    """A path that other APIs have, too: it is Anthropic's for requests with `anthropic-version`."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return how well a request matches; not at all without the header."""
        is_anthropics = any(name == VERSION for name, _ in scope.get("headers", ()))
        return super().matches(scope) if is_anthropics else (Match.NONE, {})


def routes(frontend: Frontend, settings: HttpSettings) -> list[Route]:
    """Return the endpoints of Anthropic's API. Those of models go before OpenAI's."""
    handlers = Handlers(frontend, settings)
    versioned = partial(VersionedEndpoint, method="GET", error=MessageError, header=VERSION.decode(), wrap=_answered)
    return [
        Endpoint(
            "/v1/messages", handlers.create, "The next message of a conversation, in Anthropic's form",
            headers=GENERATION_HEADERS,
            body=MessageBody, answer=MessageAnswer, event=MessageEvent, error=MessageError, wrap=_answered,
        ),
        Endpoint(
            "/v1/messages/count_tokens", handlers.count_tokens, "The tokens of a conversation",
            has_options=True, headers=TIME_HEADERS, body=PromptBody, answer=TokenCount, error=MessageError, wrap=_answered,
        ),
        versioned("/v1/models", handlers.list_models, "The models that are served", answer=ModelPage),
        versioned("/v1/models/{model:path}", handlers.get_model, "One of them", answer=ModelInfo),
    ]  # fmt: skip


def _answered(endpoint: Handler) -> Handler:
    """Wrap an endpoint: errors in Anthropic's form, and the request's id where its clients look for it."""
    call = guarded(endpoint, error_response)

    async def named(request: Request) -> Response:
        response = await call(request)
        response.headers[REQUEST_ID] = request_id_of(request.scope)
        return response

    return named
