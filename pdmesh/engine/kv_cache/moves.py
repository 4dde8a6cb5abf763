"""Moves of keys and values from slot to slot of a KV pool: those of an accepted branch of a draft tree go to their own
positions."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from pdmesh.engine.kernels.cpu import library as abi
from pdmesh.engine.kernels.cpu.model import kv_head_dim
from pdmesh.engine.kv_cache.copies import movable

# Indices of a tensor that may lie on a GPU


def indices_for(tensor: Tensor, values: Sequence[int]) -> Tensor:
    """Return [N] int64 on the tensor's device. torch would copy a list there from memory that is not pinned, and wait for all
    earlier work of the device."""
    if tensor.device.type != "cuda":
        return torch.tensor(values, dtype=torch.int64)
    return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(tensor.device, non_blocking=True)


def copy_blocks(kv: Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy in all layers block `sources[i]` to `targets[i]`: all are read before any is written. kv as for `move_slots`."""
    blocks = movable(kv)
    blocks[:, :, indices_for(kv, targets)] = blocks[:, :, indices_for(kv, sources)]


def move_slots(kv: Tensor, sources: Sequence[int], targets: Sequence[int], arrangement: str) -> None:
    """Copy in all layers slot `sources[i]` to `targets[i]`, as if all were read before any is written.

    kv [num_layers, 2, num_blocks, block_size, num_kv_heads, head] (`KVPool.tensor`); `arrangement`: plain or panels, see
    kvtransfer/conversion.py. Raises ValueError for slots outside the pool, or where two have one target.
    """
    _check(kv, sources, targets)
    if not sources:
        return
    if arrangement == "plain":
        flat = movable(kv).flatten(2, 3)
        flat[:, :, indices_for(flat, targets)] = flat[:, :, indices_for(flat, sources)]  # the right side is a copy
    else:
        _move_in_panels(kv, array("q", sources), array("q", targets))


def _move_in_panels(kv: Tensor, sources: array[int], targets: array[int]) -> None:
    layers, _, num_blocks, block_size, heads, head = kv.shape
    form = abi.FORMATS[str(kv.dtype).removeprefix("torch.")]
    pool = abi.Pool(layers, block_size, heads, kv_head_dim(head, kv.dtype), form, num_blocks, kv.data_ptr())
    addresses = (numbers.buffer_info()[0] for numbers in (sources, targets))
    if abi.shared_library().pdmesh_move_slots(ctypes.byref(pool), *addresses, len(sources)):
        raise MemoryError(f"no memory to move {len(sources)} tokens' keys and values")


def _check(kv: Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
    num_slots = kv.shape[2] * kv.shape[3]
    if len(sources) != len(targets):
        raise ValueError(f"targets: {len(targets)} for {len(sources)} sources")
    if len(set(targets)) < len(targets):
        raise ValueError(f"targets: {list(targets)} name a slot twice")
    for name, slots in (("sources", sources), ("targets", targets)):
        if slots and not 0 <= min(slots) <= max(slots) < num_slots:
            raise ValueError(f"{name}: slots {min(slots)} to {max(slots)}; the pool has 0 to {num_slots - 1}")
