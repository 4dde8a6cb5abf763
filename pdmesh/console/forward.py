"""Hands what the console takes on to another collector, without ever waiting for it: what does not fit is dropped and counted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Mapping

import grpc
import grpc.aio

from pdmesh.runtime.telemetry.config import Endpoint
from pdmesh.runtime.telemetry.otlp import headers, read_ca

MAX_QUEUED_BYTES = 32 << 20
TIMEOUT_S = 5.0
PAUSE_S = 1.0
_MISSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

logger = logging.getLogger(__name__)


class Forwarder:
    """A queue and its task. A call that meets nobody is tried again until newer ones need its room."""

    def __init__(self, endpoint: Endpoint, env: Mapping[str, str]) -> None:
        """`env`: what OpenTelemetry's variables say of headers and CAs. Raises ConfigError."""
        self.num_sent = 0
        self.num_dropped = 0
        self._endpoint = endpoint
        self._headers = tuple(headers(env))
        self._ca = read_ca(env)
        self._queue: deque[tuple[str, bytes]] = deque()
        self._num_bytes = 0
        self._filled = asyncio.Event()
        self._is_reachable = True
        self._task: asyncio.Task[None] | None = None

    def put(self, method: str, body: bytes) -> None:
        """On the event loop."""
        self._queue.append((method, body))
        self._num_bytes += len(body)
        while self._num_bytes > MAX_QUEUED_BYTES:
            self._drop()
        self._filled.set()

    def start(self) -> None:
        """Begins to send."""
        self._task = asyncio.create_task(self._run(), name="forward")

    async def stop(self) -> None:
        """What is left is dropped. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _run(self) -> None:
        async with self._open() as channel:
            while True:
                await self._filled.wait()
                if not self._queue:
                    self._filled.clear()
                elif not await self._send(channel, *self._take()):
                    await asyncio.sleep(PAUSE_S)

    def _open(self) -> grpc.aio.Channel:
        options = (("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 2000))
        if self._endpoint.encrypted:
            return grpc.aio.secure_channel(self._endpoint.target, grpc.ssl_channel_credentials(self._ca), options)
        return grpc.aio.insecure_channel(self._endpoint.target, options)

    def _take(self) -> tuple[str, bytes]:
        method, body = self._queue.popleft()
        self._num_bytes -= len(body)
        return method, body

    def _drop(self) -> None:
        self._take()
        self.num_dropped += 1

    async def _send(self, channel: grpc.aio.Channel, method: str, body: bytes) -> bool:
        """False: nobody is there; it is the next one again."""
        try:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
            await call(body, timeout=TIMEOUT_S, metadata=self._headers)
        except grpc.aio.AioRpcError as error:
            self._note(reachable=False, words=f"{error.code().name}: {error.details()}")
            if error.code() not in _MISSING:
                self.num_dropped += 1
                return True
            self._queue.appendleft((method, body))
            self._num_bytes += len(body)
            return False
        self.num_sent += 1
        self._note(reachable=True)
        return True

    def _note(self, *, reachable: bool, words: str = "") -> None:
        """One line for each change."""
        if reachable != self._is_reachable:
            self._is_reachable = reachable
            if reachable:
                logger.info("%s takes traces again; %d calls were dropped so far", self._endpoint.target, self.num_dropped)
            else:
                logger.warning("%s does not take traces: %s", self._endpoint.target, words)
