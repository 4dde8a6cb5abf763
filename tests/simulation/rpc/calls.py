"""What both ends of a simulated gRPC call have: mailboxes of messages, windows of what may be sent, kinds of messages."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable
from typing import Any

import grpc

from tests.simulation.environment.network import NO_PINGS_NS
from tests.simulation.world import MILLISECOND

WINDOW_BYTES = 64 * 1024
BACKOFF_NS = 200 * MILLISECOND
CONNECT_TIMEOUT_NS = 1000 * MILLISECOND
OPEN, MESSAGE, END, CANCEL, STATUS, CREDIT = range(6)
READY, IDLE, FAILING = (
    grpc.ChannelConnectivity.READY,
    grpc.ChannelConnectivity.IDLE,
    grpc.ChannelConnectivity.TRANSIENT_FAILURE,
)
_call_ids = itertools.count(1)


def patience_ns(options: Iterable[tuple[str, Any]]) -> int:
    """Return after how long an end with these options of gRPC gives up a peer that it does not hear."""
    given = dict(options)
    quiet_ms, limit_ms = given.get("grpc.keepalive_time_ms"), given.get("grpc.http2.ping_timeout_ms", 60_000)
    return NO_PINGS_NS if quiet_ms is None else (quiet_ms + limit_ms) * MILLISECOND


def new_call_id() -> int:
    """Return a number that no other call has."""
    return next(_call_ids)


class Mailbox:
    """Messages of one direction of a call, at their reader: bytes, then the end."""

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()
        self.is_ended = False
        self._waiters: list[asyncio.Future[None]] = []

    def put(self, message: bytes) -> None:
        self.messages.append(message)
        self.wake()

    def end(self) -> None:
        self.is_ended = True
        self.wake()

    def wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def change(self) -> None:
        """Wait for the next message, or the end."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter


class Window:
    """What a writer may still send."""

    def __init__(self) -> None:
        self.bytes_left = WINDOW_BYTES
        self.is_over = False
        self._changed: list[asyncio.Future[None]] = []

    def add(self, size: int) -> None:
        self.bytes_left += size
        self._wake()

    def close(self) -> None:
        self.is_over = True
        self._wake()

    async def take(self, size: int) -> None:
        while self.bytes_left <= 0 and not self.is_over:
            waiter = asyncio.get_running_loop().create_future()
            self._changed.append(waiter)
            await waiter
        self.bytes_left -= size

    def _wake(self) -> None:
        waiters, self._changed = self._changed, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
