"""HTTP/1.1 for hundreds of new streams a second: persistent connections, on h11.

A general client (httpx, with its pool that scans every connection for each request) needs more than one core for 500 streams a
second; `make bench-loadtest` measures both.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import h11

from pdmesh.runtime.addresses import join_address
from pdmesh.runtime.rpc.tls import TlsConfig

_READ_BYTES = 1 << 16
_CONNECT_TIMEOUT_S = 10.0


class HttpError(Exception):
    """Raised without an HTTP answer: the connection could not be opened, was lost, or carries something else."""


@dataclass(frozen=True)
class BaseUrl:
    """Name a server. `path` has no slash at its end."""

    scheme: str
    host: str
    port: int
    path: str

    @staticmethod
    def parse(url: str) -> BaseUrl:
        """Parse an http(s) URL. Raises ValueError for anything else."""
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise ValueError(f"{url!r} is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL; give one such as http://127.0.0.1:8000/v1")
        return BaseUrl(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))

    @property
    def host_header(self) -> str:
        """Return the host with the port, also where it is the scheme's own: servers accept both."""
        return join_address(self.host, self.port)


class _Connection:
    """Hold one connection, which carries one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)

    @property
    def reusable(self) -> bool:
        """Return whether the server has left it open."""
        return self._http.our_state is h11.IDLE and not self._reader.at_eof() and not self._writer.is_closing()

    async def send(self, request: h11.Request, body: bytes) -> None:
        pieces = (self._http.send(request), self._http.send(h11.Data(data=body)), self._http.send(h11.EndOfMessage()))
        self._writer.write(b"".join(piece for piece in pieces if piece))
        await self._writer.drain()

    async def next_event(self) -> h11.Event:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return cast(h11.Event, event)
            self._http.receive_data(await self._reader.read(_READ_BYTES))

    def end_cycle(self) -> None:
        """Prepare for the next request, if both sides are done and keep the connection."""
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()

    def close(self) -> None:
        self._writer.close()


@dataclass
class Response:
    """Read an answer's body as it arrives. Names of `headers` are in lower case."""

    status: int
    headers: Mapping[str, str]
    _connection: _Connection

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the body. Raises HttpError if it breaks off."""
        try:
            while isinstance(event := await self._connection.next_event(), h11.Data):
                yield bytes(event.data)
        except (OSError, h11.ProtocolError) as error:
            raise HttpError(f"the answer broke off: {_reason(error)}") from error
        if not isinstance(event, h11.EndOfMessage):
            raise HttpError("the answer broke off")

    async def read(self, max_bytes: int) -> bytes:
        """Return the whole body, or its first `max_bytes`."""
        body = b""
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) >= max_bytes:
                    break
        return body[:max_bytes]


class HttpClient:
    """Send requests to one server. Idle connections are kept, the last used first; there are as many as concurrent requests."""

    def __init__(self, base: BaseUrl, headers: Mapping[str, str], tls: TlsConfig | None = None) -> None:
        """Create it. `tls`: for https, the CA and our certificate; without: the system's CAs, and no certificate."""
        self._base = base
        self._headers = [("Host", base.host_header), *headers.items()]
        self._tls = _context(tls) if base.scheme == "https" else None
        self._idle: list[_Connection] = []

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Response, None]:
        """Yield the response to a request. Leaving it before its end closes the connection, which cancels it. Raises
        HttpError."""
        length = [("Content-Length", str(len(body)))] if body else []
        target = self._base.path + path
        request = h11.Request(method=method, target=target, headers=[*self._headers, *(headers or {}).items(), *length])
        connection, response = await self._exchange(request, body)
        try:
            yield response
        finally:
            connection.end_cycle()
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()

    async def close(self) -> None:
        """Close idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _exchange(self, request: h11.Request, body: bytes) -> tuple[_Connection, Response]:
        """Send the request. The server may have closed a kept connection meanwhile: if no part of an answer has come, another is
        tried."""
        while True:
            connection, kept = await self._connection()
            try:
                await connection.send(request, body)
                response = await connection.next_event()
                while isinstance(response, h11.InformationalResponse):
                    response = await connection.next_event()
                if not isinstance(response, h11.Response):
                    raise HttpError("the server closed the connection without an answer")
            except (OSError, h11.ProtocolError, HttpError) as error:
                connection.close()
                if not kept:
                    raise HttpError(_reason(error)) from error
            except BaseException:
                connection.close()
                raise
            else:
                headers = {name.decode(): value.decode("latin-1") for name, value in response.headers}
                return connection, Response(response.status_code, headers, connection)

    async def _connection(self) -> tuple[_Connection, bool]:
        """Return a connection, and whether it has been used before."""
        while self._idle:
            if (connection := self._idle.pop()).reusable:
                return connection, True
            connection.close()
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                opened = await asyncio.open_connection(self._base.host, self._base.port, ssl=self._tls)
        except OSError as error:
            raise HttpError(f"cannot connect: {_reason(error)}") from error
        return _Connection(*opened), False


def _context(tls: TlsConfig | None) -> ssl.SSLContext:
    """Return the context. Raises ConfigError, OSError. A server on the web is known by its host's name, not by a mesh's."""
    if tls is None or not tls.is_set:
        return ssl.create_default_context()
    context = ssl.create_default_context(cafile=tls.tls_ca)
    if tls.tls_cert:
        context.load_cert_chain(tls.tls_cert, tls.tls_key)
    return context


def _reason(error: BaseException) -> str:
    """Return the reason without addresses, so that equal causes read the same."""
    if isinstance(error, TimeoutError):
        return "timed out"
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
