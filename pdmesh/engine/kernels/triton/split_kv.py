"""Where the keys of a query are split: a function of how many keys it has, and of nothing else.

    context     1 ... 256 | 257 ... 16384 | ... 32768 | ... 65536 | ...
    split_len   256         256              512         1024              (one split; up to 64; 33 to 64; 33 to 64; ...)

Split i holds keys i * split_len to (i + 1) * split_len. 64 splits of 8 key/value heads are four programs for each of the 132
multiprocessors of an H100 or H200, so one long sequence occupies the chip: from 4 k to 8 k on; at 2 k it has 64 programs
(docs/gpu.md, "What limits a step", says why that is left so). 256 keys are the least that repays reading a program's
queries and writing its part of the result (3 % of the bytes of the keys and values of 4 query heads).
"""

from __future__ import annotations

from dataclasses import dataclass

DOUBLINGS = 14
"""So often can a split double: with 64 splits of 256 keys, up to 2**28 keys."""


@dataclass(frozen=True)
class Splits:
    """`min_keys` of a split and at `most` how many, powers of two both. Part of the numeric mode: others give other bits."""

    min_keys: int = 256
    most: int = 64

    def __post_init__(self) -> None:
        for name, value in (("min_keys", self.min_keys), ("most", self.most)):
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}: {value} is not a power of two")

    def split_len(self, context_len: int) -> int:
        """Keys of a split of a query that sees `context_len` keys if it has no window: the kernels' `split_len_of`."""
        length = self.min_keys
        for _ in range(DOUBLINGS):
            length = length * 2 if length * self.most < context_len else length
        return length

    def num_splits(self, context_len: int) -> int:
        return -(-context_len // self.split_len(context_len))

    def bound(self, max_context: int) -> int:
        """The most splits that any context up to `max_context` has."""
        return max(1, min(-(-max_context // self.min_keys), self.most))


SPLITS = Splits()
