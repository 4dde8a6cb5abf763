"""The gateway of one router: the endpoints on the frontend, behind a port of their own."""

from __future__ import annotations

from router.config import RouterConfig
from router.frontend import Frontend
from router.key_store import KeyStore
from router.openai import app
from router.openai.handlers import HttpSettings
from router.openai.server import HttpServer
from runtime.tls import Tls


def open_gateway(config: RouterConfig, frontend: Frontend, tls: Tls | None, keys: KeyStore | None) -> HttpServer | None:
    """Not listening yet; None where no HTTP is wanted. With TLS it is https, and asks for certificates as gRPC does."""
    if config.http_port is None:
        return None
    settings = HttpSettings(config.http_max_body_bytes, keys)
    context = None if tls is None else tls.listening_context(require_client=config.tls_client_auth == "require")
    return HttpServer(
        app.build(frontend, settings),
        config.http_host or config.host,
        config.http_port,
        context,
        max_connections=config.http_max_connections,
        share_port=config.share_ports,
    )
