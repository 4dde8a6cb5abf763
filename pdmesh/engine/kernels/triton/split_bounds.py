"""Which sequences of a step have their keys split over many programs, and which have them walked by one for each tile of rows.

    queries      1 .. 8     17     90   |   300    2048        a step's sequences by how many queries they have
                 split      split  split|   walk   walk        those with at most `longest` are split

Walking reads a key once for 128 rows, a row being a query and one of its heads, but has no more programs than tiles: 32 heads of
17 queries behind 64 k tokens are 8 of them, for 132 multiprocessors. Splitting has a program for each part of the keys, reads a
key once for 64 rows, and writes a part of the result for each split. So what would leave half of the chip idle is split: up to
SPLIT_ROWS rows of a sequence and of a step, the shortest first, so that decode and verification come before chunks of prompts. A
draft is split whatever its heads. Counted, not measured.

Which it is follows from all lengths of a step; as far as both kernels add up alike (attention.py, "Bits"), no number does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from pdmesh.engine.config import MAX_DRAFT_TOKENS

SPLIT_ROWS = 8192
"""Rows that walking has 64 programs for. Their parts are 273 MB for heads of 128 and contexts that have all 64 splits."""


@dataclass(frozen=True)
class SplitBounds:
    """The most that is split: `max_queries` of a sequence, `num_tokens` of a step."""

    max_queries: int
    num_tokens: int

    @classmethod
    def of(cls, num_heads: int, num_rows: int = 0) -> SplitBounds:
        """`num_rows` of logits that a step has at most: all that decode and verify, which may be more than fill the chip."""
        most = max(SPLIT_ROWS // num_heads, 1 + MAX_DRAFT_TOKENS)
        return cls(most, max(most, num_rows))

    def longest(self, lengths: Sequence[int]) -> int:
        """Queries of the longest sequences that are split; 0: none is. Those as long as one another are split all or none."""
        longest = num_tokens = 0
        for length, alike in groupby(sorted(length for length in lengths if 0 < length <= self.max_queries)):
            num_tokens += length * len(list(alike))
            if num_tokens > self.num_tokens:
                break
            longest = length
        return longest


SPLIT_BOUNDS = SplitBounds.of(32)
