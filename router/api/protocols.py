"""The protocols that clients may speak with a router, each a translation between its own messages and those of `Frontend`.

A new protocol is a module (or folder) beside this and one line in `PROTOCOLS`: its services come to the router's gRPC port, its
routes to the HTTP port, if there is one (`--http-port`). API keys are checked before a gRPC service is called; routes check them
themselves, with `HttpSettings.keys`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.routing import Route

from pdmesh.runtime.rpc.server import GrpcServer
from router.api import service as api_service
from router.api.anthropic import handlers as anthropic_handlers
from router.api.batches import handlers as batches_handlers
from router.api.batches.runner import BatchKeys, LineRunner
from router.api.batches.service import Batches
from router.api.frontend import Frontend
from router.api.http import sessions
from router.api.http.body import HttpSettings
from router.api.http.openapi import with_description
from router.api.kserve import service as kserve_service
from router.api.openai import handlers as openai_handlers
from router.api.responses import service as responses_service
from router.api.vllm import service as vllm_service
from router.config import RouterConfig


@dataclass(frozen=True)
class ClientProtocol:
    """What one protocol adds to a router: services on its gRPC server, before that starts, or routes of its HTTP server."""

    add_services: Callable[[GrpcServer, Frontend], None] | None = None
    routes: Callable[[Frontend, HttpSettings], Sequence[Route]] | None = None


PROTOCOLS: dict[str, ClientProtocol] = {
    "mesh": ClientProtocol(add_services=api_service.add_services),
    "anthropic": ClientProtocol(routes=anthropic_handlers.routes),  # before OpenAI: both have /v1/models
    "openai": ClientProtocol(routes=openai_handlers.routes),
    "responses": ClientProtocol(routes=responses_service.routes),
    "sessions": ClientProtocol(routes=sessions.routes),
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
    keys = BatchKeys()
    callable_routes = routes(frontend, HttpSettings(config.http_max_body_bytes, keys))
    return Batches(config.batches, config.http_max_body_bytes, LineRunner(callable_routes, keys))


def all_routes(frontend: Frontend, batches: Batches | None, settings: HttpSettings) -> list[Route]:
    """Return the routes of all protocols, those of batch files if there are any, and those that describe them."""
    of_batches = batches_handlers.routes(batches, settings) if batches is not None else ()
    return with_description([*routes(frontend, settings), *of_batches])
