"""Drafted trees as batches: what the runner does, with nothing around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from hypothesis import strategies as st
from torch import Tensor

from pdmesh.engine.runner.batch import StepBatch, Tail
from pdmesh.engine.speculation.draft import Draft
from tests.engine.paged_loop import PagedLoop


@dataclass(frozen=True)
class Part:
    """One sequence of a batch: tokens from a position on, and where they are written."""

    table: list[int]
    token_ids: Sequence[int]
    position: int
    slots: list[int]
    tail: Tail | None = None


@dataclass(frozen=True)
class TreeStep:
    """The known tokens of a sequence from `position` on, the last of which is the root, and a tree below it.

    `early`: so many positions before the first that must be are in the tails, too.
    """

    table: list[int]
    token_ids: Sequence[int]
    position: int
    draft: Draft
    early: int = 0

    @property
    def root(self) -> int:
        return self.position + len(self.token_ids) - 1

    def slot(self, position: int, block_size: int) -> int:
        return self.table[position // block_size] * block_size + position % block_size

    def parts(self, block_size: int) -> list[Part]:
        """The chain, then the other branches, in the order of the tree."""
        runs = branches(self.draft)
        chain = runs.pop(0) if runs else []
        slots = [self.slot(self.position + i, block_size) for i in range(len(self.token_ids) + len(chain))]
        main = Part(self.table, [*self.token_ids, *(self.draft.token_ids[i] for i in chain)], self.position, slots)
        return [main, *(self._side(run, block_size) for run in runs)]

    def _side(self, run: list[int], block_size: int) -> Part:
        path, start = self.draft.branch(run[-1]), self.root + 1
        nodes = [self.slot(start + i, block_size) for i in path]
        elsewhere = next(depth for depth, node in enumerate(path) if node != depth)
        first = max(start + elsewhere - self.early, 0)
        tail = [*(self.slot(position, block_size) for position in range(first, start)), *nodes[max(first - start, 0) :]]
        token_ids = [self.draft.token_ids[i] for i in run]
        position = self.root + self.draft.depths[run[0]]
        return Part(self.table, token_ids, position, nodes[-len(run) :], Tail(first, tail))


def branches(draft: Draft) -> list[list[int]]:
    """Runs of nodes that follow each other."""
    runs: list[list[int]] = []
    for index, parent in enumerate(draft.parents):
        if index and parent == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def batch_of(parts: Sequence[Part]) -> StepBatch:
    """All rows' logits."""
    lengths = [len(part.token_ids) for part in parts]
    return StepBatch(
        token_ids=torch.tensor([token for part in parts for token in part.token_ids]),
        positions=torch.tensor([part.position + i for part in parts for i in range(len(part.token_ids))]),
        slot_mapping=torch.tensor([slot for part in parts for slot in part.slots]),
        query_starts=[0, *accumulate(lengths)],
        context_lens=[part.position + length for part, length in zip(parts, lengths, strict=True)],
        block_tables=[part.table for part in parts],
        logits_rows=torch.arange(sum(lengths)),
        tails={index: part.tail for index, part in enumerate(parts) if part.tail is not None},
    )


def verify(loop: PagedLoop, steps: Sequence[TreeStep]) -> list[Tensor]:
    """One step for all. Of each the logits [known tokens + nodes, vocab], in the order of the tree."""
    parts = [step.parts(loop.block_size) for step in steps]
    flat = [part for each in parts for part in each]
    logits = loop.loaded.model.forward(batch_of(flat), loop.pool.tensor)
    sizes = [sum(len(part.token_ids) for part in each) for each in parts]
    return list(torch.split(logits, sizes))


@st.composite
def drafts(draw: st.DrawFn, most: int = 12) -> Draft:
    """Depth first: each node hangs on the one before it or on one of that one's ancestors."""
    parents: list[int] = []
    for index in range(draw(st.integers(0, most))):
        path, at = [index - 1], index - 1
        while at != -1:
            at = parents[at]
            path.append(at)
        parents.append(draw(st.sampled_from(path)) if draw(st.booleans()) else index - 1)
    token_ids = draw(st.lists(st.integers(0, 255), min_size=len(parents), max_size=len(parents)))
    return Draft(tuple(token_ids), tuple(parents), (1.0,) * len(parents))
