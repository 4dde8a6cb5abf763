"""Connections that cost a place and bring nothing: uvicorn's protocol with deadlines for what a client sends, and a limit.

    connected, or a first byte ──HEAD_S──► a whole head ──► the handler (body: `body.READ_TIMEOUT_S`) ──► answered
                                                            └── what the handler left of the body: REST_S

Between requests the server's keep-alive counts. Who is late is told so with 408, and cut off.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from router.api.openai.errors import HttpError
from router.api.openai.handlers import error_response
from router.api.openai.request_id import HEADER, new_id

HEAD_S = 20.0
REST_S = 10.0


class PatientProtocol(H11Protocol):
    """One connection. `max_connections` of the class is set by the server."""

    max_connections: ClassVar[int] = 1024

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Too many: this one is told so at once."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            problem = f"there are {self.max_connections} connections (http_max_connections)"
            self._refuse(HttpError(503, problem, code="service_unavailable"))
            return
        self._expect(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """No deadline is left behind."""
        self._expect(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """What is not whole yet keeps the deadline that it has: a byte now and then buys no time."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """The rest of the request, or a next one that has begun already, has a deadline of its own."""
        super().on_response_complete()
        self._expect(None)
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            return  # between requests
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """As any other error of the gateway."""
        self._refuse(HttpError(400, msg))

    def _watch(self) -> None:
        answered = self.conn.our_state in (h11.DONE, h11.MUST_CLOSE)
        if self.conn.their_state is h11.IDLE:
            self._expect(HEAD_S, again=False)
        elif self.conn.their_state is h11.SEND_BODY and answered:
            self._expect(REST_S, again=False)
        else:
            self._expect(None)

    def _expect(self, delay_s: float | None, *, again: bool = True) -> None:
        """Cuts the connection off in `delay_s`; None: for now nothing is expected. Not `again`: a deadline that is set stays."""
        if self._deadline is not None:
            if delay_s is not None and not again:
                return
            self._deadline.cancel()
            self._deadline = None
        if delay_s is not None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(delay_s, self._late)

    def _late(self) -> None:
        self._deadline = None
        if self.conn.their_state is h11.IDLE:
            self._refuse(HttpError(408, f"no whole head of a request came within {HEAD_S:g} s"))
        else:
            self.transport.abort()

    def _refuse(self, error: HttpError) -> None:
        """Says why, if that can be said still, and closes. A client that does not read is cut off by the socket's own limits."""
        self._expect(None)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = error_response(error)
            headers = [*answer.raw_headers, (b"connection", b"close"), (HEADER.encode(), new_id().encode())]
            self.transport.write(_wire(self.conn, answer.status_code, headers, bytes(answer.body)))
        self.transport.close()


def _wire(conn: h11.Connection, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes:
    events = (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage())
    return b"".join(conn.send(event) for event in events)
