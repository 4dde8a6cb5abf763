"""Blocks of one pool into another, summed on the way: what a device reads out of another process's pool.

    sum = Σ mix(word[i] ^ (i + 1) * GOLDEN) mod 2^64       word: 8 bytes, i: its place in the part as it travels

mix is splitmix64's finalizer (Steele et al., Fast Splittable Pseudorandom Number Generators, 2014), a bijection: a part in which
one word is wrong never has the sum of the right one; one that is wrong otherwise, or has words in other places, has it by a
chance of 2^-64. It tells accidents, and defends against nobody. Why no CRC-32C: a GPU has no instruction for it, and to read a
gigabyte back over PCIe for the host's would take 20 ms at 50 GB/s, where a device reads it in 0.3 ms at 3.3 TB/s; this takes some
30 integer operations for 8 bytes, which an H100 does at about that speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.support import why_not_here

NUM_SUMS = 64  # what a launch adds up is spread over so many words, or all of its programs would wait for one
WORD_BYTES = 8
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True)
class Blocks:
    """pool int64 [num_layers, 2, num_blocks, words of a block], contiguous; block_ids int32, within it, on the device of whoever
    copies. In this order they are a part as it travels (kvtransfer/parts.py)."""

    pool: Tensor
    layers: range
    block_ids: Tensor

    def check(self) -> None:
        """Raises ValueError naming what does not fit."""
        num_layers = self.pool.shape[0]
        if self.pool.dtype != torch.int64 or self.pool.dim() != 4 or not self.pool.is_contiguous():
            shape = f"{self.pool.dtype} {tuple(self.pool.shape)}"
            raise ValueError(f"pool: {shape}, expected contiguous int64 [layers, 2, blocks, words]")
        if not 0 <= self.layers.start < self.layers.stop <= num_layers or self.layers.step != 1:
            raise ValueError(f"layers: {self.layers} is not within the pool's {num_layers}")
        if self.block_ids.dtype != torch.int32 or self.block_ids.dim() != 1 or not self.block_ids.is_contiguous():
            raise ValueError(f"block_ids: {self.block_ids.dtype} {tuple(self.block_ids.shape)}, expected int32 [blocks]")

    def check_fits(self, source: Blocks) -> None:
        """Raises ValueError unless `source` has as many of the same size, of the same layers."""
        ours, theirs = ((each.layers, len(each.block_ids), each.pool.shape[3]) for each in (self, source))
        if ours != theirs:
            raise ValueError(f"source: {theirs} of layers, blocks and words of a block do not go where {ours} are")


class SummedCopies(Protocol):
    """Never synchronizes. sums int64 [NUM_SUMS]: what is summed is added to any of them. All raise ValueError, see Blocks."""

    def sum(self, blocks: Blocks, sums: Tensor) -> None: ...

    def copy(self, source: Blocks, target: Blocks, sums: Tensor) -> None:
        """From one pool into another; sums what is stored: the source may change meanwhile."""
        ...


class IndexedSums:
    """By torch's operations: the reference, and what there is without Triton. Takes room for the part several times over."""

    def sum(self, blocks: Blocks, sums: Tensor) -> None:
        blocks.check()
        sums[:1] += word_sum(_of(blocks)[:, :, blocks.block_ids.long()])

    def copy(self, source: Blocks, target: Blocks, sums: Tensor) -> None:
        source.check()
        target.check()
        target.check_fits(source)
        words = _of(source)[:, :, source.block_ids.long()]
        _of(target)[:, :, target.block_ids.long()] = words
        sums[:1] += word_sum(words)


def word_sum(words: Tensor) -> Tensor:
    """The sum of int64 words in their order, as one word."""
    places = torch.arange(1, words.numel() + 1, device=words.device)
    return _mixed(words.flatten() ^ places * _signed(_GOLDEN)).sum()


def unsigned(total: int) -> int:
    """A sum of partial sums as it travels."""
    return total % 2**64


def summed_copies_for(device: torch.device) -> SummedCopies:
    """Triton's where it runs."""
    if why_not_here(device.type):
        return IndexedSums()
    from pdmesh.engine.kernels.triton.summed_blocks import TritonSums

    return TritonSums()


def _of(blocks: Blocks) -> Tensor:
    return blocks.pool[blocks.layers.start : blocks.layers.stop]


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shifted(x, 27)) * _signed(_MIX_2)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, filled with zeros: torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
