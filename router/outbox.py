"""Between the reader of frames, which never waits, and one client, which may be slow: bounded by tokens."""

import asyncio

from router.book import Span
from runtime.errors import MeshError, ResourceExhausted


class Outbox:
    """Accepted output of one request on its way to the client. One producer side, one consumer, one event loop.

    Spans of a choice that pile up are merged, so a slow client costs fewer messages, not more.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._spans: list[Span] = []
        self._error: BaseException | None = None
        self._wake = asyncio.Event()
        self._is_waited_at = False  # who waits here takes all of it in its next turn

    @property
    def failed(self) -> bool:
        """An error waits behind the spans, or was given out already."""
        return self._error is not None

    def put(self, span: Span) -> None:
        """Queue `span`. When the client is too far behind, everything is dropped and the stream fails. What counts is what lay
        here before: a grammar may force thousands of tokens at once."""
        if self._error is not None:
            return
        if self._num_tokens >= self._max_tokens and not self._is_waited_at:
            self._overflow()
            return
        self._num_tokens += len(span.token_ids)
        if not self._merge(span):
            self._spans.append(span)
        self._wake.set()

    def fail(self, error: MeshError | BaseException) -> None:
        """End the stream with `error` once what is queued has been taken. The first error stays."""
        if self._error is None:
            self._error = error
        self._wake.set()

    async def take(self) -> list[Span]:
        """Everything queued, at least one span. Raises the error once nothing is left."""
        while not self._spans:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            self._is_waited_at = True
            try:
                await self._wake.wait()
            finally:
                self._is_waited_at = False
        spans, self._spans, self._num_tokens = self._spans, [], 0
        return spans

    def _merge(self, span: Span) -> bool:
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
