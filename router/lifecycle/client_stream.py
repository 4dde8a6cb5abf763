"""Between the reader of frames, which never waits, and one client, which may be slow: bounded by tokens."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from pdmesh.runtime.errors import MeshError, ResourceExhausted
from router.lifecycle.output import TokenChunk

M = TypeVar("M")


class ClientStream(Generic[M]):
    """Accepted output of one request on its way to the client. One producer side, one consumer, one event loop.

    A client that waits gets its message rendered in the producer's turn: the reader of a frame then does so for all of its
    requests in a row, and each request's task has nothing left to do but to write. Spans of a choice that pile up for a client
    that is slow are merged before they are rendered, so it costs fewer messages, not more.
    """

    def __init__(self, max_tokens: int, render: Callable[[TokenChunk], M | None]) -> None:
        """`render`: a span's message, or None if the client needs none."""
        self._max_tokens = max_tokens
        self._render = render
        self._num_tokens = 0
        self._spans: list[TokenChunk] = []
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[M | None] | None = None  # who waits here takes all of it in its next turn

    @property
    def failed(self) -> bool:
        """An error waits behind the spans, or was given out already."""
        return self._error is not None

    def put(self, span: TokenChunk) -> None:
        """Queue `span`, or hand its message to who waits. When the client is too far behind, everything is dropped and the stream
        fails. What counts is what lay here before: a grammar may force thousands of tokens at once."""
        if self._error is not None:
            return
        waiter = self._waiter
        if waiter is None:
            self._pile_up(span)
        elif waiter.done():
            self._queue(span)
        else:
            try:
                message = self._render(span)
            except Exception as error:  # noqa: BLE001 - the producer serves other requests, too
                self.fail(error)
                return
            if message is not None:
                waiter.set_result(message)

    def fail(self, error: MeshError | BaseException) -> None:
        """End the stream with `error` once what is queued has been taken. The first error stays."""
        if self._error is None:
            self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[M]:
        """Messages of everything queued; at least one span was. Raises the error once nothing is left."""
        while not self._spans:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                message = await self._waiter
            finally:
                self._waiter = None
            if message is not None:
                return [message, *self._rendered()] if self._spans else [message]
        return self._rendered()

    def _pile_up(self, span: TokenChunk) -> None:
        if self._num_tokens >= self._max_tokens:
            self._overflow()
        else:
            self._queue(span)

    def _queue(self, span: TokenChunk) -> None:
        self._num_tokens += len(span.token_ids)
        if not self._merge(span):
            self._spans.append(span)

    def _rendered(self) -> list[M]:
        spans, self._spans, self._num_tokens = self._spans, [], 0
        return [message for span in spans if (message := self._render(span)) is not None]

    def _merge(self, span: TokenChunk) -> bool:
        if not self._spans:
            return False
        last = self._spans[-1]
        if last.choice != span.choice or last.finish_reason or last.first_index + len(last.token_ids) != span.first_index:
            return False
        last.token_ids += span.token_ids
        last.logprobs = [*last.logprobs, *span.logprobs]
        last.finish_reason = span.finish_reason
        return True

    def _overflow(self) -> None:
        self._spans.clear()
        self.fail(
            ResourceExhausted(
                f"the client reads too slowly: {self._num_tokens} tokens wait for it (max_buffered_tokens); "
                "the request was cancelled, read faster or resume it"
            )
        )
