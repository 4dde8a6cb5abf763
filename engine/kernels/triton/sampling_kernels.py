"""Four kernels from logits to token ids; sampling.py launches them.

    adjust  (row, chunk of the vocabulary)   mask, penalties, forbidden tokens -> adjusted logits; each chunk's best and its id
    limits  (row)                            the bounds of top-k and top-p, the sums of the softmaxes. Rows that want none: a sum
    scores  (row, chunk)                     noise for what is kept; each chunk's best and its id
    pick    (row)                            the best of the chunks'; greedy rows: of adjust's

Only `limits` is one program a row. Top-k is a radix selection, 4 passes of 8 bits over the row, from the L2 cache. Top-p first
packs what can be in the set (see engine/logits.keep_top_p: probability at least (1 - p) / V; rarely more than a few thousand
tokens) and bisects the bits of a probability over the packed ones. No kernel asks the host for anything, no sum depends on an
order that varies.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.sampling_numbers import exp_of, gumbel_of, order_of, random_bits


@triton.jit
def _best(values: tl.tensor, ids: tl.tensor, is_candidate: tl.tensor) -> tl.tensor:
    """The highest value among candidates and its lowest id; 2^31 - 1 without candidates."""
    best = tl.max(tl.where(is_candidate, values, float("-inf")), axis=0)
    return best, tl.min(tl.where(is_candidate & (values == best), ids, 2147483647), axis=0)


@triton.jit
def adjust_kernel(
    logits: tl.tensor, adjusted: tl.tensor, best_values: tl.tensor, best_ids: tl.tensor, counts: tl.tensor, count_rows:
    tl.tensor, masks: tl.tensor, mask_rows: tl.tensor,
    forbidden: tl.tensor, repetitions: tl.tensor, presences: tl.tensor, frequencies: tl.tensor, stride_logits: tl.tensor,
    mask_words: tl.tensor,
    VOCAB: tl.constexpr, NUM_FORBIDDEN: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < VOCAB
    value = tl.load(logits + row * stride_logits + ids, mask=inside, other=float("-inf")).to(tl.float32)
    mask_row = tl.load(mask_rows + row).to(tl.int64)
    if mask_row >= 0:
        word = tl.load(masks + mask_row * mask_words + ids // 32, mask=inside, other=0)
        value = tl.where(((word >> (ids % 32)) & 1) == 0, float("-inf"), value)
    count_row = tl.load(count_rows + row).to(tl.int64)
    if count_row >= 0:
        seen = tl.load(counts + count_row * VOCAB + ids, mask=inside, other=0)
        repetition = tl.load(repetitions + row)
        repeated = tl.where(value < 0, value * repetition, tl.div_rn(value, repetition))
        value = tl.where(seen != 0, repeated, value)
        drawn = seen & 0x3FFFFFFF
        lower = value - tl.load(frequencies + row) * drawn.to(tl.float32) - tl.load(presences + row)
        value = tl.where(drawn != 0, lower, value)
    for place in tl.static_range(NUM_FORBIDDEN):
        value = tl.where(ids == tl.load(forbidden + row * NUM_FORBIDDEN + place), float("-inf"), value)
    tl.store(adjusted + row * VOCAB + ids, value, mask=inside)
    best, best_id = _best(value, ids, inside)
    at = row * tl.num_programs(1) + chunk
    tl.store(best_values + at, best)
    tl.store(best_ids + at, best_id)


@triton.jit
def _scaled(adjusted: tl.tensor, ids: tl.tensor, highest: tl.tensor, temperature: tl.tensor, VOCAB: tl.constexpr) -> tl.tensor:
    """Logits as the highest 0 and divided by the temperature; -infinity outside the vocabulary."""
    value = tl.load(adjusted + ids, mask=ids < VOCAB, other=float("-inf")) - highest
    return tl.div_rn(value, temperature)


@triton.jit
def _highest(best_values: tl.tensor, row: tl.tensor, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr) -> tl.tensor:
    chunks = tl.arange(0, CHUNKS)
    return tl.max(tl.load(best_values + row * NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=float("-inf")), axis=0)


@triton.jit
def _kth(
    adjusted: tl.tensor, highest: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, VOCAB: tl.constexpr, CHUNK: tl.constexpr
) -> tl.tensor:
    """order_of the k-th highest scaled logit: its four bytes from the highest, each by a histogram of those that agree so far."""
    found = tl.zeros([], tl.int64)
    wanted = top_k
    digits = tl.arange(0, 256)
    for byte in tl.static_range(4):
        histogram = tl.zeros([256], tl.int32)
        for start in range(0, VOCAB, CHUNK):
            ids = start + tl.arange(0, CHUNK)
            order = order_of(_scaled(adjusted, ids, highest, temperature, VOCAB))
            agrees = (ids < VOCAB) & ((order >> (32 - 8 * byte)) == found)
            histogram += tl.histogram(((order >> (24 - 8 * byte)) & 255).to(tl.int32), 256, mask=agrees)
        not_below = tl.sum(histogram, axis=0) - tl.cumsum(histogram, axis=0) + histogram
        digit = tl.max(tl.where(not_below >= wanted, digits, 0), axis=0)
        wanted -= tl.sum(tl.where(digits > digit, histogram, 0), axis=0)
        found = found * 256 + digit
    return found


@triton.jit
def _softmax_sum(
    adjusted: tl.tensor, highest: tl.tensor, temperature: tl.tensor, kth: tl.tensor, VOCAB: tl.constexpr, CHUNK: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Of what top-k keeps: the sum of exponentials, added in float64 and rounded to float32."""
    total = tl.zeros([], tl.float64)
    for start in range(0, VOCAB, CHUNK):
        scaled = _scaled(adjusted, start + tl.arange(0, CHUNK), highest, temperature, VOCAB)
        total += tl.sum(tl.where(order_of(scaled) >= kth, exp_of(scaled), 0.0).to(tl.float64), axis=0)
    return total.to(tl.float32)


@triton.jit
def _mass_above(packed: tl.tensor, count: tl.tensor, bits: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """The sum, in float64, of packed probabilities whose bits are higher."""
    total = tl.zeros([], tl.float64)
    start = tl.zeros([], tl.int32)
    while start < count:
        at = start + tl.arange(0, CHUNK)
        p = tl.load(packed + at, mask=at < count, other=0.0)
        total += tl.sum(tl.where(p.to(tl.int32, bitcast=True) > bits, p, 0.0).to(tl.float64), axis=0)
        start += CHUNK
    return total


@triton.jit
def _last_tie(
    packed: tl.tensor,
    packed_ids: tl.tensor,
    count: tl.tensor,
    bits: tl.tensor,
    before: tl.tensor,
    top_p: tl.tensor,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """Among equals of the least likely that are in the set, the highest id that still is: as engine/logits counts, the mass up to
    and with a token, rounded to float32, less its own is below p. -1: none of them."""
    last = tl.full([], -1, tl.int32)
    rank = tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int32)
    while start < count:
        at = start + tl.arange(0, CHUNK)
        p = tl.load(packed + at, mask=at < count, other=0.0)
        is_equal = (p.to(tl.int32, bitcast=True) == bits) & (at < count)
        mass = before + (rank + tl.cumsum(is_equal.to(tl.int32), axis=0)).to(tl.float64) * p.to(tl.float64)
        is_kept = is_equal & ((mass.to(tl.float32) - p) < top_p)
        ids = tl.load(packed_ids + at, mask=at < count, other=-1)
        last = tl.maximum(last, tl.max(tl.where(is_kept, ids, -1), axis=0))
        rank += tl.sum(is_equal.to(tl.int32), axis=0)
        start += CHUNK
    return last


@triton.jit
def limits_kernel(
    adjusted: tl.tensor, best_values: tl.tensor, packed: tl.tensor, packed_ids: tl.tensor, int_limits: tl.tensor, sums: tl.tensor,
    temperatures: tl.tensor, top_ks: tl.tensor, top_ps: tl.tensor, floors: tl.tensor, min_ps: tl.tensor,
    VOCAB: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """int_limits [R, 3] int64: order_of the k-th; bits of the least probability kept; of its equals, the highest id kept.
    sums [R, 2] float32: of the exponentials that top-k keeps, and that top-p keeps."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        adjusted += row * VOCAB
        packed += row * VOCAB
        packed_ids += row * VOCAB
        highest = _highest(best_values, row, NUM_CHUNKS, CHUNKS)
        top_k = tl.load(top_ks + row)
        top_p = tl.load(top_ps + row)
        kth = tl.zeros([], tl.int64)
        if (top_k > 0) & (top_k < VOCAB):
            kth = _kth(adjusted, highest, temperature, top_k, VOCAB, CHUNK)
        sum_k = tl.full([], 1.0, tl.float32)
        if (top_p < 1.0) | (tl.load(min_ps + row) > 0.0):
            sum_k = _softmax_sum(adjusted, highest, temperature, kth, VOCAB, CHUNK)
        sum_p = sum_k
        least = tl.zeros([], tl.int32)
        last = tl.full([], 2147483647, tl.int32)
        if top_p < 1.0:
            likeliest = tl.div_rn(1.0, sum_k)
            floor = tl.minimum(tl.load(floors + row), likeliest)
            count = tl.zeros([], tl.int32)
            for start in range(0, VOCAB, CHUNK):
                ids = start + tl.arange(0, CHUNK)
                scaled = _scaled(adjusted, ids, highest, temperature, VOCAB)
                e = exp_of(scaled)
                p = tl.div_rn(e, sum_k)
                is_candidate = (ids < VOCAB) & (order_of(scaled) >= kth) & (p >= floor)
                at = count + tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
                tl.store(packed + at, p, mask=is_candidate)
                tl.store(packed_ids + at, ids, mask=is_candidate)
                count += tl.sum(is_candidate.to(tl.int32), axis=0)
            tl.debug_barrier()  # other threads read what these stored
            # The least bits above which there is less mass than p: those of a token's probability, or the floor's. A little more
            # than p, because the comparison that counts, _last_tie's, rounds.
            least = floor.to(tl.int32, bitcast=True)
            high = likeliest.to(tl.int32, bitcast=True)
            enough = top_p.to(tl.float64) + 2.384185791015625e-7
            while least < high:
                middle = least + (high - least) // 2
                if _mass_above(packed, count, middle, CHUNK) < enough:
                    high = middle
                else:
                    least = middle + 1
            before = _mass_above(packed, count, least, CHUNK)
            last = _last_tie(packed, packed_ids, count, least, before, top_p, CHUNK)
            total = tl.zeros([], tl.float64)
            for start in range(0, VOCAB, CHUNK):
                ids = start + tl.arange(0, CHUNK)
                scaled = _scaled(adjusted, ids, highest, temperature, VOCAB)
                e = exp_of(scaled)
                bits = tl.div_rn(e, sum_k).to(tl.int32, bitcast=True)
                is_kept = (order_of(scaled) >= kth) & ((bits > least) | ((bits == least) & (ids <= last)))
                total += tl.sum(tl.where(is_kept, e, 0.0).to(tl.float64), axis=0)
            sum_p = total.to(tl.float32)
        tl.store(int_limits + row * 3, kth)
        tl.store(int_limits + row * 3 + 1, least.to(tl.int64))
        tl.store(int_limits + row * 3 + 2, last.to(tl.int64))
        tl.store(sums + row * 2, sum_k)
        tl.store(sums + row * 2 + 1, sum_p)


@triton.jit
def scores_kernel(
    adjusted: tl.tensor, best_values: tl.tensor, score_values: tl.tensor, score_ids: tl.tensor, int_limits: tl.tensor, sums:
    tl.tensor,
    temperatures: tl.tensor, top_ps: tl.tensor, min_ps: tl.tensor, seeds: tl.tensor, choices: tl.tensor, indices: tl.tensor,
    VOCAB: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        scaled = _scaled(adjusted + row * VOCAB, ids, _highest(best_values, row, NUM_CHUNKS, CHUNKS), temperature, VOCAB)
        is_kept = (scaled > float("-inf")) & (order_of(scaled) >= tl.load(int_limits + row * 3))
        e = exp_of(scaled)
        if tl.load(top_ps + row) < 1.0:
            bits = tl.div_rn(e, tl.load(sums + row * 2)).to(tl.int32, bitcast=True)
            least = tl.load(int_limits + row * 3 + 1)
            is_kept = is_kept & ((bits > least) | ((bits == least) & (ids <= tl.load(int_limits + row * 3 + 2))))
        min_p = tl.load(min_ps + row)
        if min_p > 0.0:
            total = tl.load(sums + row * 2 + 1)
            is_kept = is_kept & (tl.div_rn(e, total) >= min_p * tl.div_rn(1.0, total))
        bits = random_bits(tl.load(seeds + row), tl.load(choices + row), tl.load(indices + row), ids)
        best, best_id = _best(scaled + gumbel_of(bits), ids, is_kept)
        at = row * NUM_CHUNKS + chunk
        tl.store(score_values + at, best)
        tl.store(score_ids + at, best_id)


@triton.jit
def pick_kernel(
    best_values: tl.tensor, best_ids: tl.tensor, score_values: tl.tensor, score_ids: tl.tensor, temperatures: tl.tensor, tokens:
    tl.tensor,
    NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    at = row * NUM_CHUNKS + chunks
    inside = chunks < NUM_CHUNKS
    # A branch, as the interpreter makes numbers of a scalar condition that is spread over a block.
    if tl.load(temperatures + row) == 0.0:
        values = tl.load(best_values + at, mask=inside, other=float("-inf"))
        ids = tl.load(best_ids + at, mask=inside, other=2147483647)
    else:
        values = tl.load(score_values + at, mask=inside, other=float("-inf"))
        ids = tl.load(score_ids + at, mask=inside, other=2147483647)
    _, token = _best(values, ids, ids < 2147483647)
    tl.store(tokens + row, token)
