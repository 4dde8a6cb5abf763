"""Where top-k and top-p end, by one program a row: the one kernel of sampling_kernels.py's that is not spread over the row.

Top-k is a radix selection, 4 passes of 8 bits over the row, from the L2 cache. Top-p first packs what can be in the set (see
engine/logits.keep_top_p: probability at least (1 - p) / V; rarely more than a few thousand tokens) and bisects the bits of a
probability over the packed ones. No sum depends on an order that varies.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pdmesh.engine.kernels.triton.kernel_cache_keys import settle_keys
from pdmesh.engine.kernels.triton.sampling_numbers import exp_of, highest_of, order_of, scaled
from pdmesh.engine.kernels.triton.sampling_record import FLOOR, MIN_P, TEMPERATURE, TOP_K, TOP_P, WORDS, float_at


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
            order = order_of(scaled(adjusted, ids, highest, temperature, VOCAB))
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
        x = scaled(adjusted, start + tl.arange(0, CHUNK), highest, temperature, VOCAB)
        total += tl.sum(tl.where(order_of(x) >= kth, exp_of(x), 0.0).to(tl.float64), axis=0)
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
    message: tl.tensor,
    VOCAB: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """int_limits [R, 3] int64: order_of the k-th; bits of the least probability kept; of its equals, the highest id kept.
    sums [R, 2] float32: of the exponentials that top-k keeps, and that top-p keeps."""
    row = tl.program_id(0).to(tl.int64)
    record = message + row * WORDS
    temperature = float_at(record, TEMPERATURE)
    if temperature > 0:
        adjusted += row * VOCAB
        packed += row * VOCAB
        packed_ids += row * VOCAB
        highest = highest_of(best_values, row, NUM_CHUNKS, CHUNKS)
        top_k = tl.load(record + TOP_K)
        top_p = float_at(record, TOP_P)
        kth = tl.zeros([], tl.int64)
        if (top_k > 0) & (top_k < VOCAB):
            kth = _kth(adjusted, highest, temperature, top_k, VOCAB, CHUNK)
        sum_k = tl.full([], 1.0, tl.float32)
        if (top_p < 1.0) | (float_at(record, MIN_P) > 0.0):
            sum_k = _softmax_sum(adjusted, highest, temperature, kth, VOCAB, CHUNK)
        sum_p = sum_k
        least = tl.zeros([], tl.int32)
        last = tl.full([], 2147483647, tl.int32)
        if top_p < 1.0:
            likeliest = tl.div_rn(1.0, sum_k)
            floor = tl.minimum(float_at(record, FLOOR), likeliest)
            count = tl.zeros([], tl.int32)
            for start in range(0, VOCAB, CHUNK):
                ids = start + tl.arange(0, CHUNK)
                x = scaled(adjusted, ids, highest, temperature, VOCAB)
                e = exp_of(x)
                p = tl.div_rn(e, sum_k)
                is_candidate = (ids < VOCAB) & (order_of(x) >= kth) & (p >= floor)
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
                x = scaled(adjusted, ids, highest, temperature, VOCAB)
                e = exp_of(x)
                bits = tl.div_rn(e, sum_k).to(tl.int32, bitcast=True)
                is_kept = (order_of(x) >= kth) & ((bits > least) | ((bits == least) & (ids <= last)))
                total += tl.sum(tl.where(is_kept, e, 0.0).to(tl.float64), axis=0)
            sum_p = total.to(tl.float32)
        tl.store(int_limits + row * 3, kth)
        tl.store(int_limits + row * 3 + 1, least.to(tl.int64))
        tl.store(int_limits + row * 3 + 2, last.to(tl.int64))
        tl.store(sums + row * 2, sum_k)
        tl.store(sums + row * 2 + 1, sum_p)


settle_keys(globals())
