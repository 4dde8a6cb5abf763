"""The protocols that clients may speak with a router, each a translation between its own messages and those of `Frontend`.

A new protocol is a module (or folder) beside this and one line in `PROTOCOLS`: its services come to the router's gRPC port, its
routes to the HTTP port, if there is one (`--http-port`). API keys are checked before a gRPC service is called; routes check them
themselves, with `HttpSettings.keys`.

Modules of HTTP are imported when routes are asked for: a router without them, which may be one that was lost and starts again, is
ready in half the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, cast

from pdmesh.runtime.rpc.server import GrpcServer
from pdmesh.runtime.rpc.tls import Tls
from router.api import service as api_service
from router.api.frontend import Frontend
from router.api.kserve import service as kserve_service
from router.api.vllm import service as vllm_service
from router.config import RouterConfig

if TYPE_CHECKING:
    from starlette.routing import Route

    from router.api.batches.service import Batches
    from router.api.http.body import HttpSettings
    from router.api.http.server import HttpServer
    from router.auth.api_keys import KeyStore


@dataclass(frozen=True)
class ClientProtocol:
    """What one protocol adds to a router: services on its gRPC server, before that starts, or routes of its HTTP server."""

    add_services: Callable[[GrpcServer, Frontend], None] | None = None
    routes: Callable[[Frontend, HttpSettings], Sequence[Route]] | None = None


def _routes_in(module: str) -> Callable[[Frontend, HttpSettings], Sequence[Route]]:
    """Return the function `routes` of a module, which is imported at the first call."""

    def routes_of(frontend: Frontend, settings: HttpSettings) -> Sequence[Route]:
        return cast("Sequence[Route]", import_module(module).routes(frontend, settings))

    return routes_of


PROTOCOLS: dict[str, ClientProtocol] = {
    "mesh": ClientProtocol(add_services=api_service.add_services),
    "anthropic": ClientProtocol(routes=_routes_in("router.api.anthropic.handlers")),  # before OpenAI: both have /v1/models
    "openai": ClientProtocol(routes=_routes_in("router.api.openai.handlers")),
    "responses": ClientProtocol(routes=_routes_in("router.api.responses.service")),
    "sessions": ClientProtocol(routes=_routes_in("router.api.http.sessions")),
    "trainers": ClientProtocol(routes=_routes_in("router.api.trainers")),
    "server_load": ClientProtocol(routes=_routes_in("router.api.http.server_load")),
    "kserve": ClientProtocol(add_services=kserve_service.add_services),
    "vllm": ClientProtocol(add_services=vllm_service.add_services),
}


def add_services(server: GrpcServer, frontend: Frontend) -> None:
    """Add the services of all protocols to a router's gRPC server."""
    for protocol in PROTOCOLS.values():
        if protocol.add_services is not None:
            protocol.add_services(server, frontend)


def routes(frontend: Frontend, settings: HttpSettings) -> list[Route]:
    """Return the routes of all protocols."""
    listed = [protocol.routes for protocol in PROTOCOLS.values() if protocol.routes is not None]
    return [route for routes_of in listed for route in routes_of(frontend, settings)]


# Batch files, whose lines are requests of the protocols above.


def open_batches(config: RouterConfig, frontend: Frontend) -> Batches | None:
    """Return the batches of a router, which do nothing before their start; None where there is no folder for them. Their lines
    may call the routes of every protocol that are among OpenAI's endpoints for batches."""
    if not config.batches.http_batch_folder:
        return None
    from router.api.batches.runner import BatchKeys, LineRunner
    from router.api.batches.service import Batches
    from router.api.http.body import HttpSettings

    keys = BatchKeys()
    callable_routes = routes(frontend, HttpSettings(config.http_max_body_bytes, keys))
    return Batches(config.batches, config.http_max_body_bytes, LineRunner(callable_routes, keys))


def all_routes(frontend: Frontend, batches: Batches | None, settings: HttpSettings) -> list[Route]:
    """Return the routes of all protocols, those of batch files if there are any, and those that describe them."""
    from router.api.batches import handlers as batches_handlers
    from router.api.http.openapi import with_description

    of_batches = batches_handlers.routes(batches, settings) if batches is not None else ()
    return with_description([*routes(frontend, settings), *of_batches])


def open_http(
    config: RouterConfig, frontend: Frontend, batches: Batches | None, tls: Tls | None, keys: KeyStore | None
) -> HttpServer | None:
    """Return a server with all routes, which does not listen yet; None where no HTTP is wanted."""
    if config.http_port is None:
        return None
    from router.api.http.server import open_gateway

    return open_gateway(config, partial(all_routes, frontend, batches), tls, keys)
