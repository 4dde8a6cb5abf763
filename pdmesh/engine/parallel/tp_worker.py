"""The work of a rank other than 0: load, join the group, open its pool, then compute every step that rank 0 sends."""

from __future__ import annotations

import json
import mmap
import os
import socket
from typing import Any

import torch
from torch import Tensor

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kv_cache.copies import Columns, PieceCopies
from pdmesh.engine.kv_cache.events import LayerReadiness
from pdmesh.engine.kv_cache.moves import copy_blocks, move_slots
from pdmesh.engine.kv_cache.pool import KVPool, KVShape
from pdmesh.engine.kv_cache.streams import streams_of
from pdmesh.engine.parallel import tp_protocol
from pdmesh.engine.parallel.collectives import Group, find_meeting_point
from pdmesh.engine.parallel.copies import CopyService
from pdmesh.engine.parallel.events import Launched
from pdmesh.engine.parallel.load import load_shard
from pdmesh.engine.parallel.share import Share
from pdmesh.engine.parallel.shared_pieces import PiecesShape, SharedPieces
from pdmesh.engine.parallel.split import Shard
from pdmesh.engine.parallel.tp_protocol import Kind


def follow(sock: socket.socket) -> None:
    """Serve rank 0. Raises EOFError when rank 0 is gone, and whatever fails."""
    settings = _json(sock, Kind.SETTINGS)
    config, shard = EngineConfig(**settings["engine"]), Shard(settings["rank"], settings["size"])
    if config.device == "cuda":
        torch.cuda.set_device(shard.rank)
    join = load_shard(config, shard, shares_pool=settings["shares_pool"])
    tp_protocol.send(sock, Kind.LOADED)
    store = find_meeting_point(_json(sock, Kind.MEET)["port"], shard.size)
    share = join(Group(store, shard, config.device, config.tensor_parallel_timeout_s))
    kv = _open_pool(sock, config.device, shares_pool=settings["shares_pool"])
    tp_protocol.send(sock, Kind.READY)
    _Follower(sock, share, kv, shard).compute()


class _Follower:
    """A rank that has loaded, joined the others and has its pool."""

    def __init__(self, sock: socket.socket, share: Share, kv: Tensor, shard: Shard) -> None:
        self._sock, self._share, self._kv, self._shard = sock, share, kv, shard
        self._streams = streams_of(kv.device)
        self._launched = Launched(self._streams)
        self._signal = LayerReadiness(share.num_layers)
        self._signal.marks = self._launched
        self._signal.notify_every(1)

    def compute(self) -> None:
        """Compute steps until rank 0 is gone."""
        kinds = (Kind.STEP, Kind.MARKED_STEP, Kind.COPY, Kind.MOVE, Kind.PREPARE, Kind.PIECES)
        while True:
            kind, payload = tp_protocol.expect(self._sock, *kinds)
            self._launched.begin()
            if kind is Kind.PIECES:
                self._open_copies(payload)
            else:
                self._launch(kind, payload)
            self._launched.end()

    @torch.inference_mode()
    def _launch(self, kind: Kind, payload: bytearray) -> None:
        if kind is Kind.STEP:
            self._share.forward(tp_protocol.decode_batch(payload), self._kv)
        elif kind is Kind.MARKED_STEP:
            self._share.forward(tp_protocol.decode_batch(payload), self._kv, self._signal)
        elif kind is Kind.PREPARE:
            self._share.prepare_steps(self._kv)
        elif kind is Kind.COPY:
            copy_blocks(self._kv, *tp_protocol.decode_slots(payload))
        else:
            move_slots(self._kv, *tp_protocol.decode_slots(payload), "plain")

    def _open_copies(self, payload: bytearray) -> None:
        """Serve one direction of the hand-off: from now on a thread of its own takes orders for it."""
        shape = PiecesShape(**json.loads(payload))
        memory = _mapped(tp_protocol.receive_fd(self._sock), shape.num_bytes)
        orders = socket.socket(fileno=tp_protocol.receive_fd(self._sock))
        columns = Columns.of(self._kv, self._shard.rank, self._shard.size)
        copies = PieceCopies(self._kv, self._streams, shape.piece_bytes, columns=columns)
        pieces = SharedPieces(shape, memory, self._kv.device)
        CopyService(orders, pieces, copies, self._launched, self._kv.device).start()
        tp_protocol.send(self._sock, Kind.READY)


def _open_pool(sock: socket.socket, device: str, *, shares_pool: bool) -> Tensor:
    """Map rank 0's own memory, in which every rank has its heads; or open a pool of our own, with our heads only."""
    said = _json(sock, Kind.POOL)
    shape = KVShape(**{**said, "dtype": getattr(torch, said["dtype"])})
    if not shares_pool:
        return KVPool(shape, device, shared=False).tensor
    return torch.frombuffer(_mapped(tp_protocol.receive_fd(sock), shape.num_bytes), dtype=shape.dtype).view(shape.tensor_shape)


def _mapped(fd: int, num_bytes: int) -> mmap.mmap:
    """Map the memory and close the descriptor."""
    try:
        return mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


def _json(sock: socket.socket, kind: Kind) -> dict[str, Any]:
    """Read a JSON payload, without validation: rank 0 runs this very code."""
    content: dict[str, Any] = json.loads(tp_protocol.expect(sock, kind)[1])
    return content
