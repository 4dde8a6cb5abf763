"""The model's input of one step: flat tokens of several sequences, no padding.

    tokens        | seq 0 (a decode row) | seq 1 (a chunk of 3) | ...      T tokens in all
    query_starts  0                      1                      4  ...      B + 1 numbers

A slot is a token's place in the KV pool: slot = block_id * block_size + offset in the block.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Tail:
    """Say where the last keys and values of a sequence lie, if not where its block table says.

    A draft tree is the sequence with the chain from the root, and one more sequence for each other branch; nodes of those lie
    in the slots behind the chain, not at their positions:

        slots            ... root  a  b  c | d  e | f             root ── a ── b ── c
        its own keys     ... root  a  b  c                               └──── d ── e      (a, d, e)
        a branch         ... root  a  d  e                        └──── f
        another          ... root  f

    Slots behind a branch's own, in their group of 16, become zero unless the same step writes them: they must not hold anything
    that is still needed.
    """

    first: int  # position of the first token that lies elsewhere
    slots: list[int]  # of the tokens from there to the end of the context


@dataclass(frozen=True)
class StepBatch:
    """Hold one step's work: T tokens of B sequences; R of the tokens need logits. Its tensors are in host memory."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, from 0 in each sequence
    slot_mapping: Tensor  # [T] int64: the slot where a token's keys and values are written
    query_starts: list[int]  # B + 1: sequence b owns tokens query_starts[b] to query_starts[b + 1]
    context_lens: list[int]  # B: tokens visible to the sequence's last query, itself included
    block_tables: list[list[int]]  # B: block ids, at least ceil(context_len / block_size) of them, without what is in a tail
    logits_rows: Tensor  # [R] int64: the tokens (rows of T) whose logits are needed
    tails: dict[int, Tail] = field(default_factory=dict)  # by index of the sequence, for those that have one
    adapter_slots: tuple[int, ...] = ()  # B: where the sequence's LoRA adapter is loaded, -1: it has none; empty: none has

    def __post_init__(self) -> None:
        for index, tail in self.tails.items():
            context_len = self.context_lens[index] if 0 <= index < self.num_seqs else 0
            if not 0 <= tail.first < context_len or len(tail.slots) != context_len - tail.first:
                span = f"{len(tail.slots)} slots from position {tail.first}"
                raise ValueError(f"tails: {span} for sequence {index}, whose context is {context_len}")

    @property
    def num_seqs(self) -> int:
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        return self.query_starts[-1]
