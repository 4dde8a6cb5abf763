"""The ASGI application: which endpoint stands where, and what becomes of errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdmesh.runtime.errors import as_mesh_error
from router.api.frontend import Frontend
from router.api.openai.errors import HttpError
from router.api.openai.handlers import Handlers, HttpSettings, error_response

Endpoint = Callable[[Request], Awaitable[Response]]


def build_app(frontend: Frontend, settings: HttpSettings) -> Starlette:
    """Serves `frontend`."""
    handlers = Handlers(frontend, settings)
    routes = [
        Route("/v1/chat/completions", _guarded(handlers.chat), methods=["POST"]),
        Route("/v1/completions", _guarded(handlers.complete), methods=["POST"]),
        Route("/v1/models", _guarded(handlers.list_models), methods=["GET"]),
        Route("/v1/models/{model:path}", _guarded(handlers.get_model), methods=["GET"]),
        Route("/health", _guarded(handlers.ready), methods=["GET"]),
        Route("/health/ready", _guarded(handlers.ready), methods=["GET"]),
        Route("/health/live", _guarded(handlers.live), methods=["GET"]),
    ]
    paths = ", ".join(dict.fromkeys(route.path for route in routes))

    async def no_route(request: Request, error: Exception) -> Response:
        """Starlette's own: no such path, or another method."""
        assert isinstance(error, HTTPException)
        where = f"{request.method[:20]} {request.url.path[:200]}"
        problem = f"does not exist; there is {paths}" if error.status_code == 404 else "is not possible; use another method"
        response = error_response(HttpError(error.status_code, f"{where} {problem}"))
        response.headers.update(error.headers or {})
        return response

    return Starlette(routes=routes, exception_handlers={HTTPException: no_route})


def _guarded(endpoint: Endpoint) -> Endpoint:
    """Every error becomes an answer; what is a bug is logged, and its id is all that a client learns."""

    async def call(request: Request) -> Response:
        try:
            return await endpoint(request)
        except HttpError as error:
            return error_response(error)
        except Exception as error:  # noqa: BLE001 - the boundary
            return error_response(as_mesh_error(error))

    return call
