"""Keeps other people's pages away from the console: what a browser sends along says who asks.

- a name that was made to point here (DNS rebinding) stands in Host, and is none that we answer to;
- another site's form or script stands in Origin and Sec-Fetch-Site, and only our own page may ask for more than the page.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}
_LOCAL = frozenset({"localhost"})
_SAFE = frozenset({"GET", "HEAD"})


class Guard:
    """Around an application."""

    def __init__(self, app: ASGIApp, allowed_hosts: Collection[str]) -> None:
        self._app = app
        self._allowed = _LOCAL | {name.lower() for name in allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            return
        problem = self._problem(scope["method"], scope["path"], Headers(scope=scope))
        if problem:
            await PlainTextResponse(problem + "\n", status_code=403, headers=HEADERS)(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, with_headers)

    def _problem(self, method: str, path: str, headers: Headers) -> str:
        """Why it is not answered; "" if it is."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return "this console does not answer to that Host; --allowed-hosts names more"
        if method in _SAFE and not path.startswith("/api/"):  # a link to the page may stand anywhere
            return ""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
        if (origin is not None and _netloc(origin) != hosts[0].lower()) or site not in ("same-origin", "none"):
            return "only the console's own page may do that"
        return ""

    def _is_ours(self, host: str) -> bool:
        """Addresses are: no name had to be resolved to get here."""
        name = _hostname(host)
        return name is not None and (name in self._allowed or _is_address(name))


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
