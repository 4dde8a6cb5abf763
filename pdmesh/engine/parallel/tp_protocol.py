"""The protocol from rank 0 to the others, over a pair of Unix sockets each: frames of a kind, a length and bytes.

    rank 0                                                 another rank
    SETTINGS (json) ────────────────────────────────────►  loads its share of the weights
                        ◄──────────────────────── LOADED   or FAILED (text), and it ends
    MEET (json: port) ──────────────────────────────────►  joins the group
    POOL (json), on the CPU with the pool's descriptor ─►  maps it, or makes its own on its device
                        ◄───────────────────────── READY
    PREPARE, on a device ───────────────────────────────►  records its graphs, together with rank 0
    PIECES (json), their memory, a socket ──────────────►  maps it, and serves orders on that socket from now on
                        ◄───────────────────────── READY
    STEP, MARKED_STEP (a batch), COPY, MOVE (slots) ────►  no answer: the exchanges of a step synchronize ranks
    on that socket: ORDER ──────────────────────────────►  copies between its pool and a piece (copies.py)
                        ◄──────────────────────── COPIED

A closed socket means that the other end is gone. A batch is int64 numbers end to end: a step costs one write for each rank, and
reading it makes no copy of its tensors.
"""

from __future__ import annotations

import json
import socket
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import chain

import torch
from torch import Tensor

from pdmesh.engine.errors import EngineError
from pdmesh.engine.runner.batch import StepBatch, Tail
from pdmesh.platform import fallbacks

_HEADER = struct.Struct("<BQ")


class Kind(IntEnum):
    """Kind of a frame."""

    SETTINGS = 1
    LOADED = 2
    FAILED = 3
    MEET = 4
    POOL = 5
    READY = 6
    STEP = 7
    COPY = 8
    MOVE = 9
    PREPARE = 10
    PIECES = 11
    MARKED_STEP = 12  # a step with parts of a hand-off: each layer is marked as it runs
    ORDER = 13
    COPIED = 14


def send(sock: socket.socket, kind: Kind, payload: bytes = b"") -> None:
    """Send a frame. Raises OSError, TimeoutError among them, when the other end is gone or does not read."""
    sock.sendall(_HEADER.pack(kind, len(payload)) + payload)


def as_json(content: Mapping[str, object]) -> bytes:
    """Return a JSON payload."""
    return json.dumps(content).encode()


def receive(sock: socket.socket) -> tuple[Kind, bytearray]:
    """Return the next frame. Raises EOFError when the other end is gone, TimeoutError when it is silent."""
    kind, size = _HEADER.unpack(_read(sock, _HEADER.size))
    return Kind(kind), _read(sock, size)


def expect(sock: socket.socket, *kinds: Kind) -> tuple[Kind, bytearray]:
    """Return the next frame, which has to be of one of these kinds. Raises ValueError for another, and what `receive` raises."""
    kind, payload = receive(sock)
    if kind not in kinds:
        raise ValueError(f"a rank heard {kind.name}, not {' or '.join(each.name for each in kinds)}")
    return kind, payload


def send_fd(sock: socket.socket, fd: int) -> None:
    """Send a descriptor, behind the frame that announces it."""
    socket.send_fds(sock, [b"\0"], [fd])


def receive_fd(sock: socket.socket) -> int:
    """Return a descriptor, which the caller closes. Raises EOFError."""
    data, fds, _ = fallbacks.receive_fds(sock, 1, 1)
    if not data or len(fds) != 1:
        raise EOFError("rank 0 is gone")
    return fds[0]


def encode_slots(sources: Sequence[int], targets: Sequence[int]) -> bytes:
    """Encode the payload of COPY (blocks) and MOVE (slots)."""
    return array("q", chain(sources, targets)).tobytes()


def decode_slots(payload: bytearray) -> tuple[list[int], list[int]]:
    """Return (sources, targets)."""
    numbers = memoryview(payload).cast("q").tolist()
    return numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]


def encode_batch(batch: StepBatch) -> bytes:
    """Encode the payload of STEP."""
    counts = array("q", (batch.num_tokens, batch.num_seqs, len(batch.logits_rows), len(batch.tails)))
    counts.extend(map(len, batch.block_tables))
    tensors = (batch.token_ids, batch.positions, batch.slot_mapping, batch.logits_rows)
    lists = array("q")
    lists.fromlist(
        [*batch.query_starts, *batch.context_lens, *chain.from_iterable(batch.block_tables)]
    )  # twice as fast as extend
    for index, tail in batch.tails.items():
        lists.extend((index, tail.first, len(tail.slots), *tail.slots))
    return b"".join((counts.tobytes(), *(tensor.cpu().numpy().tobytes() for tensor in tensors), lists.tobytes()))


def decode_batch(payload: bytearray) -> StepBatch:
    """Decode a batch. Its tensors are on the CPU and lie in `payload`."""
    reader = _Reader(payload)
    num_tokens, num_seqs, num_rows, num_tails = reader.numbers(4)
    table_sizes = reader.numbers(num_seqs)
    token_ids, positions, slot_mapping = (reader.tensor(num_tokens) for _ in range(3))
    return StepBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        logits_rows=reader.tensor(num_rows),
        query_starts=reader.numbers(num_seqs + 1),
        context_lens=reader.numbers(num_seqs),
        block_tables=[reader.numbers(size) for size in table_sizes],
        tails=dict(reader.tails(num_tails)),
    )


class _Reader:
    """Take int64 numbers out of a payload, one after another."""

    def __init__(self, payload: bytearray) -> None:
        self._payload, self._view, self._at = payload, memoryview(payload).cast("q"), 0

    def numbers(self, count: int) -> list[int]:
        self._at += count
        return self._view[self._at - count : self._at].tolist()

    def tensor(self, count: int) -> Tensor:
        self._at += count
        if not count:
            return torch.empty(0, dtype=torch.int64)
        return torch.frombuffer(self._payload, dtype=torch.int64, count=count, offset=8 * (self._at - count))

    def tails(self, count: int) -> Iterator[tuple[int, Tail]]:
        for _ in range(count):
            index, first, num_slots = self.numbers(3)
            yield index, Tail(first, self.numbers(num_slots))


def _read(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = sock.recv_into(view[done:])
        if not count:
            raise EOFError("the other end is gone")
        done += count
    return data


# Errors between the ranks of one engine


class RankFailed(EngineError):
    """A rank has ended, is silent or could not start. The others wait for it in vain: the process must stop serving."""


class ExchangeFailed(EngineError):
    """An exchange between ranks broke or took too long; which rank is the cause is not known here."""
