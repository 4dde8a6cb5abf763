"""What a rank other than 0 does: load, meet, map the pool, then compute every step that rank 0 tells it."""

from __future__ import annotations

import json
import mmap
import os
import socket
from typing import Any

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.kv_cache import KVShape
from engine.kv_moves import copy_blocks, move_slots
from engine.parallel import wire
from engine.parallel.group import Group, find_meeting_point
from engine.parallel.load import load_shard
from engine.parallel.share import Share
from engine.parallel.split import Shard
from engine.parallel.wire import Kind


def follow(sock: socket.socket) -> None:
    """Raises EOFError when rank 0 is gone, and whatever goes wrong."""
    settings = _json(sock, Kind.SETTINGS)
    config, shard = EngineConfig(**settings["engine"]), Shard(settings["rank"], settings["size"])
    if config.device == "cuda":
        torch.cuda.set_device(shard.rank)
    join = load_shard(config, shard)
    wire.send(sock, Kind.LOADED)
    store = find_meeting_point(_json(sock, Kind.MEET)["port"], shard.size)
    share = join(Group(store, shard, config.device, config.tensor_parallel_timeout_s))
    kv = _open_pool(sock, config.device)
    wire.send(sock, Kind.READY)
    _compute(sock, share, kv)


@torch.inference_mode()
def _compute(sock: socket.socket, share: Share, kv: Tensor) -> None:
    while True:
        kind, payload = wire.expect(sock, Kind.STEP, Kind.COPY, Kind.MOVE, Kind.PREPARE)
        if kind is Kind.STEP:
            share.forward(wire.decode_batch(payload), kv)
        elif kind is Kind.PREPARE:
            share.prepare_steps(kv)
        elif kind is Kind.COPY:
            sources, targets = wire.decode_slots(payload)
            copy_blocks(kv, sources, targets)
        else:
            move_slots(kv, *wire.decode_slots(payload), "plain")


def _open_pool(sock: socket.socket, device: str) -> Tensor:
    """On the CPU rank 0's own memory, in which every rank has its heads; on a device one of our own, with our heads only."""
    said = _json(sock, Kind.POOL)
    shape = KVShape(**{**said, "dtype": getattr(torch, said["dtype"])})
    if device != "cpu":
        return torch.zeros(shape.tensor_shape, dtype=shape.dtype, device=device)
    fd = wire.receive_fd(sock)
    try:
        memory = mmap.mmap(fd, shape.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
    return torch.frombuffer(memory, dtype=shape.dtype).view(shape.tensor_shape)


def _json(sock: socket.socket, kind: Kind) -> dict[str, Any]:
    """Not validated: rank 0 runs this very code."""
    content: dict[str, Any] = json.loads(wire.expect(sock, kind)[1])
    return content
