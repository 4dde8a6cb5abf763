"""A row's record: what kernels are told of a row of logits, in words of 32 bits of a step's message (sampling_batch.py).

All records begin a message, one after the other. Kernels get the message's address alone and find a row's record themselves: an
address for each field would be aligned or not by the number of rows, and the compiler would be called for each of the two.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray

from pdmesh.engine.kernels.triton.kernel_cache_keys import settle_keys
from pdmesh.engine.sampling_params import SamplingParams

# Kernels see a module's constants as constexpr only.
TEMPERATURE = tl.constexpr(0)  # float32, as the six behind it
TOP_P = tl.constexpr(1)
FLOOR = tl.constexpr(2)  # probabilities below it are not in top-p's set, see engine/logits.keep_top_p
MIN_P = tl.constexpr(3)
REPETITION = tl.constexpr(4)
PRESENCE = tl.constexpr(5)
FREQUENCY = tl.constexpr(6)
TOP_K = tl.constexpr(7)  # 0: all
SEED = tl.constexpr(8)  # two words, the lower first
CHOICE = tl.constexpr(10)
INDEX = tl.constexpr(11)  # in the choice's output
COUNT_ROW = tl.constexpr(12)  # of the counts, -1: none
MASK = tl.constexpr(13)  # where in the message the words of its mask begin, -1: none
FORBIDDEN = tl.constexpr(14)  # where in the message its forbidden tokens begin; the next word: where they end
GUESSED = tl.constexpr(16)  # the same of drafted tokens before this one, which no count holds
WORDS = tl.constexpr(18)

Ints = NDArray[np.int32]


@triton.jit
def float_at(record: tl.tensor, FIELD: tl.constexpr) -> tl.tensor:
    return tl.load(record + FIELD).to(tl.float32, bitcast=True)


@triton.jit
def seed_of(record: tl.tensor) -> tl.tensor:
    low = tl.load(record + SEED).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(record + SEED + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    return (high << 32) | low


def column(field: tl.constexpr) -> int:
    """A field's place, on the host."""
    return int(field.value)


def packed(params: SamplingParams, vocab_size: int) -> Ints:
    """[WORDS], without what changes from token to token."""
    record = np.zeros(column(WORDS), np.int32)
    record[: column(TOP_K)] = np.array(
        [
            params.temperature,
            params.top_p,
            (1.0 - params.top_p) / vocab_size,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        ]
    ).astype(np.float32).view(np.int32)  # fmt: skip
    record[column(TOP_K)] = min(params.top_k, vocab_size)
    record[column(SEED) : column(SEED) + 2] = np.array([params.seed], "<u8").view("<i4")
    record[[column(COUNT_ROW), column(MASK)]] = -1
    return record


settle_keys(globals())
