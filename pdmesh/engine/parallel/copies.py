"""Copies that all ranks make of one part: rank 0 orders them and has a thread that waits for them, the others serve them.

    event loop    run(copy) ── an order to every other rank, our own copy launched ──► a future
    a thread      the last of all their answers, and our own ──► the future is done

A copy is over when no rank reads or writes its piece any more. A rank that dies, or whose answer does not come within the timeout
behind our own, fails the worker (`TensorParallelGroup.fail`) as in a step: ranks pass their marks together, by a step's
exchanges.
"""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch

from pdmesh.engine.kv_cache.copies import PieceCopies
from pdmesh.engine.parallel import tp_protocol
from pdmesh.engine.parallel.events import Launched, Place
from pdmesh.engine.parallel.shared_pieces import SharedPieces
from pdmesh.engine.parallel.tp_group import TensorParallelGroup
from pdmesh.engine.parallel.tp_protocol import Kind, RankFailed

# Messages between rank 0 and the others about a copy between their pools and a shared piece, on sockets besides that of
# the steps, one for each direction, so that no copy waits behind a step.
#
# The block ids of an order lie beside its piece, in the shared memory: an order is short, and a socket takes as many as there are
# pieces even if the rank does not read.


_ORDER = struct.Struct("<Q?IIIIQI")
_NUMBER = struct.Struct("<Q")


@dataclass(frozen=True)
class Copy:
    """Order a copy. `stores`: from the piece into the pool; else the other way."""

    stores: bool
    piece: int
    layers: range
    num_blocks: int
    after: Place


@dataclass(frozen=True)
class Order:
    number: int
    copy: Copy

    def encode(self) -> bytes:
        copy = self.copy
        ends = (copy.layers.start, copy.layers.stop)
        return _ORDER.pack(self.number, copy.stores, copy.piece, *ends, copy.num_blocks, *copy.after)

    @classmethod
    def decode(cls, payload: bytes | bytearray) -> Order:
        number, stores, piece, start, stop, num_blocks, command, num_layers = _ORDER.unpack(payload)
        return cls(number, Copy(stores, piece, range(start, stop), num_blocks, Place(command, num_layers)))


@dataclass(frozen=True)
class Answer:
    """Report that the copy of this number has ended; `error` is empty when it succeeded."""

    number: int
    error: str = ""

    def encode(self) -> bytes:
        return _NUMBER.pack(self.number) + self.error.encode()

    @classmethod
    def decode(cls, payload: bytes | bytearray) -> Answer:
        (number,) = _NUMBER.unpack_from(payload)
        return cls(number, bytes(payload[_NUMBER.size :]).decode(errors="replace"))


_OURS = 0


@dataclass(eq=False)
class _UnderWay:
    """A copy under way. `waits_for`: ranks that have not finished; `deadline`: monotonic, of the others, once rank 0 has
    finished."""

    waits_for: set[int]
    future: Future[None] = field(default_factory=Future)
    error: BaseException | None = None
    deadline: float | None = None


class CopyChannel:
    """Order copies of one direction. `run` and `close` are for one thread."""

    def __init__(self, ranks: TensorParallelGroup, socks: Sequence[socket.socket], timeout_s: float) -> None:
        """`socks` lead to ranks 1, 2, ... and are closed here."""
        self._ranks, self._timeout_s = ranks, timeout_s
        self._socks = dict(enumerate(socks, start=1))
        self._numbers = itertools.count()
        self._under_way: dict[int, _UnderWay] = {}
        self._changed = threading.Condition()
        self._failure: RankFailed | None = None
        self._is_closed = False
        self._wakes, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for rank, sock in [*self._socks.items(), (_OURS, self._woken)]:
            sock.settimeout(timeout_s)
            self._selector.register(sock, selectors.EVENT_READ, rank)
        self._thread = threading.Thread(target=self._hear, name="kv-answers", daemon=True)
        self._thread.start()

    def run(self, copy: Copy, launch: Callable[[], Future[None]]) -> Future[None]:
        """Run a copy; `launch` starts rank 0's part. The future cannot be cancelled; its exception is the first of any rank's,
        RankFailed where a rank is gone."""
        with self._changed:
            number, copying = next(self._numbers), _UnderWay({_OURS, *self._socks})
            copying.future.set_running_or_notify_cancel()
            if self._failure is not None:
                copying.future.set_exception(self._failure)
                return copying.future
            self._under_way[number] = copying
        for rank, sock in self._socks.items():
            try:
                tp_protocol.send(sock, Kind.ORDER, Order(number, copy).encode())
            except OSError:
                self._through(number, rank, RankFailed(f"tensor_parallel: rank {rank} takes no orders"))  # its end is reported
        try:
            own = launch()
        except Exception as error:  # noqa: BLE001  the future of the copy gets it
            self._through(number, _OURS, error)
        else:
            own.add_done_callback(lambda done: self._through(number, _OURS, done.exception()))
        return copying.future

    def close(self) -> None:
        """Wait for copies that are under way; idempotent."""
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)
            if self._is_closed:
                return
            self._is_closed = True
        self._wake()
        self._thread.join()
        self._selector.close()
        for sock in (*self._socks.values(), self._wakes, self._woken):
            sock.close()

    def _through(self, number: int, rank: int, error: BaseException | None) -> None:
        """Record that a rank has finished, once, from any thread."""
        with self._changed:
            copying = self._under_way.get(number)
            if copying is None or rank not in copying.waits_for:
                return
            copying.waits_for.remove(rank)
            copying.error = copying.error or error
            if rank == _OURS:
                copying.deadline = time.monotonic() + self._timeout_s
            if copying.waits_for:
                if rank == _OURS:
                    self._wake()
                return
            del self._under_way[number]
            self._changed.notify_all()
        if copying.error is None:
            copying.future.set_result(None)
        else:
            copying.future.set_exception(copying.error)

    def _hear(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select(self._time_left()):
                if key.data == _OURS:
                    self._woken.recv(4096)
                else:
                    self._hear_from(key.data)
            self._give_up_silent()

    def _hear_from(self, rank: int) -> None:
        try:
            answer = Answer.decode(tp_protocol.expect(self._socks[rank], Kind.COPIED)[1])
        except (OSError, EOFError) as error:
            if not self._is_closed:
                self._lose(rank, self._ranks.blame(error, "copy KV"))
            return
        broken = RuntimeError(f"tensor_parallel: rank {rank} could not copy KV: {answer.error}") if answer.error else None
        self._through(answer.number, rank, broken)

    def _give_up_silent(self) -> None:
        with self._changed:
            now, late = time.monotonic(), set[int]()
            for copying in self._under_way.values():
                if copying.deadline is not None and copying.deadline <= now:
                    late |= copying.waits_for
        for rank in late:
            why = f"has not answered for {self._timeout_s:g} s in a copy of KV"
            self._lose(rank, RankFailed(f"tensor_parallel: {self._ranks.name(rank)} {why}"))

    def _lose(self, rank: int, failure: RankFailed) -> None:
        """Give up a rank: its answers are ignored, and no new copy begins."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._socks[rank])
        with self._changed:
            self._failure = self._failure or failure
            numbers = list(self._under_way)
        for number in numbers:
            self._through(number, rank, failure)
        self._ranks.fail(failure)

    def _time_left(self) -> float | None:
        with self._changed:
            deadlines = [each.deadline for each in self._under_way.values() if each.deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _wake(self) -> None:
        self._wakes.send(b"\0")


# Copies of a rank other than 0 for the hand-off: of its heads between its pool and shared pieces, as rank 0 orders them
#
# A thread for each direction; steps run beside it, on another thread. Copies are launched in their order,
# one behind the other, and answered when the device has finished.


class CopyService:
    """Serve one direction. It lives as long as its socket."""

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
            torch.cuda.set_device(self._device)  # the current device of this thread
        with contextlib.suppress(OSError, EOFError):  # rank 0 has closed its end, as expected
            while True:
                self._begin(Order.decode(tp_protocol.expect(self._sock, Kind.ORDER)[1]))
        self._copies.close()
        self._pieces.close()
        self._sock.close()

    def _begin(self, order: Order) -> None:
        """Launch the copy behind this rank's own mark."""
        copy, begin = order.copy, self._copies.store if order.copy.stores else self._copies.fetch
        try:
            after = self._launched.behind(copy.after)
            under_way = begin(self._pieces.piece(copy.piece), copy.layers, copy.num_blocks, after)
        except Exception as error:  # noqa: BLE001  reported to rank 0
            self._answer(order.number, error)
        else:
            under_way.add_done_callback(partial(self._answer_of, order.number))

    def _answer_of(self, number: int, copy: Future[None]) -> None:
        self._answer(number, copy.exception())

    def _answer(self, number: int, error: BaseException | None) -> None:
        text = "" if error is None else f"{type(error).__name__}: {error}"
        with self._answering, contextlib.suppress(OSError):
            tp_protocol.send(self._sock, Kind.COPIED, Answer(number, text).encode())
