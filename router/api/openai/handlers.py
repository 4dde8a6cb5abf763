"""The endpoints of OpenAI's API, and those by which balancers ask after the router's health."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdmesh.runtime.errors import MeshError, NotFound
from pdmesh.v1 import mesh_pb2
from router.api.frontend import Frontend
from router.api.http.body import HttpSettings, json_response, parsed, read_body
from router.api.http.connection import RECEIVED_NS, while_connected
from router.api.http.errors import ErrorBody, HttpError, as_told, renamed
from router.api.http.exchange import Exchange, Parse
from router.api.http.fields import JsonObject
from router.api.http.headers import (
    GENERATION_HEADERS,
    HEADER_NAMES,
    PROMPT_HEADERS,
    TIME_HEADERS,
    authorization_of,
    options_of,
    request_id_of,
    requested_time_left_s,
)
from router.api.http.openapi import Endpoint
from router.api.openai import answers, bodies, embeddings, requests
from router.api.openai.responses import Answer, Call
from router.api.openai.sampling import set_parameters
from router.api.validation import check_tokens
from router.auth import identity
from router.telemetry.request_trace import CHAT, COMPLETION, EMBEDDINGS


class Handlers:
    """Handle the endpoints of one router."""

    def __init__(self, frontend: Frontend, settings: HttpSettings) -> None:
        self._frontend = frontend
        self._settings = settings
        self._exchange = Exchange(frontend, settings)
        self._created = int(time.time())

    async def chat(self, request: Request) -> Response:
        """Handle POST /v1/chat/completions."""
        return await self._answer(request, requests.parse_chat, CHAT)

    async def complete(self, request: Request) -> Response:
        """Handle POST /v1/completions."""
        return await self._answer(request, requests.parse_completion, COMPLETION)

    async def embed(self, request: Request) -> Response:
        """Handle POST /v1/embeddings."""
        identity.authenticate(self._settings.keys, authorization_of(request.headers))
        sent_headers = request.headers.items()
        options = options_of(request.headers, request_id_of(request.scope))
        time_left_s = requested_time_left_s(request.headers)
        try:
            sent = await read_body(request, self._settings.max_body_bytes)
            message, wanted = await parsed(lambda body: embeddings.parse(body, options), sent)
        except (HttpError, MeshError) as error:
            self._frontend.refused(EMBEDDINGS, as_told(error), request.scope[RECEIVED_NS], sent_headers)
            raise
        work = self._frontend.embed(message, time_left_s, request.scope[RECEIVED_NS], sent_headers)
        try:
            return json_response(embeddings.body_of(await while_connected(request.receive, work), wanted))
        except MeshError as error:
            raise renamed(error, {**HEADER_NAMES, **embeddings.NAMES}) from error

    async def tokenize(self, request: Request) -> Response:
        """Handle POST /tokenize, as vLLM has it."""
        identity.authenticate(self._settings.keys, authorization_of(request.headers))
        wanted = await parsed(requests.parse_tokenize, await read_body(request, self._settings.max_body_bytes))
        try:
            found = await self._frontend.tokenize(
                wanted.message,
                requested_time_left_s(request.headers),
                add_special_tokens=wanted.add_special_tokens,
            )
        except MeshError as error:
            raise renamed(error, {"text": "prompt", **wanted.names}) from error
        tokens = list(found.token_ids)
        spelling_of = self._frontend.model_of(wanted.message.model).tokenizer.token_text
        spelled = [spelling_of(token_id) for token_id in tokens] if wanted.with_strings else None
        return json_response({"count": len(tokens), "max_model_len": found.max_context, "tokens": tokens, "token_strs": spelled})

    async def detokenize(self, request: Request) -> Response:
        """Handle POST /detokenize, as vLLM has it: special tokens by name."""
        identity.authenticate(self._settings.keys, authorization_of(request.headers))
        sent = await read_body(request, self._settings.max_body_bytes)
        name, tokens = await parsed(requests.parse_detokenize, sent)
        tokenizer = self._frontend.model_of(name).tokenizer
        check_tokens("tokens", tokens, tokenizer.vocab_size)
        return json_response({"prompt": tokenizer.decode(tokens, skip_special_tokens=False)})

    async def list_models(self, request: Request) -> Response:
        """Handle GET /v1/models."""
        identity.authenticate(self._settings.keys, authorization_of(request.headers))
        return json_response({"object": "list", "data": list(self._models())})

    async def get_model(self, request: Request) -> Response:
        """Handle GET /v1/models/{model}."""
        identity.authenticate(self._settings.keys, authorization_of(request.headers))
        name = request.path_params["model"]
        for model in self._models():
            if model["id"] == name:
                return json_response(model)
        raise NotFound(f"model: {name[:100]!r} is not served here", field="model")

    async def live(self, request: Request) -> Response:
        """Handle GET /health/live: 200, as long as this process answers."""
        return json_response({"status": "live"})

    async def ready(self, request: Request) -> Response:
        """Handle GET /health and /health/ready: 200 while some decode worker can take a request, else 503."""
        if self._frontend.is_ready:
            return json_response({"status": "ready"})
        return json_response({"status": "not ready"}, 503)

    async def _answer(self, request: Request, parse: Parse[Call], operation: str) -> Response:
        def make(call: Call, request_id: str) -> Answer:
            return Answer(call, request_id, int(time.time()), self._echo(call), self._spelling_of)

        return await self._exchange.run(request, parse, make, operation)

    def _echo(self, call: Call) -> Callable[[int, str], str]:
        def echo(number: int, model: str) -> str:
            wanted = call.requests[number]
            if not call.echo or isinstance(wanted, mesh_pb2.ChatRequest):
                return ""
            return wanted.text or self._frontend.model_of(model).tokenizer.decode(wanted.tokens.ids)

        return echo

    def _spelling_of(self, model: str, token_id: int) -> bytes:
        return self._frontend.model_of(model).tokenizer.single_token_bytes(token_id)

    def _models(self) -> Iterable[JsonObject]:
        for model in self._frontend.models().models:
            yield {
                "id": model.name,
                "object": "model",
                "created": self._created,
                "owned_by": "pdmesh",
                "max_model_len": model.max_context,
                **({"sampling_defaults": defaults} if (defaults := set_parameters(model.sampling_defaults)) else {}),
                **({"parent": model.base_model} if model.base_model else {}),
            }


def routes(frontend: Frontend, settings: HttpSettings) -> list[Route]:
    """Return the endpoints of OpenAI's API, and those by which balancers ask after the router's health."""
    handlers = Handlers(frontend, settings)
    health = partial(Endpoint, method="GET", answer=answers.Health, error=None, needs_key=False)
    return [
        Endpoint(
            "/v1/chat/completions", handlers.chat, "The next message of a conversation", headers=GENERATION_HEADERS,
            body=bodies.ChatCompletionRequest, answer=answers.ChatCompletion, event=answers.ChatCompletionChunk | ErrorBody,
        ),
        Endpoint(
            "/v1/completions", handlers.complete, "Continuations of prompts", headers=GENERATION_HEADERS,
            body=bodies.CompletionRequest, answer=answers.Completion, event=answers.CompletionChunk | ErrorBody,
        ),
        Endpoint(
            "/v1/embeddings", handlers.embed, "Embeddings of texts", headers=PROMPT_HEADERS,
            body=embeddings.EmbeddingsBody, answer=embeddings.Embeddings,
        ),
        Endpoint(
            "/tokenize", handlers.tokenize, "The tokens of a text or a conversation", headers=TIME_HEADERS,
            body=bodies.TokenizeTextRequest | bodies.TokenizeChatRequest, answer=answers.Tokenized,
        ),
        Endpoint(
            "/detokenize", handlers.detokenize, "The text of tokens", body=bodies.DetokenizeRequest, answer=answers.Detokenized
        ),
        Endpoint("/v1/models", handlers.list_models, "The models that are served", method="GET", answer=answers.ModelList),
        Endpoint("/v1/models/{model:path}", handlers.get_model, "One of them", method="GET", answer=answers.Model),
        health("/health", handlers.ready, "As /health/ready"),
        health("/health/ready", handlers.ready, "200 while a decode worker can take requests, else 503"),
        health("/health/live", handlers.live, "200 while the process answers"),
    ]  # fmt: skip
