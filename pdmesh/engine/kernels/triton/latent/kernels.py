# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The kernels of latent attention: a token's query and latent to where they belong, and attention over latents.

    a token's latent      | normalized: RANK | rotated key: ROPE |        the pool holds | HALF | HALF |, as keys and as values
    a tile of keys        | A | B: the rest of the half | A | B |         powers of two, as tiles have; 288 = 256 + 32
    its values            | A | B                       | A: up to RANK   a key is read once, for scores and for values

Rows, splits and folds are those of attention_kernels.py, of one key/value head that all query heads share. Both ways to attend
are one function with the same operations in the same order for a row: PARTED, a program has some splits of the keys, whose parts
merge_kernel folds; otherwise it has all, and folds as it goes.
"""

import triton
import triton.language as tl

from pdmesh.engine.kernels.triton.attention_kernels import LOWEST, _fold, _rows, _sequence_of, _slots, split_len_of
from pdmesh.engine.kernels.triton.kv import _product, _store
from pdmesh.engine.kernels.triton.launching import settle_keys


@triton.jit
def _turned(start, columns, inside, cos, sin, position, ROTARY: tl.constexpr, dtype: tl.constexpr):
    """Return numbers of a row, of which the first ROTARY are rotated, each result rounded where torch's code rounds it."""
    x = tl.load(start + columns, mask=inside, other=0.0)
    turned = inside & (columns < ROTARY)
    other = tl.where(columns < ROTARY // 2, columns + ROTARY // 2, columns - ROTARY // 2)
    swapped = tl.load(start + other, mask=turned, other=0.0)
    c = tl.load(cos + position * ROTARY + columns, mask=turned, other=0.0)
    s = tl.load(sin + position * ROTARY + columns, mask=turned, other=0.0)
    both = _product(x, c, dtype).to(tl.float32) + _product(swapped, s, dtype).to(tl.float32)
    return tl.where(turned, both.to(dtype), x)


@triton.jit
def latent_store_kernel(
    queries, latents, keys_in, cos, sin, positions, slots, query, first, second, scales,
    queries_stride, latents_stride, keys_stride, query_token_stride, query_head_stride, slot_stride,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, ROTARY: tl.constexpr,
    ROPE_PAD: tl.constexpr, WIDTH_PAD: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Program (token, head): the rotated part of a query head, to `query` behind RANK; behind the heads the token's latent
    [RANK], normalized already, and its key [ROPE], rotated here, to the halves of its slot."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype = queries.dtype.element_ty
    position = tl.load(positions + token).to(tl.int64)
    if head < HEADS:
        columns = tl.arange(0, ROPE_PAD)
        start = queries + token * queries_stride + head * (NOPE + ROPE) + NOPE
        x = _turned(start, columns, columns < ROPE, cos, sin, position, ROTARY, dtype)
        target = query + token * query_token_stride + head * query_head_stride + RANK
        tl.store(target + columns, x, mask=columns < ROPE)
    else:
        slot = tl.load(slots + token)
        at = tl.arange(0, WIDTH_PAD)
        behind = (at >= RANK) & (at < 2 * HALF)
        latent = tl.load(latents + token * latents_stride + at, mask=at < RANK, other=0.0)
        key = _turned(keys_in + token * keys_stride, at - RANK, behind, cos, sin, position, ROTARY, dtype)
        stored = tl.where(behind, key, latent)
        place = slot.to(tl.int64) * slot_stride + at
        _store(first + place, stored, scales, 0, (slot >= 0) & (at < HALF), HAS_SCALES)
        _store(second + place - HALF, stored, scales, 1, (slot >= 0) & (at >= HALF) & (at < 2 * HALF), HAS_SCALES)


@triton.jit
def _piece(half, offsets, columns, inside, end, scales, index, dtype: tl.constexpr, HAS_SCALES: tl.constexpr):
    """Return columns of one half of a tile of latents."""
    x = tl.load(half + offsets + columns[None, :], mask=inside[:, None] & (columns < end)[None, :], other=0.0)
    if HAS_SCALES:
        piece = (x.to(tl.float32) * tl.load(scales + index)).to(dtype)
    else:
        piece = x
    return piece


@triton.jit
def _attend_latents(
    qa, qb, qc, qd, start, end, horizon, num_keys, scale, first, second, scales, slot_stride, table, tails, tail_first,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, HALF: tl.constexpr, A: tl.constexpr,
    B: tl.constexpr, HAS_TAILS: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Return maximum, sum and weighted values of the keys from `start` (a multiple of BLOCK_N) to `end`, of which a row sees
    those up to its `horizon`; see `_attend_tiles`."""
    a, b = tl.arange(0, A), A + tl.arange(0, B)
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc_a, acc_b = tl.zeros([BLOCK_M, A], tl.float32), tl.zeros([BLOCK_M, B], tl.float32)
    acc_c = tl.zeros([BLOCK_M, A], tl.float32)
    for tile in range(start, end, BLOCK_N):
        at = tile + tl.arange(0, BLOCK_N)
        inside = at < num_keys
        slots = _slots(at, inside, table, tails, tail_first, BLOCK_SIZE, HAS_TAILS)
        offsets = slots.to(tl.int64)[:, None] * slot_stride
        ka = _piece(first, offsets, a, inside, HALF, scales, 0, qa.dtype, HAS_SCALES)
        kb = _piece(first, offsets, b, inside, HALF, scales, 0, qa.dtype, HAS_SCALES)
        kc = _piece(second, offsets, a, inside, HALF, scales, 1, qa.dtype, HAS_SCALES)
        kd = _piece(second, offsets, b, inside, HALF, scales, 1, qa.dtype, HAS_SCALES)
        scores = tl.dot(qa, tl.trans(ka), input_precision="ieee")
        scores = tl.dot(qb, tl.trans(kb), scores, input_precision="ieee")
        scores = tl.dot(qc, tl.trans(kc), scores, input_precision="ieee")
        scores = tl.dot(qd, tl.trans(kd), scores, input_precision="ieee")
        scores = tl.where(at[None, :] <= horizon[:, None], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        weights = tl.exp2(tl.fma(scores, scale, -new_peak[:, None]))
        decay = tl.exp2(peak - new_peak)
        total = tl.fma(total, decay, tl.sum(weights, 1))
        own = weights.to(qa.dtype)
        acc_a = tl.dot(own, ka, acc_a * decay[:, None], input_precision="ieee")
        acc_b = tl.dot(own, kb, acc_b * decay[:, None], input_precision="ieee")
        acc_c = tl.dot(own, kc, acc_c * decay[:, None], input_precision="ieee")
        peak = new_peak
    return peak, total, acc_a, acc_b, acc_c


@triton.jit
def _keep(target, offsets, x, columns, end, wanted):
    """Store columns [BLOCK_M, ...] of the rows that are wanted."""
    tl.store(
        target + offsets[:, None] + columns[None, :],
        x.to(target.dtype.element_ty),
        mask=wanted[:, None] & (columns < end)[None, :],
    )


@triton.jit
def _clear(out, start, num_rows, token_stride, head_stride, HEADS: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr):
    """Store zeros in a sequence's rows of queries and heads."""
    for row in range(num_rows):
        place = out + (start + row // HEADS).to(tl.int64) * token_stride + row % HEADS * head_stride
        for first in range(0, RANK, COLUMNS):
            columns = first + tl.arange(0, COLUMNS)
            tl.store(place + columns, tl.zeros([COLUMNS], out.dtype.element_ty), mask=columns < RANK)


@triton.jit(do_not_specialize=["table_stride", "tail_stride", "num_parts", "num_seqs", "max_queries", "num_programs"])
def latent_kernel(
    query, first, second, scales, out, part_acc, part_stats,
    query_starts, tile_starts, context_lens, block_tables, tail_firsts, tail_slots,
    query_token_stride, query_head_stride, out_token_stride, out_head_stride, slot_stride, table_stride, tail_stride,
    num_parts, scale, num_seqs, max_queries, num_programs,
    MIN_KEYS: tl.constexpr, MOST: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HALF: tl.constexpr, RANK: tl.constexpr, A: tl.constexpr, B: tl.constexpr, PARTED: tl.constexpr,
    HAS_TAILS: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, z): of sequences with at most `max_queries` queries splits z, z + num_programs, ... if PARTED;
    otherwise of those with more, all splits in order. `tile_starts`: of the queries that are counted in tiles. Padding gets
    zeros."""
    sequence = _sequence_of(tl.program_id(0), tile_starts, num_seqs, HEADS, BLOCK_M)
    start = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - start
    context = tl.load(context_lens + sequence)
    tile = tl.program_id(0) - (tl.load(tile_starts + sequence) * HEADS // BLOCK_M + sequence)
    is_other = num_queries > max_queries
    if not PARTED:
        is_other = num_queries <= max_queries
    if context == 0:
        if (tile == 0) & (tl.program_id(1) == 0):
            _clear(out, start, num_queries * HEADS, out_token_stride, out_head_stride, HEADS, RANK, A)
        return
    if is_other | (tile * BLOCK_M >= num_queries * HEADS):
        return
    index, head, alive, position, _ = _rows(tile, num_queries, context, 0, 0, HEADS, BLOCK_M, False)
    a, b = tl.arange(0, A), A + tl.arange(0, B)
    token = (start + index).to(tl.int64)
    row = query + (token * query_token_stride + head * query_head_stride)[:, None]
    seen_a, seen_b = alive[:, None] & (a < HALF)[None, :], alive[:, None] & (b < HALF)[None, :]
    qa = tl.load(row + a[None, :], mask=seen_a, other=0.0)
    qb = tl.load(row + b[None, :], mask=seen_b, other=0.0)
    qc = tl.load(row + HALF + a[None, :], mask=seen_a, other=0.0)
    qd = tl.load(row + HALF + b[None, :], mask=seen_b, other=0.0)
    out_at = token * out_token_stride + head * out_head_stride
    table = block_tables + sequence.to(tl.int64) * table_stride
    tails = tail_slots + sequence.to(tl.int64) * tail_stride
    tail_first = tl.load(tail_firsts + sequence)
    own_len = split_len_of(position + 1, MIN_KEYS, MOST)
    last_split = position // own_len
    z = tl.program_id(1)
    sum_peak, sum_total = tl.full([BLOCK_M], LOWEST, tl.float32), tl.zeros([BLOCK_M], tl.float32)
    sum_a, sum_b = tl.zeros([BLOCK_M, A], tl.float32), tl.zeros([BLOCK_M, B], tl.float32)
    sum_c = tl.zeros([BLOCK_M, A], tl.float32)
    length = tl.min(tl.where(alive, own_len, 1 << 30))
    while length <= tl.max(tl.where(alive, own_len, 0)):
        member = alive & (own_len == length)
        horizon = tl.where(member, position, -1)
        num_keys = tl.max(horizon) + 1
        for split in range(z, (num_keys + length - 1) // length, num_programs):
            peak, total, acc_a, acc_b, acc_c = _attend_latents(
                qa, qb, qc, qd, split * length, tl.minimum((split + 1) * length, num_keys), horizon, num_keys, scale, first,
                second, scales, slot_stride, table, tails, tail_first,
                BLOCK_M, BLOCK_N, BLOCK_SIZE, HALF, A, B, HAS_TAILS, HAS_SCALES,
            )  # fmt: skip
            if PARTED:
                wanted = member & (split <= last_split)
                alone = wanted & (last_split == 0)
                whole = tl.where(wanted, total, 1.0)[:, None]
                _keep(out, out_at, acc_a / whole, a, HALF, alone)
                _keep(out, out_at, acc_b / whole, b, HALF, alone)
                _keep(out, out_at + HALF, acc_c / whole, a, RANK - HALF, alone)
                wanted = wanted & (last_split > 0)
                place = (tl.load(tile_starts + sequence) + index).to(tl.int64) * HEADS + head
                place = place * num_parts + split
                tl.store(part_stats + place * 2, peak, mask=wanted)
                tl.store(part_stats + place * 2 + 1, total, mask=wanted)
                _keep(part_acc, place * RANK, acc_a, a, HALF, wanted)
                _keep(part_acc, place * RANK, acc_b, b, HALF, wanted)
                _keep(part_acc, place * RANK + HALF, acc_c, a, RANK - HALF, wanted)
            else:
                sum_peak, sum_total, decay, share = _fold(sum_peak, sum_total, peak, total)
                sum_a = tl.fma(sum_a, decay[:, None], acc_a * share[:, None])
                sum_b = tl.fma(sum_b, decay[:, None], acc_b * share[:, None])
                sum_c = tl.fma(sum_c, decay[:, None], acc_c * share[:, None])
        length = length * 2
    if not PARTED:
        whole = tl.where(alive, sum_total, 1.0)[:, None]
        _keep(out, out_at, sum_a / whole, a, HALF, alive)
        _keep(out, out_at, sum_b / whole, b, HALF, alive)
        _keep(out, out_at + HALF, sum_c / whole, a, RANK - HALF, alive)


settle_keys(globals())
