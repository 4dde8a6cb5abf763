"""What a rank other than 0 does for the hand-off: copies of its heads between its pool and shared pieces, as rank 0 orders them.

A thread for each direction; steps go on beside it, on the thread that hears of them. Copies are launched as they were ordered,
one behind the other, and answered when the device is through.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import Future
from functools import partial

import torch

from pdmesh.engine.kv_cache.piece_copies import PieceCopies
from pdmesh.engine.parallel import tp_protocol
from pdmesh.engine.parallel.copy_orders import Answer, Order
from pdmesh.engine.parallel.events import Launched
from pdmesh.engine.parallel.shared_pieces import SharedPieces
from pdmesh.engine.parallel.tp_protocol import Kind


class CopyService:
    """One direction. It lives as long as its socket."""

    def __init__(
        self, sock: socket.socket, pieces: SharedPieces, copies: PieceCopies, launched: Launched, device: torch.device
    ) -> None:
        self._sock, self._pieces, self._copies, self._launched, self._device = sock, pieces, copies, launched, device
        self._answering = threading.Lock()

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self._serve, name="kv-orders", daemon=True)
        thread.start()
        return thread

    def _serve(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread
        with contextlib.suppress(OSError, EOFError):  # rank 0 has closed its end, as it should
            while True:
                self._begin(Order.decode(tp_protocol.expect(self._sock, Kind.ORDER)[1]))
        self._copies.close()
        self._pieces.close()
        self._sock.close()

    def _begin(self, order: Order) -> None:
        """Behind this rank's own mark."""
        copy, begin = order.copy, self._copies.store if order.copy.stores else self._copies.fetch
        try:
            after = self._launched.behind(copy.after)
            under_way = begin(self._pieces.piece(copy.piece), copy.layers, copy.num_blocks, after)
        except Exception as error:  # noqa: BLE001  told to rank 0
            self._answer(order.number, error)
        else:
            under_way.add_done_callback(partial(self._answer_of, order.number))

    def _answer_of(self, number: int, copy: Future[None]) -> None:
        self._answer(number, copy.exception())

    def _answer(self, number: int, error: BaseException | None) -> None:
        text = "" if error is None else f"{type(error).__name__}: {error}"
        with self._answering, contextlib.suppress(OSError):
            tp_protocol.send(self._sock, Kind.COPIED, Answer(number, text).encode())
