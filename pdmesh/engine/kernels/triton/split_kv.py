"""Split-KV: where the keys of a query are split, which follows only from how many keys it has, and which sequences are split.

    context     1 ... 256 | 257 ... 16384 | ... 32768 | ... 65536 | ...
    split_len   256         256              512         1024              (one split; up to 64; 33 to 64; 33 to 64; ...)

Split i holds keys i * split_len to (i + 1) * split_len. 64 splits of 8 key/value heads are four programs for each of the 132
multiprocessors of an H100 or H200, so one long sequence occupies the chip: from 4 k to 8 k on; at 2 k it has 64 programs
(docs/gpu.md, "Limits of a step", says why). 256 keys are the least that repays reading a program's
queries and writing its part of the result (3 % of the bytes of the keys and values of 4 query heads).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from pdmesh.engine.config import MAX_DRAFT_TOKENS

DOUBLINGS = 14
"""How often a split can double: with 64 splits of 256 keys, up to 2**28 keys."""


@dataclass(frozen=True)
class Splits:
    """`min_keys` of a split and at `most` how many splits, both powers of two. Part of the numeric mode: others give other
    bits."""

    min_keys: int = 256
    most: int = 64

    def __post_init__(self) -> None:
        for name, value in (("min_keys", self.min_keys), ("most", self.most)):
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}: {value} is not a power of two")

    def split_len(self, context_len: int) -> int:
        """Return the keys of a split of a query that sees `context_len` keys without a window: the kernels' `split_len_of`."""
        length = self.min_keys
        for _ in range(DOUBLINGS):
            length = length * 2 if length * self.most < context_len else length
        return length

    def num_splits(self, context_len: int) -> int:
        return -(-context_len // self.split_len(context_len))

    def bound(self, max_context: int) -> int:
        """Return the most splits that any context up to `max_context` has."""
        return max(1, min(-(-max_context // self.min_keys), self.most))


SPLITS = Splits()


# Which sequences of a step have their keys split over many programs, and which are walked by one program for each tile of rows
#
#     queries      1 .. 8     17     90   |   300    2048        a step's sequences by how many queries they have
#                  split      split  split|   walk   walk        those with at most `longest` are split
#
# Walking reads a key once for 128 rows, a row being a query and one of its heads, but has no more programs than tiles: 32 heads
# of 17 queries behind 64 k tokens are 8 of them, for 132 multiprocessors. Splitting has a program for each part of the keys,
# reads a key once for 64 rows, and writes a part of the result for each split. So sequences that would leave half of the chip
# idle are split: up to SPLIT_ROWS rows of a sequence and of a step, the shortest first, so that decode and verification come
# before chunks of prompts. A draft is split whatever its heads. This is counted, not measured.
#
# The choice depends on all lengths of a step; where both kernels add up alike (attention.py, "Bits"), no number depends on it.


SPLIT_ROWS = 8192
"""Rows that walking has 64 programs for. Their parts are 273 MB for heads of 128 and contexts that have all 64 splits."""


@dataclass(frozen=True)
class SplitBounds:
    """Limit what is split: `max_queries` of a sequence, `num_tokens` of a step."""

    max_queries: int
    num_tokens: int

    @classmethod
    def of(cls, num_heads: int, num_rows: int = 0) -> SplitBounds:
        """Return the bounds. `num_rows`: the most rows of logits of a step, of all sequences that decode and verify, which may
        more than fill the chip."""
        most = max(SPLIT_ROWS // num_heads, 1 + MAX_DRAFT_TOKENS)
        return cls(most, max(most, num_rows))

    def longest(self, lengths: Sequence[int]) -> int:
        """Return the queries of the longest sequences that are split; 0: none is. Of equally long ones all are split or none."""
        longest = num_tokens = 0
        for length, alike in groupby(sorted(length for length in lengths if 0 < length <= self.max_queries)):
            num_tokens += length * len(list(alike))
            if num_tokens > self.num_tokens:
                break
            longest = length
        return longest


SPLIT_BOUNDS = SplitBounds.of(32)
