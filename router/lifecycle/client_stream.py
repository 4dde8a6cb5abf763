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
    requests in a row, and each request's task has nothing left to do but to write. Chunks of a choice that pile up for a slow
    client are merged before they are rendered, so it costs fewer messages, not more.
    """

    def __init__(self, max_tokens: int, render: Callable[[TokenChunk], M | None]) -> None:
        """`render` returns the message of a chunk, or None if the client needs none."""
        self._max_tokens = max_tokens
        self._render = render
        self._num_tokens = 0
        self._chunks: list[TokenChunk] = []
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[M | None] | None = None  # the task that waits here takes everything in its next turn

    @property
    def failed(self) -> bool:
        """An error waits behind the chunks, or was raised already."""
        return self._error is not None

    def put(self, chunk: TokenChunk) -> None:
        """Queue `chunk`, or hand its message to the task that waits. When the client is too far behind, everything is dropped and
        the stream fails. What counts is what lay here before: a grammar may force thousands of tokens at once."""
        if self._error is not None:
            return
        waiter = self._waiter
        if waiter is None:
            self._pile_up(chunk)
        elif waiter.done():
            self._queue(chunk)
        else:
            try:
                message = self._render(chunk)
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
        """Wait until a chunk is queued; return the messages of everything queued. Raises the error once nothing is left."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                message = await self._waiter
            finally:
                self._waiter = None
            if message is not None:
                return [message, *self._rendered()] if self._chunks else [message]
        return self._rendered()

    def _pile_up(self, chunk: TokenChunk) -> None:
        if self._num_tokens >= self._max_tokens:
            self._overflow()
        else:
            self._queue(chunk)

    def _queue(self, chunk: TokenChunk) -> None:
        self._num_tokens += len(chunk.token_ids)
        if not self._merge(chunk):
            self._chunks.append(chunk)

    def _rendered(self) -> list[M]:
        chunks, self._chunks, self._num_tokens = self._chunks, [], 0
        return [message for chunk in chunks if (message := self._render(chunk)) is not None]

    def _merge(self, chunk: TokenChunk) -> bool:
        if not self._chunks:
            return False
        last = self._chunks[-1]
        if last.choice != chunk.choice or last.finish_reason or last.first_index + len(last.token_ids) != chunk.first_index:
            return False
        last.token_ids += chunk.token_ids
        last.logprobs = [*last.logprobs, *chunk.logprobs]
        last.finish_reason = chunk.finish_reason
        return True

    def _overflow(self) -> None:
        self._chunks.clear()
        self.fail(
            ResourceExhausted(
                f"the client reads too slowly: {self._num_tokens} tokens wait for it (max_buffered_tokens); "
                "the request was cancelled, read faster or resume it"
            )
        )
