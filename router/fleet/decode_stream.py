"""One Attach stream to one decode worker: tokens of all of this router's requests there, and heartbeats both ways.

The reader gives each output to its request's follower and never blocks. A stream that breaks, or is silent, is opened again with
the next indexes that the followers need. When that fails for the grace period, when the port refuses connections, or when another
incarnation answers, the followers are lost.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from pdmesh.runtime.addresses import split_address
from pdmesh.v1 import decode_pb2, decode_pb2_grpc, worker_pb2
from router.fleet.change_notifier import wait_at_most
from router.fleet.heartbeat import Watchdog, being_cancelled

MIN_BACKOFF_S = 0.05
MAX_BACKOFF_S = 0.5
PROBE_TIMEOUT_S = 0.5

logger = logging.getLogger(__name__)
AttachCall = grpc.aio.StreamStreamCall[decode_pb2.AttachRequest, decode_pb2.Frame]


class Follower(Protocol):
    """Receive the tokens of one request on this worker. The reader calls it, so its methods must return at once."""

    def on_output(self, output: decode_pb2.SequenceOutput) -> None:
        """Take new output of one choice."""

    def on_event(self, event: decode_pb2.RequestEvent) -> None:
        """Take an event of the request."""

    def on_lost(self, reason: str) -> None:
        """End: nothing more will come from this worker. Called once; the stream has dropped the follower by then."""

    def next_indexes(self) -> Sequence[tuple[int, int]]:
        """Return (choice, next output index) of each choice that goes on."""


@dataclass(frozen=True)
class StreamSettings:
    """Hold the settings of a stream; seconds, except `heartbeat_ms`."""

    router_id: str
    heartbeat_ms: int = 100
    stream_timeout_s: float = 1.0
    grace_s: float = 2.0


class DecodeStream:
    """Keep a stream to one worker open, from `start` to `stop`, over any number of connections."""

    def __init__(
        self,
        address: str,
        stub: "decode_pb2_grpc.DecodeServiceAsyncStub",
        settings: StreamSettings,
        *,
        on_change: Callable[[], None],
        on_load: Callable[[worker_pb2.LoadReport], None],
        on_heard: Callable[[], None],
        silence_limit_s: Callable[[], float],
        is_silent: Callable[[], bool],
    ) -> None:
        self.address = address
        self.epoch: int | None = None
        self.attached = False
        self._stub = stub
        self._settings = settings
        self._on_change = on_change
        self._on_load = on_load
        self._on_heard = on_heard
        self._silence_limit_s = silence_limit_s
        self._is_silent = is_silent
        self._retry = asyncio.Event()
        self._break: Callable[[], None] | None = None  # ends the present session; None between two
        self._followers: dict[str, tuple[int, Follower]] = {}
        self._waiting: set[str] = set()  # those without output so far: the decode worker holds their blocks under a lease
        self._grace: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to attach."""
        self._task = asyncio.create_task(self._run(), name=f"attach {self.address}")

    async def stop(self, reason: str) -> None:
        """Detach for good; followers are lost."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._lose(reason)

    def try_now(self) -> None:
        """Attach without further delay, if it waits to do so again: the worker has just shown that it is there."""
        self._retry.set()

    def fell_silent(self, reason: str) -> None:
        """Lose all followers: the worker is silent on every stream. The next session names none of them, so that a worker that
        was stopped and goes on drops their requests."""
        self._lose(reason)
        if self._break is not None:
            self._break()

    def follow(self, request_id: str, epoch: int, follower: Follower) -> None:
        """Give `follower` what the incarnation `epoch` sends about `request_id`, from now on. Call it before Submit."""
        self._followers[request_id] = (epoch, follower)
        self._waiting.add(request_id)

    def unfollow(self, request_id: str) -> None:
        """Drop what still comes about `request_id`; idempotent."""
        self._followers.pop(request_id, None)
        self._waiting.discard(request_id)

    async def _run(self) -> None:
        backoff_s = MIN_BACKOFF_S
        while True:
            try:
                await self._session()
                problem = "the worker ended the stream"
            except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
                problem = str(error.details() if isinstance(error, grpc.aio.AioRpcError) else error)
            except Exception as error:  # requests must not wait for ever because of a bug
                logger.exception("the reader of %s failed", self.address)
                problem = f"internal error: {error}"
            backoff_s = MIN_BACKOFF_S if self.attached else min(MAX_BACKOFF_S, 2 * backoff_s)
            self._broken(problem)
            if self._followers and await is_refused(self.address):
                self._lose(f"nothing listens at {self.address} any more")
            self._retry.clear()
            await wait_at_most(self._retry, backoff_s)

    async def _session(self) -> None:
        """Run one stream, from opening to its end. Silence ends it, too."""
        call = self._stub.Attach()
        silent = asyncio.Event()

        def give_up() -> None:
            silent.set()
            call.cancel()

        self._break = give_up
        with Watchdog(self._silence_limit_s, give_up, self._is_silent) as watchdog:
            heartbeats = asyncio.create_task(self._send(call), name=f"heartbeats {self.address}")
            try:
                await self._read(call, watchdog)
            except asyncio.CancelledError:
                if not silent.is_set() or being_cancelled():
                    raise
            finally:
                self._break = None
                call.cancel()
                heartbeats.cancel()
                await asyncio.gather(heartbeats, return_exceptions=True)

    async def _send(self, call: AttachCall) -> None:
        """Send the first message, then heartbeats. The reader handles errors of the stream."""
        router_id, heartbeat_ms = self._settings.router_id, self._settings.heartbeat_ms
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            await call.write(
                decode_pb2.AttachRequest(router_id=router_id, resume_points=self._resume_points(), period_ms=heartbeat_ms)
            )
            while True:
                await asyncio.sleep(heartbeat_ms / 1000)
                await call.write(decode_pb2.AttachRequest(router_id=router_id, waiting_request_ids=self._waiting))

    async def _read(self, call: AttachCall, watchdog: Watchdog) -> None:
        while True:
            frame = await call.read()
            if not isinstance(frame, decode_pb2.Frame):  # EOF
                return
            watchdog.heard()
            self._on_heard()
            self._take(frame)

    def _take(self, frame: decode_pb2.Frame) -> None:
        if not self.attached or frame.epoch != self.epoch:
            self._alive(frame.epoch)
        followers = self._followers
        for output in frame.outputs:
            entry = followers.get(output.request_id)
            if entry is not None:
                self._waiting.discard(output.request_id)
                entry[1].on_output(output)
        for event in frame.events:
            entry = followers.get(event.request_id)
            if entry is not None:
                entry[1].on_event(event)
        if frame.HasField("load"):
            self._on_load(frame.load)

    def _alive(self, epoch: int) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        self.attached = True
        self.epoch = epoch
        self._lose(f"{self.address} was restarted", keep_epoch=epoch)
        self._on_change()

    def _broken(self, problem: str) -> None:
        if self.attached:
            logger.warning(
                "stream of decode worker %s broke (%s); %d requests wait for it", self.address, problem, len(self._followers)
            )
            self.attached = False
            self._on_change()
        if self._grace is None:
            grace_s = self._settings.grace_s
            reason = f"the stream of {self.address} broke ({problem}) and did not come back within {grace_s} s"
            self._grace = asyncio.get_running_loop().call_later(grace_s, self._grace_over, reason)

    def _grace_over(self, reason: str) -> None:
        self._grace = None
        self._lose(reason)

    def _lose(self, reason: str, *, keep_epoch: int | None = None) -> None:
        lost = {request_id: entry for request_id, entry in self._followers.items() if entry[0] != keep_epoch}
        for request_id, (_, follower) in lost.items():
            del self._followers[request_id]
            self._waiting.discard(request_id)
            follower.on_lost(reason)

    def _resume_points(self) -> list[decode_pb2.ResumePoint]:
        return [
            decode_pb2.ResumePoint(request_id=request_id, choice=choice, next_index=next_index)
            for request_id, (_, follower) in self._followers.items()
            for choice, next_index in follower.next_indexes()
        ]


async def is_refused(address: str) -> bool:
    """Return whether the host refuses connections to the port. Then the process is gone, and waiting for it is useless."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(*split_address(address))
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError, TimeoutError):
        return False
    writer.close()
    return False
