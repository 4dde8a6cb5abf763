"""Six kernels from logits to token ids; sampling.py launches them, `limits` stands in sampling_filters.py.

    greedy  (row, chunk of the vocabulary)   rows that ask for nothing else: the highest logit, and no other launch
    count   (places)                         tokens that came since the last draw, into the counts of their sequences
    adjust  (row, chunk)                     mask, penalties, forbidden tokens -> adjusted logits; each chunk's best and its id
    limits  (row)                            the bounds of top-k and top-p, the sums of the softmaxes, if the row wants any
    scores  (row, chunk)                     noise for what is kept; each chunk's best and its id
    pick    (row)                            the best of the chunks'; greedy rows: of adjust's

No kernel asks the host for anything, no sum depends on an order that varies. No constant of a kernel comes from a request: each
is compiled once for a vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pdmesh.engine.kernels.triton.kernel_cache_keys import settle_keys
from pdmesh.engine.kernels.triton.sampling_numbers import best_of, exp_of, gumbel_of, highest_of, order_of, random_bits, scaled
from pdmesh.engine.kernels.triton.sampling_record import (
    CHOICE,
    COUNT_ROW,
    FORBIDDEN,
    FREQUENCY,
    GUESSED,
    INDEX,
    MASK,
    MIN_P,
    PRESENCE,
    REPETITION,
    TEMPERATURE,
    TOP_P,
    WORDS,
    float_at,
    seed_of,
)


@triton.jit
def greedy_kernel(
    logits: tl.tensor, best_values: tl.tensor, best_ids: tl.tensor, arrivals: tl.tensor, tokens: tl.tensor,
    stride_logits: tl.tensor,
    VOCAB: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Rows that ask for nothing: the last program of a row to arrive takes the best of the chunks' and leaves arrivals at 0."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < VOCAB
    value = tl.load(logits + row * stride_logits + ids, mask=inside, other=float("-inf")).to(tl.float32)
    best, best_id = best_of(value, ids, inside)
    tl.store(best_values + row * NUM_CHUNKS + chunk, best)
    tl.store(best_ids + row * NUM_CHUNKS + chunk, best_id)
    tl.debug_barrier()  # all threads have stored before one of them says so
    arrived = tl.atomic_add(arrivals + row, 1, sem="acq_rel")
    if arrived == NUM_CHUNKS - 1:
        tl.store(arrivals + row, 0)  # for the next launch
        chunks = tl.arange(0, CHUNKS)
        is_chunk = chunks < NUM_CHUNKS
        values = tl.load(best_values + row * NUM_CHUNKS + chunks, mask=is_chunk, other=float("-inf"), cache_modifier=".cg")
        id_of = tl.load(best_ids + row * NUM_CHUNKS + chunks, mask=is_chunk, other=2147483647, cache_modifier=".cg")
        _, token = best_of(values, id_of, is_chunk)
        tl.store(tokens + row, tl.where(token == 2147483647, 0, token))


@triton.jit(do_not_specialize=["first_place", "num_prompt", "num_places"])
def count_kernel(
    counts: tl.tensor, message: tl.tensor, first_place: tl.tensor, num_prompt: tl.tensor, num_places: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Places in the flat counts, the first `num_prompt` of prompts, the others of outputs. Integers: no order matters."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(message + first_place + at, mask=at < num_places, other=0)
    tl.atomic_or(counts + place, 0x40000000, mask=at < num_prompt, sem="relaxed")
    tl.atomic_add(counts + place, 1, mask=(at >= num_prompt) & (at < num_places), sem="relaxed")


@triton.jit
def adjust_kernel(
    logits: tl.tensor, adjusted: tl.tensor, best_values: tl.tensor, best_ids: tl.tensor, counts: tl.tensor, message: tl.tensor,
    stride_logits: tl.tensor,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    record = message + row * WORDS
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < VOCAB
    value = tl.load(logits + row * stride_logits + ids, mask=inside, other=float("-inf")).to(tl.float32)
    mask = tl.load(record + MASK)
    if mask >= 0:
        word = tl.load(message + mask + ids // 32, mask=inside, other=0)
        value = tl.where(((word >> (ids % 32)) & 1) == 0, float("-inf"), value)
    count_row = tl.load(record + COUNT_ROW).to(tl.int64)
    if count_row >= 0:
        seen = tl.load(counts + count_row * VOCAB + ids, mask=inside, other=0)
        place = tl.load(record + GUESSED)
        while place < tl.load(record + GUESSED + 1):
            seen += (ids == tl.load(message + place)).to(tl.int32)
            place += 1
        repetition = float_at(record, REPETITION)
        repeated = tl.where(value < 0, value * repetition, tl.div_rn(value, repetition))
        value = tl.where(seen != 0, repeated, value)
        drawn = seen & 0x3FFFFFFF
        lower = value - float_at(record, FREQUENCY) * drawn.to(tl.float32) - float_at(record, PRESENCE)
        value = tl.where(drawn != 0, lower, value)
    # At run time: how many there are is a client's to say, and a constant would be a kernel of its own for each number.
    place = tl.load(record + FORBIDDEN)
    while place < tl.load(record + FORBIDDEN + 1):
        value = tl.where(ids == tl.load(message + place), float("-inf"), value)
        place += 1
    tl.store(adjusted + row * VOCAB + ids, value, mask=inside)
    best, best_id = best_of(value, ids, inside)
    at = row * tl.num_programs(1) + chunk
    tl.store(best_values + at, best)
    tl.store(best_ids + at, best_id)


@triton.jit(do_not_specialize=["ahead"])
def scores_kernel(
    adjusted: tl.tensor, best_values: tl.tensor, score_values: tl.tensor, score_ids: tl.tensor, int_limits: tl.tensor,
    sums: tl.tensor, message: tl.tensor, ahead: tl.tensor,
    VOCAB: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    record = message + row * WORDS
    temperature = float_at(record, TEMPERATURE)
    if temperature > 0:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = scaled(adjusted + row * VOCAB, ids, highest_of(best_values, row, NUM_CHUNKS, CHUNKS), temperature, VOCAB)
        is_kept = (x > float("-inf")) & (order_of(x) >= tl.load(int_limits + row * 3))
        e = exp_of(x)
        if float_at(record, TOP_P) < 1.0:
            bits = tl.div_rn(e, tl.load(sums + row * 2)).to(tl.int32, bitcast=True)
            least = tl.load(int_limits + row * 3 + 1)
            is_kept = is_kept & ((bits > least) | ((bits == least) & (ids <= tl.load(int_limits + row * 3 + 2))))
        min_p = float_at(record, MIN_P)
        if min_p > 0.0:
            total = tl.load(sums + row * 2 + 1)
            is_kept = is_kept & (tl.div_rn(e, total) >= min_p * tl.div_rn(1.0, total))
        bits = random_bits(seed_of(record), tl.load(record + CHOICE), tl.load(record + INDEX) + ahead, ids)
        best, best_id = best_of(x + gumbel_of(bits), ids, is_kept)
        at = row * NUM_CHUNKS + chunk
        tl.store(score_values + at, best)
        tl.store(score_ids + at, best_id)


@triton.jit
def pick_kernel(
    best_values: tl.tensor, best_ids: tl.tensor, score_values: tl.tensor, score_ids: tl.tensor, message: tl.tensor,
    tokens: tl.tensor,
    NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    at = row * NUM_CHUNKS + chunks
    inside = chunks < NUM_CHUNKS
    # A branch, as the interpreter makes numbers of a scalar condition that is spread over a block.
    if float_at(message + row * WORDS, TEMPERATURE) == 0.0:
        values = tl.load(best_values + at, mask=inside, other=float("-inf"))
        ids = tl.load(best_ids + at, mask=inside, other=2147483647)
    else:
        values = tl.load(score_values + at, mask=inside, other=float("-inf"))
        ids = tl.load(score_ids + at, mask=inside, other=2147483647)
    _, token = best_of(values, ids, ids < 2147483647)
    tl.store(tokens + row, tl.where(token == 2147483647, 0, token))  # a row of NaN has no best, and must name a token


settle_keys(globals())
