"""The engine's side of tensor parallelism: one KV pool for all ranks, their layers, and the draw of their tokens.

vLLM splits a model by heads, and a block of its CPU layout is [heads, block_size, 2 * head_dim]. So ranks that write their heads
of one pool leave there what one rank alone would write: workers of other degrees read it, and hand off to it, as their own.

    ranks' thread       accepts the ranks, makes the pool, has it sealed once all have mapped it
    a thread a rank     reads its messages. While a step runs the engine's thread waits for it, so a draw may use its requests
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection, Listener

import torch

from pdmesh_vllm.kv_pool import JoinedPool
from pdmesh_vllm.link import Link
from pdmesh_vllm.ranks.link import MAPPED, Drawing, Hello, LayerDone, Message, Tokens, Waiting

_CLOSE_S = 5.0


class RankServer:
    """Serve the ranks of one EngineCore. `pool` is there once `wait_ready` has returned."""

    pool: JoinedPool

    def __init__(self, link: Link, num_ranks: int) -> None:
        self._link = link
        self._num_ranks = num_ranks
        self._listener = Listener(family="AF_UNIX")  # in a folder that only this user can enter
        self._connections: list[Connection] = []
        self._threads: list[threading.Thread] = []
        self._error: Exception | None = None
        self._is_ready = threading.Event()
        self._draws = RankDraws(link, num_ranks - 1)
        self._layers = RankLayers(link, num_ranks)
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Return the socket that ranks connect to."""
        return str(self._listener.address)

    def check(self) -> None:
        """Raise what was wrong with the ranks, if anything was: they only know that they were turned away."""
        if self._error is not None:
            raise self._error

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until all ranks have their KV in the pool. Raises what `check` raises, or RuntimeError after `timeout_s`."""
        if not self._is_ready.wait(timeout_s):
            raise RuntimeError(f"vLLM has started, but not all of its {self._num_ranks} ranks have said hello")
        self.check()

    def close(self) -> None:
        """Let the ranks go; idempotent."""
        self._draws.close()
        if self._thread.is_alive():  # it still accepts
            with contextlib.suppress(OSError):
                Client(self.address, family="AF_UNIX").close()
            self._thread.join(_CLOSE_S)
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _run(self) -> None:
        try:
            self._set_up()
        except (EOFError, OSError) as error:
            self._fail(RuntimeError(f"a rank of vLLM went away while it started: {error!r}"))
        except Exception as error:  # noqa: BLE001  whatever it was, the ranks wait for an answer
            self._fail(error)
        self._is_ready.set()

    def _fail(self, error: Exception) -> None:
        self._error = error
        for connection in self._connections:
            connection.close()

    def _set_up(self) -> None:
        for _ in range(self._num_ranks):
            self._connections.append(self._listener.accept())
        hellos = [connection.recv() for connection in self._connections]
        first, num_heads = check_ranks(hellos)
        num_blocks, _, block_size, twice_dim = first.shape
        like = torch.empty((num_blocks, num_heads, block_size, twice_dim), dtype=first.dtype, device="meta")
        block_bytes = like[0].numel() * like.element_size()
        share = self._share_with(num_heads)
        self.pool = JoinedPool(len(first.layers), num_blocks, block_bytes, shared=True, before_seal=share)
        self._link.register({name: self.pool.layer(index, like) for index, name in enumerate(first.layers)})
        for hello, connection in zip(hellos, self._connections, strict=True):
            self._serve(hello.rank, connection)

    def _share_with(self, num_heads: int) -> Callable[[int], None]:
        def share(fd: int) -> None:
            for connection in self._connections:
                connection.send((f"/proc/{os.getpid()}/fd/{fd}", num_heads))
            for connection in self._connections:
                assert connection.recv() == MAPPED

        return share

    def _serve(self, rank: int, connection: Connection) -> None:
        thread = threading.Thread(target=self._read, args=(rank, connection), name=f"rank-{rank}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _read(self, rank: int, connection: Connection) -> None:
        """Answer a rank until it ends, which vLLM's executor notices by itself."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                message: Message = connection.recv()
                if isinstance(message, LayerDone):
                    self._layers.done(rank, message)
                elif isinstance(message, Drawing):
                    connection.send(self._draws.draw(message, connection.recv_bytes()))
                else:
                    connection.send(self._draws.wait(message))


def check_ranks(hellos: Sequence[Hello]) -> tuple[Hello, int]:
    """Return what the ranks' KV tensors have in common, and the heads of all. Raises ValueError where they differ. Pure."""
    first = hellos[0]
    if len(first.shape) != 4:
        raise ValueError(f"model: vLLM's KV tensors are {first.shape}, without heads to split; give tensor_parallel 1")
    for each in hellos:
        if each[1:] != first[1:]:
            raise ValueError(f"tensor_parallel: rank {each.rank} has KV tensors {each[1:]}, rank {first.rank} {first[1:]}")
    if sorted(each.rank for each in hellos) != list(range(len(hellos))):
        raise ValueError(f"tensor_parallel: ranks {sorted(each.rank for each in hellos)} have said hello")
    return first, first.shape[1] * len(hellos)


class RankLayers:
    """Tell the engine of each layer that all ranks have done."""

    def __init__(self, link: Link, num_ranks: int) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._step = 0
        self._done = [0] * num_ranks

    def done(self, rank: int, message: LayerDone) -> None:
        """Take a rank's message; one of a step that has ended says nothing new."""
        with self._lock, self._link.in_step(message.step) as runs:
            if not runs:
                return
            if message.step != self._step:
                self._step, self._done = message.step, [0] * len(self._done)
            before = min(self._done)
            self._done[rank] = message.layer + 1
            for index in range(before, min(self._done)):
                self._link.layer_done(index)


class RankDraws:
    """Draw once for each step, on the thread of rank 0, and give the tokens to the `num_others` as well."""

    def __init__(self, link: Link, num_others: int) -> None:
        self._link = link
        self._num_others = num_others
        self._changed = threading.Condition()
        self._num_drawn = 0
        self._drawn: dict[int, tuple[Tokens, int]] = {}  # by number, with how many have still to take them
        self._is_closed = False

    def draw(self, message: Drawing, logits: bytes) -> Tokens:
        """Return the tokens, for rank 0."""
        tokens = self._tokens(message, logits)
        with self._changed:
            self._drawn[self._num_drawn] = (tokens, self._num_others)
            self._num_drawn += 1
            self._changed.notify_all()
        return tokens

    def _tokens(self, message: Drawing, logits: bytes) -> Tokens:
        draws = self._link.draws
        if draws is None:
            return "the engine is not ready"
        try:
            rows = torch.frombuffer(bytearray(logits), dtype=torch.float32).view(message.shape)
            return list(draws.draw(rows, message.names))
        except Exception as error:  # noqa: BLE001  the step fails with it, in the ranks and then here
            return repr(error)

    def wait(self, message: Waiting) -> Tokens:
        """Return the tokens that rank 0 got, for another rank."""
        with self._changed:
            self._changed.wait_for(lambda: message.number in self._drawn or self._is_closed)
            if message.number not in self._drawn:
                return "the engine was closed"
            tokens, left = self._drawn[message.number]
            if left == 1:
                del self._drawn[message.number]
            else:
                self._drawn[message.number] = (tokens, left - 1)
            return tokens

    def close(self) -> None:
        """Let those that wait go."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
