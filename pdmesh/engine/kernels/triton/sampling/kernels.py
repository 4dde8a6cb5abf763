"""The six kernels from logits to token ids; sampler.py launches them.

    greedy  (row, chunk of the vocabulary)   rows that are greedy only: the highest logit, and no other launch
    count   (places)                         new tokens since the last draw, into the counts of their sequences
    adjust  (row, chunk)                     mask, bias, penalties, forbidden tokens -> adjusted logits; each chunk's best, its id
    limits  (row)                            the bounds of top-k and top-p, the sums of the softmaxes, if the row needs any
    scores  (row, chunk)                     noise for what is kept; each chunk's best and its id
    pick    (row)                            the best of the chunks'; greedy rows: of adjust's

No kernel synchronizes with the host, and no sum depends on an order that varies. No kernel constant comes from a request: each
is compiled once for a vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pdmesh.engine.kernels.triton.launching import settle_keys
from pdmesh.engine.kernels.triton.sampling.batch import (
    BIASED,
    CHOICE,
    COUNT_ROW,
    FLOOR,
    FORBIDDEN,
    GUESSED,
    INDEX,
    MASK,
    WORDS,
    float_at,
    seed_of,
    word_of,
)

# Of a row's record: what the rules below read of its parameters.
TEMPERATURE, TOP_K, TOP_P, MIN_P = word_of("temperature"), word_of("top_k"), word_of("top_p"), word_of("min_p")
REPETITION, PRESENCE = word_of("repetition_penalty"), word_of("presence_penalty")
FREQUENCY = word_of("frequency_penalty")

# Numbers inside the sampling kernels: exponential, noise, an order on floats, the best of some. Triton functions, no launchers.
#
# All are written so that compilers cannot change their bits: launches that use them set `enable_fp_fusion=False`.


@triton.jit
def exp_of(x: tl.tensor) -> tl.tensor:
    """Return e^x for float32 x <= 0, -infinity included; within one unit in the last place (the split of the argument and the
    polynomial are those of Moshier, Cephes). The GPU's own is off by 1e-6 of the value where x is -20."""
    near = tl.maximum(x, -104.0)  # e^-104 is 0 in float32
    n = tl.floor(near * 1.4426950408889634 + 0.5)
    r = near - n * 0.693359375
    r = r - n * -2.12194440e-4
    y = ((((1.9875691500e-4 * r + 1.3981999507e-3) * r + 8.3334519073e-3) * r + 4.1665795894e-2) * r + 1.6666665459e-1) * r + 0.5
    y = y * (r * r) + r + 1.0
    exponent = n.to(tl.int32)
    half = exponent >> 1  # in two steps, because 2^exponent may be too small for a normal number
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)
    second = ((exponent - half + 127) << 23).to(tl.float32, bitcast=True)
    return y * first * second


@triton.jit
def order_of(x: tl.tensor) -> tl.tensor:
    """Return int64 in [0, 2^32) that is ordered like float32 x; -0 and 0 alike."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def mix(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def random_bits(seed: tl.tensor, choice: tl.tensor, index: tl.tensor, token_ids: tl.tensor) -> tl.tensor:
    """Return random_bits of pdmesh/engine/sampling/counter_rng.py: seed, choice, index scalars, token_ids int32 -> uint64 in
    [0, 2^32)."""
    key = mix(seed.to(tl.uint64))
    key = mix(key + (choice.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    key = mix(key + (index.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    second = mix(key ^ 0xD1B54A32D192ED03)
    x = (token_ids.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    return mix(mix(x + key) ^ second) >> 32


@triton.jit
def gumbel_of(bits: tl.tensor) -> tl.tensor:
    """Return gumbel of pdmesh/engine/sampling/counter_rng.py for random bits, float32. Both logarithms are taken in float64 and
    rounded, so that they are right to half a unit; float32's on the GPU are useless near 1, where the largest noise comes
    from."""
    v = ((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10).to(tl.float64)
    rest = 1.0 - v
    # log1p(-v) = log(rest) * -v / (1 - rest): this restores what the subtraction rounded away (Kahan).
    lost = tl.where(rest == 1.0, 1.0, v / tl.where(rest == 1.0, 1.0, 1.0 - rest))
    exponential = tl.where(rest == 1.0, v, -tl.log(rest) * lost).to(tl.float32)
    return -tl.log(exponential.to(tl.float64)).to(tl.float32)


@triton.jit
def best_of(values: tl.tensor, ids: tl.tensor, is_candidate: tl.tensor) -> tl.tensor:
    """Return the highest value among candidates and its lowest id; 2^31 - 1 without candidates."""
    best = tl.max(tl.where(is_candidate, values, float("-inf")), axis=0)
    return best, tl.min(tl.where(is_candidate & (values == best), ids, 2147483647), axis=0)


@triton.jit
def best_sound(values: tl.tensor, raw: tl.tensor, ids: tl.tensor, is_candidate: tl.tensor) -> tl.tensor:
    """Return `best_of` the values; where a raw logit is NaN or infinity, infinity and NO_TOKEN, which then win the whole row."""
    best, best_id = best_of(values, ids, is_candidate)
    num_bad = tl.sum((is_candidate & ((raw != raw) | (raw == float("inf")))).to(tl.int32), axis=0)
    return tl.where(num_bad > 0, float("inf"), best), tl.where(num_bad > 0, -1, best_id)


@triton.jit
def scaled(adjusted: tl.tensor, ids: tl.tensor, highest: tl.tensor, temperature: tl.tensor, VOCAB: tl.constexpr) -> tl.tensor:
    """Return logits with the highest at 0, divided by the temperature; -infinity outside the vocabulary."""
    value = tl.load(adjusted + ids, mask=ids < VOCAB, other=float("-inf")) - highest
    return tl.div_rn(value, temperature)


@triton.jit
def highest_of(best_values: tl.tensor, row: tl.tensor, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr) -> tl.tensor:
    chunks = tl.arange(0, CHUNKS)
    return tl.max(tl.load(best_values + row * NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=float("-inf")), axis=0)


settle_keys(globals())


@triton.jit
def greedy_kernel(
    logits: tl.tensor, best_values: tl.tensor, best_ids: tl.tensor, arrivals: tl.tensor, tokens: tl.tensor,
    stride_logits: tl.tensor,
    VOCAB: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Greedy rows: the last program of a row to arrive takes the best of the chunks and leaves arrivals at 0."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < VOCAB
    value = tl.load(logits + row * stride_logits + ids, mask=inside, other=float("-inf")).to(tl.float32)
    best, best_id = best_sound(value, value, ids, inside)
    tl.store(best_values + row * NUM_CHUNKS + chunk, best)
    tl.store(best_ids + row * NUM_CHUNKS + chunk, best_id)
    tl.debug_barrier()  # all threads have stored before one of them reports it
    arrived = tl.atomic_add(arrivals + row, 1, sem="acq_rel")
    if arrived == NUM_CHUNKS - 1:
        tl.store(arrivals + row, 0)  # reset for the next launch
        chunks = tl.arange(0, CHUNKS)
        is_chunk = chunks < NUM_CHUNKS
        values = tl.load(best_values + row * NUM_CHUNKS + chunks, mask=is_chunk, other=float("-inf"), cache_modifier=".cg")
        id_of = tl.load(best_ids + row * NUM_CHUNKS + chunks, mask=is_chunk, other=2147483647, cache_modifier=".cg")
        highest, token = best_of(values, id_of, is_chunk)
        tl.store(tokens + row, tl.where(highest > float("-inf"), token, -1))


@triton.jit(do_not_specialize=["first_place", "num_prompt", "num_places"])
def count_kernel(
    counts: tl.tensor, message: tl.tensor, first_place: tl.tensor, num_prompt: tl.tensor, num_places: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Count places in the flat counts, the first `num_prompt` of prompts, the others of outputs. Integers: no order matters."""
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
    raw = value
    mask = tl.load(record + MASK)
    if mask >= 0:
        word = tl.load(message + mask + ids // 32, mask=inside, other=0)
        value = tl.where(((word >> (ids % 32)) & 1) == 0, float("-inf"), value)
    # At run time: the client chooses how many there are, and a constant would be a kernel of its own for each number.
    place = tl.load(record + BIASED)
    while place < tl.load(record + BIASED + 1):
        bias = tl.load(message + place + 1).to(tl.float32, bitcast=True)
        value = tl.where(ids == tl.load(message + place), value + bias, value)
        place += 2
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
    place = tl.load(record + FORBIDDEN)
    while place < tl.load(record + FORBIDDEN + 1):
        value = tl.where(ids == tl.load(message + place), float("-inf"), value)
        place += 1
    tl.store(adjusted + row * VOCAB + ids, value, mask=inside)
    best, best_id = best_sound(value, raw, ids, inside)
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
    # A branch, because the interpreter turns a scalar condition that is broadcast over a block into numbers.
    if float_at(message + row * WORDS, TEMPERATURE) == 0.0:
        values = tl.load(best_values + at, mask=inside, other=float("-inf"))
        ids = tl.load(best_ids + at, mask=inside, other=2147483647)
    else:
        values = tl.load(score_values + at, mask=inside, other=float("-inf"))
        ids = tl.load(score_ids + at, mask=inside, other=2147483647)
    _, token = best_of(values, ids, ids < 2147483647)
    # Infinity, of the logits or of a penalty, gives no token; where no token is allowed, it is some id.
    highest = tl.max(tl.load(best_values + at, mask=inside, other=float("-inf")), axis=0)
    token = tl.where(token == 2147483647, 0, token)
    tl.store(tokens + row, tl.where(highest == float("inf"), -1, token))


settle_keys(globals())


# The bounds of top-k and top-p, by one program a row: the only kernel that is not spread over the row
#
# Top-k is a radix selection, 4 passes of 8 bits over the row, from the L2 cache. Top-p first packs tokens that can be in the set
# (see pdmesh.engine.sampling.sampler.keep_top_p: probability at least (1 - p) / V; rarely more than a few thousand tokens) and
# bisects the bits of a probability over the packed ones. No sum depends on an order that varies.


@triton.jit
def _kth(
    adjusted: tl.tensor, highest: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, VOCAB: tl.constexpr, CHUNK: tl.constexpr
) -> tl.tensor:
    """Return order_of the k-th highest scaled logit: its four bytes from the highest, each by a histogram of those that agree so
    far."""
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
    """Return the sum of exponentials that top-k keeps, added in float64 and rounded to float32."""
    total = tl.zeros([], tl.float64)
    for start in range(0, VOCAB, CHUNK):
        x = scaled(adjusted, start + tl.arange(0, CHUNK), highest, temperature, VOCAB)
        total += tl.sum(tl.where(order_of(x) >= kth, exp_of(x), 0.0).to(tl.float64), axis=0)
    return total.to(tl.float32)


@triton.jit
def _mass_above(packed: tl.tensor, count: tl.tensor, bits: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """Return the sum, in float64, of packed probabilities whose bits are higher."""
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
    """Return the highest id of the set among equals of its least likely token: as keep_top_p counts, the mass up to and with a
    token, rounded to float32, less its own is below p. -1: none of them."""
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
    """Write int_limits [R, 3] int64: order_of the k-th; bits of the least probability kept; of its equals, the highest id kept.
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
            # The least bits above which there is less mass than p: those of a token's probability, or the floor's; a little more
            # than p, because the deciding comparison, _last_tie's, rounds.
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
