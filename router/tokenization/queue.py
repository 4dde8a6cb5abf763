"""Long texts become tokens in threads of their own, in a fair and bounded line, while the event loop serves its streams."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from pdmesh.runtime.errors import DeadlineExceeded, ResourceExhausted

# Whose text is tokenized next. Pure: no clock, no threads.
#
# Short texts before long ones, but for one long after every SHORT_IN_A_ROW; among each kind the tenants take turns. What waits is
# bounded by count and by bytes, in all and of each tenant, so that one tenant's flood is refused while others find room.


LONG_TEXT_BYTES = 64 << 10
SHORT_IN_A_ROW = 8
RETRY_DELAY_S = 1.0

P = TypeVar("P")


@dataclass(frozen=True)
class LineLimits:
    """What may wait: pieces and bytes of text, in all and of one tenant."""

    max_pieces: int = 256
    max_bytes: int = 64 << 20
    max_tenant_pieces: int = 128
    max_tenant_bytes: int = 32 << 20


@dataclass(frozen=True, eq=False)
class Piece(Generic[P]):
    """One text that waits, and what is to be done with it."""

    tenant: str
    num_bytes: int
    payload: P

    @property
    def is_long(self) -> bool:
        """Whether short ones go before it."""
        return self.num_bytes > LONG_TEXT_BYTES


@dataclass
class _Held:
    """Of one tenant, or in all."""

    pieces: int = 0
    num_bytes: int = 0


@dataclass
class TokenizationQueue(Generic[P]):
    """The pieces that wait."""

    limits: LineLimits = field(default_factory=LineLimits)
    _short: OrderedDict[str, deque[Piece[P]]] = field(default_factory=OrderedDict)
    _long: OrderedDict[str, deque[Piece[P]]] = field(default_factory=OrderedDict)
    _held: dict[str, _Held] = field(default_factory=dict)
    _all: _Held = field(default_factory=_Held)
    _short_in_a_row: int = 0

    def __len__(self) -> int:
        return self._all.pieces

    def push(self, piece: Piece[P]) -> None:
        """Wait. Raises ResourceExhausted when the line, or the tenant's part of it, is full."""
        held, limits = self._held.get(piece.tenant, _Held()), self.limits
        _check_room(held, piece, limits.max_tenant_pieces, limits.max_tenant_bytes, "of this tenant")
        _check_room(self._all, piece, limits.max_pieces, limits.max_bytes, "of all tenants")
        self._flows(piece).setdefault(piece.tenant, deque()).append(piece)
        self._held[piece.tenant] = held
        self._count(piece, 1)

    def pop(self, *, long_too: bool) -> Piece[P] | None:
        """Whose turn it is; None when nobody waits that may go. `long_too`: whether a long one may."""
        long_waits = long_too and bool(self._long)
        if self._short and not (long_waits and self._short_in_a_row >= SHORT_IN_A_ROW):
            self._short_in_a_row += 1
            return self._take(self._short)
        if not long_waits:
            return None
        self._short_in_a_row = 0
        return self._take(self._long)

    def remove(self, piece: Piece[P]) -> None:
        """It waits no more; nothing happens if it does not wait."""
        flows = self._flows(piece)
        flow = flows.get(piece.tenant, ())
        if piece not in flow:
            return
        flows[piece.tenant].remove(piece)
        if not flows[piece.tenant]:
            del flows[piece.tenant]
        self._count(piece, -1)

    def _take(self, flows: OrderedDict[str, deque[Piece[P]]]) -> Piece[P]:
        """The oldest of the tenant whose turn it is, who then goes behind the others."""
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
    """`num_threads` threads, of which long texts leave one to the shorter ones. Used from one event loop."""

    def __init__(self, limits: LineLimits | None = None, *, num_threads: int = 2) -> None:
        self._line: TokenizationQueue[_Order] = TokenizationQueue(limits or LineLimits())
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
