"""Drafts: a tree of proposed tokens whose root is the last known token of a sequence.

    token_ids   a  b  c  d  e           root ── a ── b ── c          rows of the step: root, a, b, c, d, e
    parents    -1  0  1  0  3                   └─── d ── e          (d and e stand beside b and c)

Depth first: a token that does not follow the one before it begins another branch.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

ROOT = -1
_ROUNDED = 1e-6


@dataclass(frozen=True)
class Draft:
    """Hold a draft. `chances[i]`: how likely the model draws token i if it has drawn the token's parent."""

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()
    proposer: str = ""
    is_trial: bool = False  # unlikely, and verified now and then to learn from what is drawn after it

    @classmethod
    def chain(cls, token_ids: Sequence[int], chances: Sequence[float], proposer: str) -> Draft:
        """Return a chain of tokens. Raises ValueError where the lengths differ."""
        if len(token_ids) != len(chances):
            raise ValueError(f"chances: {len(chances)} for {len(token_ids)} tokens")
        return cls(tuple(token_ids), tuple(range(-1, len(token_ids) - 1)), tuple(chances), proposer)

    def why_not(self, max_depth: int, max_tokens: int, vocab_size: int | None) -> str:
        """Return the reason why the draft is invalid; empty if it is valid. Raises TypeError where it does not consist of
        numbers."""
        size = len(self.token_ids)
        if not size == len(self.parents) == len(self.chances):
            return f"{size} tokens have {len(self.parents)} parents and {len(self.chances)} chances"
        if size > max_tokens:
            return f"{size} tokens; {max_tokens} were allowed"
        if not all(0.0 <= chance <= 1.0 + _ROUNDED for chance in self.chances):  # NaN fails the comparison, too
            return f"chances are not between 0 and 1: {self.chances}"
        ids = [operator.index(token_id) for token_id in self.token_ids]
        if min(ids, default=0) < 0 or (vocab_size is not None and max(ids, default=0) >= vocab_size):
            return f"tokens are not of the vocabulary: {self.token_ids}"
        if not all(ROOT <= parent < at for at, parent in enumerate(self.parents)):
            return f"parents do not stand before their children: {self.parents}"
        deepest = max(self.depths, default=0)
        return f"{deepest} tokens one behind the other; {max_depth} were allowed" if deepest > max_depth else ""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        return all(parent == index - 1 for index, parent in enumerate(self.parents))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Return the depth of each token, from 1 after the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def cumulative(self) -> tuple[float, ...]:
        """Return how likely each token is accepted: that the model draws it and all tokens before it on its branch."""
        kept: list[float] = []
        for parent, chance in zip(self.parents, self.chances, strict=True):
            kept.append(chance if parent == ROOT else kept[parent] * chance)
        return tuple(kept)

    @cached_property
    def branches(self) -> tuple[range, ...]:
        """Return the tokens (as indices) in runs that follow one another; the first run begins below the root."""
        starts = [index for index, parent in enumerate(self.parents) if parent != index - 1 or index == 0]
        return tuple(range(start, end) for start, end in pairwise([*starts, len(self)]))

    def branch(self, index: int) -> tuple[int, ...]:
        """Return the tokens (as indices) from below the root to `index`, itself included."""
        path: list[int] = []
        while index != ROOT:
            path.append(index)
            index = self.parents[index]
        return tuple(reversed(path))

    def keep(self, wanted: Sequence[bool]) -> Draft:
        """Return a draft of only the wanted tokens whose ancestors are all wanted."""
        new_index: dict[int, int] = {ROOT: ROOT}
        for index, parent in enumerate(self.parents):
            if wanted[index] and parent in new_index:
                new_index[index] = len(new_index) - 1
        if len(new_index) - 1 == len(self):
            return self
        kept = [index for index in new_index if index != ROOT]
        return Draft(
            tuple(self.token_ids[index] for index in kept),
            tuple(new_index[self.parents[index]] for index in kept),
            tuple(self.chances[index] for index in kept),
            self.proposer,
            self.is_trial,
        )

    def first(self, max_tokens: int) -> Draft:
        """Return a draft of the first tokens, at most `max_tokens`: a parent precedes its children, so they are still a tree."""
        if len(self) <= max_tokens:
            return self
        cut = slice(0, max_tokens)
        return Draft(self.token_ids[cut], self.parents[cut], self.chances[cut], self.proposer, self.is_trial)


NOTHING = Draft()


@dataclass(frozen=True)
class Verified:
    """Hold the result of verifying a draft (perhaps an empty one). `draws[0]` is the model's draw after the root, `draws[i + 1]`
    its draw after token i of the draft; `kept`: the accepted tokens of the draft, from the root on."""

    draft: Draft
    draws: tuple[int, ...]

    @cached_property
    def kept(self) -> tuple[int, ...]:
        if not self.draft.token_ids:
            return ()
        children: dict[tuple[int, int], int] = {}
        for index, (parent, token_id) in enumerate(zip(self.draft.parents, self.draft.token_ids, strict=True)):
            children.setdefault((parent, token_id), index)
        path: list[int] = []
        at = ROOT
        while (after := children.get((at, self.draws[at + 1]))) is not None:
            path.append(after)
            at = after
        return tuple(path)

    @property
    def rows(self) -> tuple[int, ...]:
        """Return the rows of `draws` that are new tokens of the sequence, in order: one more than are accepted."""
        return (0, *(index + 1 for index in self.kept))

    @property
    def new_tokens(self) -> tuple[int, ...]:
        return tuple(self.draws[row] for row in self.rows)
