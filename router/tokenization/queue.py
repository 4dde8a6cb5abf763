"""Tokenization of long texts in threads, through a fair and bounded queue, so that the event loop can serve its streams."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from pdmesh.runtime.errors import DeadlineExceeded, ResourceExhausted

# The order of tokenization. Pure: no clock, no threads.
#
# Short texts go before long ones, except for one long text after every SHORT_IN_A_ROW; within each kind tenants take turns.
# Waiting texts are bounded by count and bytes, in total and for each tenant, so that one tenant's flood is refused while other
# tenants find room.

LONG_TEXT_BYTES = 64 << 10
SHORT_IN_A_ROW = 8
RETRY_DELAY_S = 1.0

P = TypeVar("P")


@dataclass(frozen=True)
class LineLimits:
    """Bound the waiting texts by number and bytes, in total and for one tenant."""

    max_pieces: int = 256
    max_bytes: int = 64 << 20
    max_tenant_pieces: int = 128
    max_tenant_bytes: int = 32 << 20


@dataclass(frozen=True, eq=False)
class Piece(Generic[P]):
    """Hold one waiting text, and the work to be done with it."""

    tenant: str
    num_bytes: int
    payload: P

    @property
    def is_long(self) -> bool:
        """Return whether short texts go before this one."""
        return self.num_bytes > LONG_TEXT_BYTES


@dataclass
class _Held:
    """Count the waiting texts of one tenant, or of all."""

    pieces: int = 0
    num_bytes: int = 0


@dataclass
class TokenizationQueue(Generic[P]):
    """Hold the waiting texts."""

    limits: LineLimits = field(default_factory=LineLimits)
    _short: OrderedDict[str, deque[Piece[P]]] = field(default_factory=OrderedDict)
    _long: OrderedDict[str, deque[Piece[P]]] = field(default_factory=OrderedDict)
    _held: dict[str, _Held] = field(default_factory=dict)
    _all: _Held = field(default_factory=_Held)
    _short_in_a_row: int = 0

    def __len__(self) -> int:
        return self._all.pieces

    def push(self, piece: Piece[P]) -> None:
        """Append a text. Raises ResourceExhausted when the queue, or the tenant's part of it, is full."""
        held, limits = self._held.get(piece.tenant, _Held()), self.limits
        _check_room(held, piece, limits.max_tenant_pieces, limits.max_tenant_bytes, "of this tenant")
        _check_room(self._all, piece, limits.max_pieces, limits.max_bytes, "of all tenants")
        self._flows(piece).setdefault(piece.tenant, deque()).append(piece)
        self._held[piece.tenant] = held
        self._count(piece, 1)

    def pop(self, *, long_too: bool) -> Piece[P] | None:
        """Return the next text; None when no text may go. `long_too`: whether a long one may."""
        long_waits = long_too and bool(self._long)
        if self._short and not (long_waits and self._short_in_a_row >= SHORT_IN_A_ROW):
            self._short_in_a_row += 1
            return self._take(self._short)
        if not long_waits:
            return None
        self._short_in_a_row = 0
        return self._take(self._long)

    def remove(self, piece: Piece[P]) -> None:
        """Remove a text; nothing happens if it does not wait."""
        flows = self._flows(piece)
        flow = flows.get(piece.tenant, ())
        if piece not in flow:
            return
        flows[piece.tenant].remove(piece)
        if not flows[piece.tenant]:
            del flows[piece.tenant]
        self._count(piece, -1)

    def _take(self, flows: OrderedDict[str, deque[Piece[P]]]) -> Piece[P]:
        """Return the oldest text of the next tenant, which then goes behind the other tenants."""
        tenant, flow = next(iter(flows.items()))
        piece = flow.popleft()
        flows.move_to_end(tenant)
        if not flow:
            del flows[tenant]
        self._count(piece, -1)
        return piece

    def _flows(self, piece: Piece[P]) -> OrderedDict[str, deque[Piece[P]]]:
        return self._long if piece.is_long else self._short

    def _count(self, piece: Piece[P], sign: int) -> None:
        held = self._held[piece.tenant]
        for count in (held, self._all):
            count.pieces += sign
            count.num_bytes += sign * piece.num_bytes
        if not held.pieces:
            del self._held[piece.tenant]


def _check_room(held: _Held, piece: Piece[P], max_pieces: int, max_bytes: int, whose: str) -> None:
    if held.pieces >= max_pieces or held.num_bytes + piece.num_bytes > max_bytes:
        waiting = f"{held.pieces} long texts {whose} ({held.num_bytes} bytes) wait to be tokenized"
        raise ResourceExhausted(f"{waiting}; {max_pieces} and {max_bytes} bytes may", retry_delay_s=RETRY_DELAY_S)


Work = Callable[[], list[int]]


@dataclass(frozen=True, eq=False)
class _Order:
    work: Work
    result: asyncio.Future[list[int]]


class TokenizationPool:
    """Run tokenization in `num_threads` threads, of which long texts leave one to shorter texts. Used from one event loop."""

    def __init__(self, limits: LineLimits | None = None, *, num_threads: int = 2) -> None:
        self._line: TokenizationQueue[_Order] = TokenizationQueue(limits or LineLimits())
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        self._num_threads = num_threads
        self._under_way: set[Piece[_Order]] = set()

    @property
    def num_waiting(self) -> int:
        """Return the number of waiting texts, without those in a thread."""
        return len(self._line)

    async def run(self, work: Work, *, tenant: str, num_bytes: int, deadline: float | None) -> list[int]:
        """Return the result of `work` on a text of `num_bytes`. `deadline`: event-loop time. A caller that is cancelled, or whose
        deadline passes, leaves the queue; work in a thread cannot be stopped, and its result is dropped.

        Raises ResourceExhausted when the queue is full, DeadlineExceeded, and what `work` raises.
        """
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
        """Start work while threads are free."""
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
