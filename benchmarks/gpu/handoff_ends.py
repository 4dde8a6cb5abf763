"""What both ends of the measured hand-off have in common: the shape of their pools, and how they are staged."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.gpu.shapes import Scale
from kvtransfer.manifest import PROTOCOL_VERSION
from pdmesh.engine.kernels.triton.support import why_not_here
from pdmesh.engine.kv_cache.pool import KVPool, KVShape
from pdmesh.engine.kv_cache.staging import StagingSizes
from pdmesh.v1 import common_pb2
from pdmesh.worker.kv_memory import ARRIVALS, DEPARTURES

MODEL, BLOCK_SIZE = "8B", 16
TINY_PIECE_BLOCKS = 3
"""Of a layer in a piece, where a piece for a GPU would take all there is."""


@dataclass(frozen=True)
class Ends:
    """Blocks: those of the request that is handed off."""

    device: str
    dtype: str
    num_layers: int
    num_blocks: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def from_json(cls, text: str) -> Ends:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * BLOCK_SIZE

    @property
    def shape(self) -> KVShape:
        sizes = (self.num_layers, self.num_blocks, BLOCK_SIZE, self.num_kv_heads, self.head_dim)
        return KVShape(*sizes, getattr(torch, self.dtype))

    @property
    def identity(self) -> common_pb2.Identity:
        return common_pb2.Identity(
            model="random weights",
            weights_hash="0" * 64,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            numeric_mode="none",
            protocol_version=PROTOCOL_VERSION,
        )

    @property
    def layout(self) -> common_pb2.KVLayout:
        return common_pb2.KVLayout(block_size=BLOCK_SIZE, kv_dtype=self.dtype, tensor_parallel_size=1, arrangement="plain")

    def sizes(self) -> tuple[StagingSizes, StagingSizes]:
        """What leaves and what arrives: a worker's on a GPU."""
        if self.device == "cuda":
            return DEPARTURES, ARRIVALS
        small = StagingSizes(4, TINY_PIECE_BLOCKS * 2 * self.shape.bytes_per_layer_block)
        return small, small


def ends_for(device: str, scale: Scale) -> Ends:
    """As many blocks as make the bytes that are to be handed off."""
    shape, dtype = scale.config(MODEL), getattr(torch, scale.dtype)
    block = KVShape(shape.num_layers, 1, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim, dtype)
    num_blocks = -(-scale.handed_off // block.bytes_per_block)
    return Ends(device, scale.dtype, shape.num_layers, num_blocks, shape.num_kv_heads, shape.head_dim)


def fingerprint(pool: KVPool, block_ids: list[int]) -> list[int]:
    """Of each layer's keys and values in these blocks; another order makes another one. Computed where the pool lies."""
    ids = torch.tensor(block_ids, device=pool.tensor.device)
    return [_weighted(layer.index_select(1, ids)) for layer in pool.tensor]


def _weighted(content: torch.Tensor) -> int:
    numbers = content.contiguous().view(torch.int16).flatten().to(torch.int64)
    return int((numbers * torch.arange(1, len(numbers) + 1, device=numbers.device)).sum())


def one_launch_at_a_time() -> None:
    """Triton's interpreter keeps where it is in globals; a GPU takes launches from several threads."""
    if why_not_here("cpu"):
        return
    from triton.runtime import interpreter

    lock, launch = threading.Lock(), interpreter.GridExecutor.__call__

    def locked(self: Any, *args: Any, **kwargs: Any) -> None:
        with lock:
            launch(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = locked
