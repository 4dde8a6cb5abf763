"""Who has which piece of a direction: in turn, or ahead of his turn for as long as nobody needs it.

    needed    `take`: first come first served. Where none is free, one that lies ahead of its turn is taken away
    ahead     `take_spare`: one that is free and that nobody waits for, or none. Never waited for

So whoever has to send a part now waits for parts that are being sent, and never for parts whose receivers may be slow to want
them. Nobody waits for a piece while he holds one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # whoever moves KV of CPU memory needs no torch
    from pdmesh.engine.kv_cache.piece_copies import Piece
    from pdmesh.engine.kv_cache.staging import Staging


@dataclass(frozen=True)
class Lent:
    """A piece, and the part in it."""

    piece: Piece
    view: memoryview


class Yielding(Protocol):
    """Holds a piece ahead of its turn."""

    def give_way(self) -> None:
        """Give the piece back: at once, or when its copy is over."""


class Door:
    """The pieces of one direction."""

    def __init__(self, staging: Staging) -> None:
        self.staging = staging
        self._places = asyncio.Semaphore(staging.sizes.num_pieces)
        self._ahead: deque[Yielding] = deque()  # who came first has waited longest for his turn, so his receiver is slow

    async def take(self) -> Piece:
        if self._places.locked() and self._ahead:
            self._ahead.popleft().give_way()
        await self._places.acquire()
        return self._taken()

    async def take_spare(self, holder: Yielding) -> Piece | None:
        """Until `keep` it may be taken away from the holder."""
        if self._places.locked():  # also where somebody waits
            return None
        await self._places.acquire()
        self._ahead.append(holder)
        return self._taken()

    def keep(self, holder: Yielding) -> None:
        """His piece, if he still has one, is not taken away any more; idempotent."""
        with suppress(ValueError):
            self._ahead.remove(holder)

    def give_back(self, piece: Piece) -> None:
        self.staging.give_back(piece)
        self._places.release()

    def give_back_behind(self, piece: Piece) -> None:
        """When its last copy is over."""
        if not piece.is_under_way or piece.copy is None:
            self.give_back(piece)
        else:
            asyncio.wrap_future(piece.copy).add_done_callback(lambda done: self._given_back(piece, done))

    def _given_back(self, piece: Piece, done: asyncio.Future[None]) -> None:
        done.exception()  # seen: it is heard by who waits for the copy
        self.give_back(piece)

    def _taken(self) -> Piece:
        piece = self.staging.take()
        assert piece is not None, "there are as many as places"
        return piece
