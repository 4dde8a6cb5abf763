"""One client's connection during a response: whether the client is still connected, and whether it reads what it is sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import TypeVar, cast

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdmesh.runtime.errors import Cancelled

T = TypeVar("T")
ABORT = "pdmesh.abort"
"""Key of an ASGI scope: a function that ends the connection at once and drops unsent data (see `router.api.http.server`)."""

RECEIVED_NS = "pdmesh.received_ns"
"""Key of an ASGI scope: monotonic nanoseconds when the last bytes of the request arrived, before they were parsed."""

STALLED_S = 30.0
"""A client that has made no room for the next event for this long counts as gone, whatever the state of its socket."""

PING_S = 15.0
"""After a silence of this long a stream sends a ping, in APIs that have one: proxies and clients close what seems dead."""

logger = logging.getLogger(__name__)


async def while_connected(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """Return the result of `work`, which is cancelled when the client leaves: then Cancelled is raised. The body must have been
    read."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("the client has left")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Send server-sent events: each item of `events` is one complete event, and so is `ping`, which fills silences unless it is
    empty. `events` is closed at the end, or when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], ping: bytes = b"") -> None:
        # The last header tells proxies (nginx) to forward each event at once.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self._events = events
        self._ping = ping
        self._sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events. Raises nothing when the client has left."""
        async with aclosing(self._events):
            try:
                await while_connected(receive, self._send_all(send))
            except Cancelled:
                return
            except TimeoutError:
                logger.warning("a client took nothing for %g s: its connection is closed", STALLED_S)
                cast("Callable[[], None]", scope[ABORT])()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pings = asyncio.create_task(self._fill_silences(send)) if self._ping else None
        try:
            async for event in self._events:
                await self._send(send, event)
        finally:
            if pings is not None:
                pings.cancel()
                await asyncio.gather(pings, return_exceptions=True)
        await _in_time(send({"type": "http.response.body", "body": b"", "more_body": False}))

    async def _send(self, send: Send, event: bytes) -> None:
        self._sent_s = asyncio.get_running_loop().time()
        await _in_time(send({"type": "http.response.body", "body": event, "more_body": True}))

    async def _fill_silences(self, send: Send) -> None:
        """Send a ping whenever nothing was sent for PING_S. Events and pings do not mix: each is written at once."""
        loop = asyncio.get_running_loop()
        self._sent_s = loop.time()
        while True:
            silent_s = loop.time() - self._sent_s
            if silent_s >= PING_S:
                await self._send(send, self._ping)
            else:
                await asyncio.sleep(PING_S - silent_s)


async def _in_time(sending: Awaitable[None]) -> None:
    async with asyncio.timeout(STALLED_S):
        await sending
