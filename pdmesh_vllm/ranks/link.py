"""The link in the process of a rank, where vLLM's worker is not in the process of its EngineCore (`--tensor-parallel`).

Every rank has a connection to the engine (ranks/server.py), over which it says, in this order:

    Hello               its KV tensors ◄── the name of the pool with the heads of all ranks
    MAPPED              they lie in the pool now
    LayerDone           in a step whose layers are awaited; not answered
    Drawing, logits     rank 0, in a step that draws ◄── the tokens, or why there are none
    Waiting             every other rank, in the same step ◄── the same tokens

All ranks have the same logits, and keep the same tokens. What a step's metadata carries needs no connection.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Client, Connection
from typing import NamedTuple

import torch
from torch import Tensor

MAPPED = "mapped"


class Hello(NamedTuple):
    """Describe a rank's KV tensors: one of `shape` [blocks, own heads, block_size, 2 * head_dim] for each of `layers`."""

    rank: int
    layers: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


class LayerDone(NamedTuple):
    """Tell that a layer's KV of this rank is in the pool."""

    step: int
    layer: int


class Drawing(NamedTuple):
    """Ask for the tokens of the rows of `names`; logits of `shape` [R, V] float32 follow as bytes."""

    names: tuple[str | None, ...]
    shape: tuple[int, int]


class Waiting(NamedTuple):
    """Ask for the tokens of the drawing of that number, from 0."""

    number: int


Message = LayerDone | Drawing | Waiting
Tokens = list[int] | str
"""A token for each row; or what went wrong."""


class RankLink:
    """Satisfy `WorkerLink` in a rank's process. One thread uses it: vLLM's worker."""

    def __init__(self, connection: Connection, rank: int) -> None:
        self._connection = connection
        self._rank = rank
        self._layers: dict[str, int] = {}
        self._num_drawn = 0

    @property
    def draws(self) -> RankLink:
        return self

    def register(self, caches: Mapping[str, Tensor]) -> None:
        """Move this rank's KV tensors into the pool of all ranks. Raises ValueError for tensors that are not alike or not on the
        CPU; EOFError where the engine refuses the ranks, and says why itself."""
        first = check_alike(caches)
        self._layers = {name: index for index, name in enumerate(caches)}
        self._connection.send(Hello(self._rank, tuple(caches), tuple(first.shape), first.dtype))
        path, num_heads = self._connection.recv()
        move(caches, path, num_heads, self._rank * first.shape[1])
        self._connection.send(MAPPED)

    def announce(self, layer: str, step: int) -> None:
        """Tell the engine that a layer of the step is in the pool."""
        if (index := self._layers.get(layer)) is not None:
            self._connection.send(LayerDone(step, index))

    def draw(self, logits: Tensor, names: Sequence[str | None]) -> Sequence[int]:
        """Return a token for each row, which the engine draws. Raises RuntimeError with what went wrong there."""
        if self._rank == 0:
            rows = logits.float().contiguous()
            self._connection.send(Drawing(tuple(names), (rows.shape[0], rows.shape[1])))
            self._connection.send_bytes(rows.numpy().data)
        else:
            self._connection.send(Waiting(self._num_drawn))
        self._num_drawn += 1
        tokens: Tokens = self._connection.recv()
        if isinstance(tokens, str):
            raise RuntimeError(f"no tokens were drawn: {tokens}")
        return tokens


def connect(address: str) -> RankLink:
    """Connect a rank with its engine. Call it once vLLM has made its groups."""
    from vllm.distributed import get_tensor_model_parallel_rank

    permit_amx()
    return RankLink(Client(address, family="AF_UNIX"), get_tensor_model_parallel_rank())


def check_alike(caches: Mapping[str, Tensor]) -> Tensor:
    """Return the first of vLLM's KV tensors. Raises ValueError unless all are alike, contiguous and on the CPU."""
    first, *others = caches.values()
    for each in (first, *others):
        if each.device.type != "cpu" or each.shape != first.shape or each.dtype != first.dtype or not each.is_contiguous():
            raise ValueError(
                f"model: vLLM's KV tensors are not alike ({each.device.type} {tuple(each.shape)} {each.dtype}, the first "
                f"{tuple(first.shape)} {first.dtype}); such KV cannot be handed off yet"
            )
    return first


def move(caches: Mapping[str, Tensor], path: str, num_heads: int, first_head: int) -> None:
    """Move a rank's KV tensors into a pool of [layers, blocks, num_heads, block_size, 2 * head_dim], as heads from `first_head`
    on. To vLLM they stay the same tensors; its kernels take any stride from block to block."""
    first = next(iter(caches.values()))
    num_blocks, own_heads, *head = first.shape
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        mapping = mmap.mmap(fd, 0)  # stays mapped as long as the tensors do
    finally:
        os.close(fd)
    pool = torch.frombuffer(mapping, dtype=first.dtype).view(len(caches), num_blocks, num_heads, *head)
    for index, cache in enumerate(caches.values()):
        cache.set_(pool[index, :, first_head : first_head + own_heads])  # type: ignore[call-overload]  # typed for storages alone


# Leave to use the AMX tiles of a CPU, which the system gives to processes that ask.


def permit_amx() -> bool:
    """Ask the system for the use of AMX tiles, for this process; return whether it has it.

    vLLM 0.32's CPU kernels for quantized weights execute AMX instructions without asking, and Linux ends a process that does with
    SIGILL. In bfloat16 oneDNN asks before its first product."""
    ask = getattr(torch.cpu, "_init_amx", None)
    return bool(ask is not None and ask())
