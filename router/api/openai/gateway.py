"""The gateway of one router: the endpoints on the frontend, behind a port of their own."""

from __future__ import annotations

from pdmesh.runtime.rpc.tls import Tls
from router.api.frontend import Frontend
from router.api.openai import app
from router.api.openai.handlers import HttpSettings
from router.api.openai.server import HttpServer
from router.auth.key_store import KeyStore
from router.config import RouterConfig


def open_gateway(config: RouterConfig, frontend: Frontend, tls: Tls | None, keys: KeyStore | None) -> HttpServer | None:
    """Not listening yet; None where no HTTP is wanted. With TLS it is https, and asks for certificates as gRPC does."""
    if config.http_port is None:
        return None
    settings = HttpSettings(config.http_max_body_bytes, keys)
    context = None if tls is None else tls.listening_context(require_client=config.tls_client_auth == "require")
    return HttpServer(
        app.build_app(frontend, settings),
        config.http_host or config.host,
        config.http_port,
        context,
        max_connections=config.http_max_connections,
        share_port=config.share_ports,
    )
