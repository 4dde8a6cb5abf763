"""Streams of a request's events, sync and async, with resumption at another router.

Both share `StreamSession`, which checks and continues the history, and `Retrier`, which decides when to retry; they differ only
in how they wait.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self

import grpc

from pdmesh.client.channel import Preference
from pdmesh.client.types import Completed, Delta, Event, FinishReason, Started
from pdmesh.client.wire import emitted_choice, event
from pdmesh.errors import Cancelled, DeadlineExceeded, Internal, MeshError, Overloaded, Unavailable, error_from_rpc
from pdmesh.runtime.telemetry.propagation import Metadata, begin_request
from pdmesh.v1 import mesh_pb2

# The history of a stream, and the request that continues it.
#
#     request ──► Started ──► Delta … Delta ──✗ router lost
#                   │ seed       │ token ids, fingerprint
#                   └────────────┴──► request + Resume(seed, emitted, fingerprint) ──► (Started) ──► Delta … ──► Completed
#
# Tokens are a function of the request, its seed, and the weights and formats that the fingerprint names; text is a function of
# the tokens. So a second router that receives all of them continues exactly where the first stopped. The checks here guarantee it
# to the caller: each index once, in order.


_MAX_REQUEST_ID = 64
_MAX_UINT32 = 2**32 - 1


class StreamSession:
    """Hold the history of one stream. Pure: no clock, no network."""

    def __init__(self, request: mesh_pb2.GenerateRequest | mesh_pb2.ChatRequest) -> None:
        self._request = request
        self._started: Started | None = None
        self._emitted: dict[int, list[int]] = {}
        self._finished: dict[int, FinishReason] = {}
        self._system_fingerprint = ""
        self._num_losses = 0
        self._num_legs = 0
        self.completed = False

    @property
    def resuming(self) -> bool:
        """Return whether the caller has received a part of the answer."""
        return self._started is not None

    def lost(self) -> None:
        """Note that the router that served the stream is lost."""
        self._num_losses += 1

    def request(self, attempt: int) -> mesh_pb2.GenerateRequest | mesh_pb2.ChatRequest:
        """Return the request to send now, after `attempt` attempts: the original at first, later a resumption after what was
        received."""
        if attempt == 0:
            return self._request
        request = type(self._request)()
        request.CopyFrom(self._request)  # type: ignore[arg-type]  # the same type on both sides
        request.options.attempt = min(request.options.attempt + attempt, _MAX_UINT32)
        if self._num_losses:
            request.options.request_id = self._next_request_id()
        if self._started is not None:
            request.resume.seed = self._started.seed
            request.resume.system_fingerprint = self._system_fingerprint
            request.resume.emitted.extend(
                emitted_choice(index, ids, self._finished.get(index)) for index, ids in sorted(self._emitted.items())
            )
        return request

    def _next_request_id(self) -> str:
        """Return a new id for each attempt: workers may still hold the lost router's request, until their grace period ends."""
        first = self._request.options.request_id or (self._started.request_id if self._started else "")
        suffix = f"-r{self._num_losses}"
        return first[: _MAX_REQUEST_ID - len(suffix)] + suffix if first else ""

    def accept(self, response: mesh_pb2.GenerateResponse) -> Event | None:
        """Return the event for the caller; None for a repetition. Raises Internal when a router breaks the order of indexes."""
        item = event(response)
        if isinstance(item, Started):
            return self._accept_started(item)
        if isinstance(item, Delta):
            return self._accept_delta(item)
        if isinstance(item, Completed):
            self.completed = True
            return replace(item, num_resumes=self._num_legs - 1)
        return None

    def _accept_started(self, started: Started) -> Started | None:
        self._num_legs += 1
        if self._started is None:
            self._started = started
            return started
        if started.seed != self._started.seed:
            raise Internal(f"the stream was resumed with seed {started.seed}; it began with {self._started.seed}")
        return None

    def _accept_delta(self, delta: Delta) -> Delta | None:
        if delta.choice in self._finished:
            return None
        emitted = self._emitted.setdefault(delta.choice, [])
        if delta.token_ids and not self._is_next(delta, emitted):
            return None
        emitted.extend(delta.token_ids)
        self._system_fingerprint = self._system_fingerprint or delta.system_fingerprint
        if delta.finish_reason is not None:
            self._finished[delta.choice] = delta.finish_reason
        return delta

    def _is_next(self, delta: Delta, emitted: list[int]) -> bool:
        """Return whether the delta continues the choice; False: it repeats. Anything else is an error: text cannot be cut."""
        end = delta.first_index + len(delta.token_ids)
        if delta.first_index == len(emitted):
            return True
        if end <= len(emitted) and tuple(emitted[delta.first_index : end]) == delta.token_ids:
            return False
        raise Internal(
            f"choice {delta.choice}: the router sent indexes {delta.first_index} to {end - 1} where {len(emitted)} is next;"
            " this is a bug of the router, please report it with the request id"
        )


# Retries: when and where. Pure decisions, the clock is passed in.


@dataclass(frozen=True)
class RetryPolicy:
    """Configure the retries.

    `resume_timeout_s` bounds how long a client looks for a router since the last sign of life of one; a request's own deadline
    bounds it too. With `retry_overload` a rejected request is retried after the delay that the router named."""

    resume_timeout_s: float = 30.0
    retry_overload: bool = False
    first_backoff_s: float = 0.05
    max_backoff_s: float = 2.0


def unasked(error: MeshError) -> MeshError:
    """Return `error` of a call that its caller has not cancelled: CANCELLED then means a router or a proxy that shuts down."""
    return Unavailable(f"the router cancelled the call: {error.message}") if isinstance(error, Cancelled) else error


class Retrier:
    """Decide the attempts of one call. `address` is the index of the router to try next.

    Routers are tried in turn: a failure moves on to the next at once, and backs off (doubling) after each full round."""

    def __init__(self, policy: RetryPolicy, num_addresses: int, address: int, now: float, timeout_s: float | None) -> None:
        self._policy = policy
        self._num_addresses = num_addresses
        self._deadline = None if timeout_s is None else now + timeout_s
        self._last_sign_of_life = now
        self._num_failures = 0
        self.address = address

    def time_left(self, now: float) -> float | None:
        """Return the seconds until the deadline, at least 0; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - now)

    def progressed(self, now: float) -> None:
        """Note that a router answered: the next failure is a new one."""
        self._last_sign_of_life = now
        self._num_failures = 0

    def failed(self, error: MeshError, now: float, *, resuming: bool = False) -> float:
        """Return the seconds to wait before the next attempt, at `address`. Raises `error` if there is none, DeadlineExceeded
        when the deadline comes first. A rejection without a delay is final: the request may be too large for ever.

        `resuming`: part of the answer has been returned. The request was admitted once, so a rejection is retried like the loss
        that caused it."""
        if isinstance(error, Unavailable):
            delay = self._backoff_s()
        elif isinstance(error, Overloaded) and error.retry_delay_s is not None and (self._policy.retry_overload or resuming):
            delay = error.retry_delay_s
        else:
            raise error
        self._check_limits(error, now + delay, now)
        self._num_failures += 1
        self.address = (self.address + 1) % self._num_addresses
        return delay

    def _backoff_s(self) -> float:
        num_rounds = (self._num_failures + 1) // self._num_addresses
        if num_rounds == 0:
            return 0.0
        return float(min(self._policy.max_backoff_s, self._policy.first_backoff_s * 2 ** min(num_rounds - 1, 16)))

    def _check_limits(self, error: MeshError, retry_at: float, now: float) -> None:
        if self._deadline is not None and retry_at >= self._deadline:
            raise DeadlineExceeded(f"the deadline comes before another attempt; the last one failed: {error.message}") from error
        waits_by_deadline = isinstance(error, Overloaded) and self._deadline is not None
        if not waits_by_deadline and retry_at > self._last_sign_of_life + self._policy.resume_timeout_s:
            raise error


Request = mesh_pb2.GenerateRequest | mesh_pb2.ChatRequest


class SyncCall(Protocol):
    """Represent a running server-streaming call of a sync channel."""

    def __next__(self) -> mesh_pb2.GenerateResponse: ...

    def cancel(self) -> object: ...


class AsyncCall(Protocol):
    """Represent a running server-streaming call of an async channel."""

    async def read(self) -> object: ...

    def cancel(self) -> object: ...


class _Attempts:
    """Hold what both streams share: the session, its attempts and the router that answered last."""

    def __init__(self, request: Request, retrier: Retrier, preference: Preference) -> None:
        self.session = StreamSession(request)
        self._retrier = retrier
        self._preference = preference
        self._num_calls = 0
        self._span = begin_request("chat" if isinstance(request, mesh_pb2.ChatRequest) else "text_completion", request.model)

    def next_call(self) -> tuple[int, Request, float | None, Metadata]:
        """Return the index of the router, the request, the seconds that it has, and the caller's trace."""
        request = self.session.request(self._num_calls)
        self._num_calls += 1
        return self._retrier.address, request, self._retrier.time_left(time.monotonic()), self._span.metadata

    def accept(self, response: mesh_pb2.GenerateResponse) -> Event | None:
        self._retrier.progressed(time.monotonic())
        self._preference.address = self._retrier.address
        event = self.session.accept(response)
        if isinstance(event, Completed):
            self._complete(event)
        return event

    def _complete(self, event: Completed) -> None:
        usage = event.usage
        self._span.set({"gen_ai.usage.input_tokens": usage.prompt_tokens, "gen_ai.usage.output_tokens": usage.completion_tokens})
        self._span.end()

    def left(self) -> None:
        """End the trace of a stream that its caller left before it was complete."""
        self._span.end("" if self.session.completed else "CANCELLED")

    def failed(self, error: MeshError) -> float:
        """Return the seconds until the next attempt; raise when there is none. The caller has not cancelled the stream."""
        error = unasked(error)
        failed = self._retrier.address
        try:
            delay = self._retrier.failed(error, time.monotonic(), resuming=self.session.resuming)
        except MeshError as final:
            self._span.end(final.code.name, final.message)
            raise
        if isinstance(error, Unavailable):
            self.session.lost()
            self._preference.lost(failed, self._retrier.address)
        return delay


def _ended_early() -> MeshError:
    return Unavailable("the router ended the stream before it was complete")


class Stream:
    """Iterate over the events of one request. Leaving it early (`close`, `with`, garbage) cancels the request.

    Raises MeshError when the stream fails for good. Belongs to one thread, except for `cancel`."""

    def __init__(
        self,
        open_call: Callable[[int, Request, float | None, Metadata], SyncCall],
        request: Request,
        retrier: Retrier,
        preference: Preference,
    ) -> None:
        self._open_call = open_call
        self._attempts = _Attempts(request, retrier, preference)
        self._stopped = threading.Event()
        self._closed = False
        self._call = open_call(*self._attempts.next_call())

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        while not self._closed:
            event = self._step()
            if event is not None:
                return event
        raise StopIteration

    def _step(self) -> Event | None:
        """Return one event, or None after a message that the caller does not see."""
        try:
            return self._attempts.accept(next(self._call))
        except StopIteration:
            error = _ended_early()
        except grpc.RpcError as rpc_error:
            error = error_from_rpc(rpc_error)
        except BaseException:
            self.close()
            raise
        self._go_on_after(error)
        return None

    def _go_on_after(self, error: MeshError) -> None:
        if self._attempts.session.completed:
            self.close()
            return
        if self._stopped.is_set():
            raise Cancelled("the stream was cancelled")
        if self._stopped.wait(self._attempts.failed(error)):
            raise Cancelled("the stream was cancelled")
        self._call = self._open_call(*self._attempts.next_call())

    def cancel(self) -> None:
        """End the request. A thread that waits for the next event gets Cancelled. May be called from any thread, repeatedly."""
        self._stopped.set()
        self._call.cancel()

    def close(self) -> None:
        """End the request, if it has not ended; the iterator is exhausted then."""
        self._closed = True
        self._attempts.left()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


class AsyncStream:
    """Iterate asynchronously over the events of one request. Leaving it early (`aclose`, `async with`, a cancelled task) cancels
    the request. Raises MeshError when the stream fails for good."""

    def __init__(
        self,
        open_call: Callable[[int, Request, float | None, Metadata], AsyncCall],
        request: Request,
        retrier: Retrier,
        preference: Preference,
    ) -> None:
        self._open_call = open_call
        self._attempts = _Attempts(request, retrier, preference)
        self._stopped = asyncio.Event()
        self._closed = False
        self._call = open_call(*self._attempts.next_call())

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._closed:
            event = await self._step()
            if event is not None:
                return event
        raise StopAsyncIteration

    async def _step(self) -> Event | None:
        """Return one event, or None after a message that the caller does not see."""
        try:
            response = await self._call.read()
            if isinstance(response, mesh_pb2.GenerateResponse):
                return self._attempts.accept(response)
            error = _ended_early()
        except grpc.aio.AioRpcError as rpc_error:
            error = error_from_rpc(rpc_error)
        except asyncio.CancelledError:
            # Either this task is cancelled, or `cancel` ended the call under it.
            if not self._stopped.is_set():
                await self.aclose()
                raise
            error = Cancelled("the stream was cancelled")
        except MeshError:
            await self.aclose()
            raise
        await self._go_on_after(error)
        return None

    async def _go_on_after(self, error: MeshError) -> None:
        if self._attempts.session.completed:
            await self.aclose()
            return
        if await self._stopped_within(0.0 if self._stopped.is_set() else self._attempts.failed(error)):
            raise Cancelled("the stream was cancelled")
        self._call = self._open_call(*self._attempts.next_call())

    async def _stopped_within(self, delay_s: float) -> bool:
        if delay_s > 0:
            try:
                async with asyncio.timeout(delay_s):
                    await self._stopped.wait()
            except TimeoutError:
                return False
        return self._stopped.is_set()

    def cancel(self) -> None:
        """End the request. A task that waits for the next event gets Cancelled. May be called repeatedly, on the event loop."""
        self._stopped.set()
        self._call.cancel()

    async def aclose(self) -> None:
        """End the request, if it has not ended; the iterator is exhausted then."""
        self._closed = True
        self._attempts.left()
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()
