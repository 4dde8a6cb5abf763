"""Long texts become tokens in threads of their own, in a fair and bounded line, while the event loop serves its streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from pdmesh.runtime.errors import DeadlineExceeded
from router.tokenization.text_line import LineLimits, Piece, TextLine

Work = Callable[[], list[int]]


@dataclass(frozen=True, eq=False)
class _Order:
    work: Work
    result: asyncio.Future[list[int]]


class Tokenizing:
    """`num_threads` threads, of which long texts leave one to the shorter ones. Used from one event loop."""

    def __init__(self, limits: LineLimits | None = None, *, num_threads: int = 2) -> None:
        self._line: TextLine[_Order] = TextLine(limits or LineLimits())
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        self._num_threads = num_threads
        self._under_way: set[Piece[_Order]] = set()

    @property
    def num_waiting(self) -> int:
        """Pieces in line, without those under way."""
        return len(self._line)

    async def run(self, work: Work, *, tenant: str, num_bytes: int, deadline: float | None) -> list[int]:
        """The result of `work` on a text of `num_bytes`. `deadline`: event-loop time. A caller that is cancelled, or whose
        deadline passes, leaves the line; work under way cannot be stopped and is done for nothing.

        Raises ResourceExhausted when the line is full, DeadlineExceeded, and what `work` raises."""
        result: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        piece = Piece(tenant, num_bytes, _Order(work, result))
        self._line.push(piece)
        self._advance()
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                return await result
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineExceeded("the deadline passed before the text was tokenized") from error
        finally:
            self._line.remove(piece)

    def _advance(self) -> None:
        """Begin what there are threads for."""
        while len(self._under_way) < self._num_threads:
            long = sum(piece.is_long for piece in self._under_way)
            piece = self._line.pop(long_too=long < max(1, self._num_threads - 1))
            if piece is None:
                return
            self._under_way.add(piece)
            future = asyncio.get_running_loop().run_in_executor(self._executor, piece.payload.work)
            future.add_done_callback(partial(self._end, piece))

    def _end(self, piece: Piece[_Order], future: asyncio.Future[list[int]]) -> None:
        self._under_way.discard(piece)
        result = piece.payload.result
        if future.cancelled():
            result.cancel()
        elif (error := future.exception()) is not None:
            if not result.done():
                result.set_exception(error)
        elif not result.done():
            result.set_result(future.result())
        self._advance()
