# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The kernels of attention.py, which explains them.

A tile: rows are the queries of one sequence times the query heads of one key/value head, so a key is read once for all of them.

                        keys of split 0    |  split 1             |  split 2
    row 0  q0 head 0    ........ ........  |  ........ ........   |  ...                 tiles of BLOCK_N keys, in order
    row 1  q0 head 1    ........ ........  |  ........ ........   |  ...                 within a split: online softmax
    row 2  q1 head 0    ........ ........  |  ........ ........   |  ....                splits: each from nothing, then folded
    row 3  q1 head 1    ........ ........  |  ........ ........   |  ....                in order
                        program z = 0         z = 1                  z = 2       split_kernel: parts go to the workspace
                        one program, from left to right                          walk_kernel: folds as it goes

Both go through `_attend_tiles` and `_fold`, so a row has the same operations in the same order in either. A fused multiply and
add is written out wherever a compiler might or might not make one.
"""

import math

import triton
import triton.language as tl

from pdmesh.engine.kernels.triton import split_kv
from pdmesh.engine.kernels.triton.launching import behind_last, settle_keys

DOUBLINGS = tl.constexpr(split_kv.DOUBLINGS)
# Below every score, yet finite: exp2(masked - LOWEST) and exp2(LOWEST - score) are 0, never NaN.
LOWEST = tl.constexpr(-1e30)
LOG2E = tl.constexpr(math.log2(math.e))


@triton.constexpr_function
def _log2(power: int) -> int:
    return int(power).bit_length() - 1


@triton.jit
def _log_len_of(context, MIN_KEYS: tl.constexpr, MOST: tl.constexpr):
    """Return the logarithm of `Splits.split_len`, of a scalar or of a tensor: a number is divided by the length with a shift."""
    log_len = context * 0 + _log2(MIN_KEYS)
    for _ in tl.static_range(DOUBLINGS):
        log_len = tl.where((MOST << log_len) < context, log_len + 1, log_len)
    return log_len


@triton.jit
def split_len_of(context, MIN_KEYS: tl.constexpr, MOST: tl.constexpr):
    """Return `Splits.split_len` of a scalar or of a tensor."""
    return 1 << _log_len_of(context, MIN_KEYS, MOST)


@triton.jit
def _log_lens(first, last, position, MIN_KEYS: tl.constexpr, MOST: tl.constexpr):
    """Return logarithms of split lengths: of the first and last position of a tile, and of each row's `position` between them,
    which nearly always is one and the same."""
    shortest, longest = _log_len_of(first + 1, MIN_KEYS, MOST), _log_len_of(last + 1, MIN_KEYS, MOST)
    own = position * 0 + shortest
    for _ in range(shortest, longest):
        own = tl.where((MOST << own) <= position, own + 1, own)
    return shortest, longest, own


@triton.jit
def _keys_of(log_len, shortest, longest, first, last, window, MOST: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Return the first key that rows with splits of this length see, and how many keys there are up to their last."""
    first_key = first * 0
    if HAS_WINDOW:
        first = tl.where(log_len == shortest, first, tl.maximum(first, (MOST << log_len) // 2))
        first_key = tl.maximum(first - window + 1, 0)
    return first_key, tl.where(log_len == longest, last + 1, tl.minimum(last + 1, MOST << log_len))


@triton.jit
def _slots(positions, inside, table, tails, tail_first, BLOCK_SIZE: tl.constexpr, HAS_TAILS: tl.constexpr):
    """Return slots of keys; for keys that are not `inside`, some slot of block 0."""
    in_table = inside
    if HAS_TAILS:
        in_table = inside & (positions < tail_first)
    slots = tl.load(table + positions // BLOCK_SIZE, mask=in_table, other=0) * BLOCK_SIZE + positions % BLOCK_SIZE
    if HAS_TAILS:
        behind = inside & (positions >= tail_first)
        slots = tl.where(behind, tl.load(tails + (positions - tail_first), mask=behind, other=0), slots)
    return slots


@triton.jit
def _tanh(x):
    """Return the hyperbolic tangent, off by 2**-23 or so: of a softcap of 50 by 6e-6 of a score."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))


@triton.jit
def _attend_tiles(
    query, peak, total, acc, start, end, lowest, horizon, first_key, num_keys, scale, cap, keys, values, slot_stride,
    table, tails, tail_first,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, HAS_TAILS: tl.constexpr,
    HAS_CAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add key tiles from `start` (a multiple of BLOCK_N) to `end` to what is accumulated. A row sees the keys from its
    `lowest` to its `horizon`; only keys from `first_key` to `num_keys` are read, so what lies in other slots does not matter
    (0 * NaN is NaN). A tile of which a row sees nothing leaves that row as it is, to the bit. MASKED False: all rows see all
    keys. HAS_CAP: the hyperbolic tangent of `cap` times the product is what is scaled."""
    columns = tl.arange(0, DIM_PAD)
    # A tile's slots are read while the one before is computed: keys whose address is still being read cannot be fetched ahead.
    ahead = start + tl.arange(0, BLOCK_N)
    wanted = (ahead >= first_key) & (ahead < num_keys)
    slots = _slots(ahead, wanted, table, tails, tail_first, BLOCK_SIZE, HAS_TAILS)
    for tile in range(start, end, BLOCK_N):
        positions = tile + tl.arange(0, BLOCK_N)
        inside = (positions >= first_key) & (positions < num_keys)
        offsets = slots.to(tl.int64)[:, None] * slot_stride + columns[None, :]
        ahead = positions + BLOCK_N
        wanted = (ahead >= first_key) & (ahead < num_keys)
        slots = _slots(ahead, wanted, table, tails, tail_first, BLOCK_SIZE, HAS_TAILS)
        present = inside[:, None] & (columns < DIM)[None, :]
        key = tl.load(keys + offsets, mask=present, other=0.0)
        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
        if HAS_CAP:
            scores = _tanh(scores * cap)
        if MASKED:
            visible = (positions[None, :] >= lowest[:, None]) & (positions[None, :] <= horizon[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        weights = tl.exp2(tl.fma(scores, scale, -new_peak[:, None]))
        decay = tl.exp2(peak - new_peak)
        total = tl.fma(total, decay, tl.sum(weights, 1))
        value = tl.load(values + offsets, mask=present, other=0.0)
        acc = tl.dot(weights.to(query.dtype), value.to(query.dtype), acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    return peak, total, acc


@triton.jit
def _fold(peak, total, peak_of_split, total_of_split):
    """Fold one more split's maximum and sum. Returns the new two, and the factors for what is accumulated and for the split's
    own. A split of which a row sees nothing (LOWEST, 0) changes nothing; the first one is taken over as it is."""
    new_peak = tl.maximum(peak, peak_of_split)
    decay, share = tl.exp2(peak - new_peak), tl.exp2(peak_of_split - new_peak)
    return new_peak, tl.fma(total, decay, total_of_split * share), decay, share


@triton.jit
def _sinks_of(sinks, head, alive):
    """Return the maximum and sum of rows of query heads before any key: those of the heads' sinks (GPT-OSS, 2025)."""
    peak = tl.load(sinks + head, mask=alive, other=0.0).to(tl.float32) * LOG2E
    return peak, tl.where(alive, 1.0, 0.0)


@triton.jit
def _rows(tile, num_queries, context, window, kv_head, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Return for each row of a tile: query in the sequence, head, whether it is one, position, lowest position that it sees."""
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    index = rows // GROUP
    position = context - num_queries + index
    lowest = position * 0
    if HAS_WINDOW:
        lowest = tl.maximum(position - window + 1, 0)
    return index, kv_head * GROUP + rows % GROUP, index < num_queries, position, lowest


@triton.jit
def _ends(tile, num_queries, context, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the first and the last position of a tile's rows."""
    before = context - num_queries
    return before + tile * BLOCK_M // GROUP, before + tl.minimum(num_queries, ((tile + 1) * BLOCK_M - 1) // GROUP + 1) - 1


@triton.jit
def _sequence_of(program, starts, num_seqs, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the last sequence whose first tile is not behind `program`. First tiles are computed without a table: sequence b's
    is starts[b] * GROUP // BLOCK_M + b, which leaves each sequence at least the tiles that it needs, and one if it needs none."""
    low, high = num_seqs * 0, num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(starts + middle) * GROUP // BLOCK_M + middle <= program:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit(
    do_not_specialize=[
        "table_stride", "tail_stride", "num_parts", "window", "num_seqs", "max_queries", "has_tiles", "num_programs",
    ]
)  # fmt: skip
def split_kernel(
    query, keys, values, scales, sinks, out, part_acc, part_stats,
    query_starts, split_starts, context_lens, block_tables, tail_firsts, tail_slots,
    query_token_stride, query_head_stride, out_token_stride, out_head_stride, slot_stride, head_stride, table_stride, tail_stride,
    num_heads, num_parts, window, scale, cap, num_seqs, max_queries, has_tiles, num_programs,
    MIN_KEYS: tl.constexpr, MOST: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_TAILS: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (sequence and tile of rows, key/value head, z): splits z, z + num_programs, ... of the sequence's keys. For
    sequences with at most `max_queries` queries; 0 in `has_tiles`: each is one tile. Padding has one, that stores its zeros."""
    sequence = tl.program_id(0)
    tile = sequence * 0
    if has_tiles > 0:
        sequence = _sequence_of(tl.program_id(0), split_starts, num_seqs, GROUP, BLOCK_M)
        tile = tl.program_id(0) - (tl.load(split_starts + sequence) * GROUP // BLOCK_M + sequence)
    kv_head, z = tl.program_id(1), tl.program_id(2)
    start = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - start
    context = tl.load(context_lens + sequence)
    tail_first = tl.load(tail_firsts + sequence)
    first_part = tl.load(split_starts + sequence).to(tl.int64) * num_heads * num_parts
    behind_last(OVERLAPS)  # numbers of the step were there before any kernel that overlaps
    if ((num_queries > max_queries) & (context > 0)) | (tile * BLOCK_M >= num_queries * GROUP):
        return
    index, head, alive, position, lowest = _rows(tile, num_queries, context, window, kv_head, GROUP, BLOCK_M, HAS_WINDOW)
    columns = tl.arange(0, DIM_PAD)
    present = alive[:, None] & (columns < DIM)[None, :]
    # The sequence's rows begin at a scalar and offsets behind it are narrow: wide addresses would not fit into registers.
    query += start.to(tl.int64) * query_token_stride
    out += start.to(tl.int64) * out_token_stride
    out_offsets = (index * out_token_stride + head * out_head_stride)[:, None] + columns[None, :]
    if context == 0:
        if (z == 0) & (tile == 0):
            for first in range((num_queries * GROUP + BLOCK_M - 1) // BLOCK_M):
                index, head, alive, position, lowest = _rows(first, num_queries, context, window, kv_head, GROUP, BLOCK_M, False)
                places = (index * out_token_stride + head * out_head_stride)[:, None] + columns[None, :]
                zeros = tl.zeros([BLOCK_M, DIM_PAD], out.dtype.element_ty)
                tl.store(out + places, zeros, mask=alive[:, None] & (columns < DIM)[None, :])
        return
    query_offsets = (index * query_token_stride + head * query_head_stride)[:, None] + columns[None, :]
    rows = tl.load(query + query_offsets, mask=present, other=0.0)
    table = block_tables + sequence.to(tl.int64) * table_stride
    tails = tail_slots + sequence.to(tl.int64) * tail_stride
    value_scale = 1.0
    if HAS_SCALES:
        if HAS_CAP:
            cap = cap * tl.load(scales)
        else:
            scale = scale * tl.load(scales)
        value_scale = tl.load(scales + 1)
    first, last = _ends(tile, num_queries, context, GROUP, BLOCK_M)
    shortest, longest, own = _log_lens(first, last, position, MIN_KEYS, MOST)
    first_split, last_split = lowest >> own, position >> own
    part_acc += first_part * DIM
    part_stats += first_part * 2
    # Queries of a tile may have splits of two lengths, where a doubling falls between them: a pass for each.
    for log_len in range(shortest, longest + 1):
        length = 1 << log_len
        member = alive & (own == log_len)
        horizon = tl.where(member, position, -1)
        first_key, num_keys = _keys_of(log_len, shortest, longest, first, last, window, MOST, HAS_WINDOW)
        for split in range((first_key >> log_len) + z, (num_keys + length - 1) >> log_len, num_programs):
            peak = tl.full([BLOCK_M], LOWEST, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
            peak, total, acc = _attend_tiles(
                rows, peak, total, acc, tl.maximum(split * length, first_key // BLOCK_N * BLOCK_N),
                tl.minimum((split + 1) * length, num_keys), lowest, horizon, first_key, num_keys, scale, cap,
                keys + kv_head * head_stride, values + kv_head * head_stride, slot_stride, table, tails, tail_first,
                BLOCK_N, BLOCK_SIZE, DIM, DIM_PAD, HAS_TAILS, HAS_CAP, True,
            )  # fmt: skip
            wanted = member & (split >= first_split) & (split <= last_split)
            alone = wanted & (first_split == last_split)
            if HAS_SINKS:
                sink, one = _sinks_of(sinks, head, alive)
                _, whole, _, share = _fold(sink, one, peak, total)
                result = acc * share[:, None] / tl.where(wanted, whole, 1.0)[:, None] * value_scale
            else:
                result = acc / tl.where(wanted, total, 1.0)[:, None] * value_scale
            tl.store(out + out_offsets, result.to(out.dtype.element_ty), mask=present & alone[:, None])
            wanted = wanted & (first_split != last_split)
            part = (index * num_heads + head) * num_parts + split
            tl.store(part_stats + part * 2, peak, mask=wanted)
            tl.store(part_stats + part * 2 + 1, total, mask=wanted)
            tl.store(part_acc + part[:, None] * DIM + columns[None, :], acc, mask=present & wanted[:, None])


@triton.jit(do_not_specialize=["num_parts", "window", "num_seqs", "max_queries", "has_more"])
def merge_kernel(
    part_acc, part_stats, scales, sinks, out, query_starts, split_starts, context_lens, out_token_stride, out_head_stride,
    num_heads, num_parts, window, num_seqs, max_queries, has_more,
    MIN_KEYS: tl.constexpr, MOST: tl.constexpr, UNROLL: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_SINKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (query of a sequence, head): folds the parts of its splits, in order. Does nothing where there is one split. 0 in
    `has_more`: no sequence has more than one query."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    index = sequence * 0
    if has_more > 0:
        sequence = _sequence_of(tl.program_id(0), split_starts, num_seqs, 1, 1)
        index = tl.program_id(0) - (tl.load(split_starts + sequence) + sequence)
    start = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - start
    context = tl.load(context_lens + sequence)
    part = (tl.load(split_starts + sequence) + index).to(tl.int64) * num_heads + head
    behind_last(OVERLAPS)  # numbers of the step were there before any kernel that overlaps
    if (num_queries > max_queries) | (index >= num_queries) | (context == 0):
        return
    position = context - num_queries + index
    lowest = position * 0
    if HAS_WINDOW:
        lowest = tl.maximum(position - window + 1, 0)
    log_len = _log_len_of(position + 1, MIN_KEYS, MOST)
    first_split, last_split = lowest >> log_len, position >> log_len
    if first_split == last_split:
        return
    columns = tl.arange(0, DIM_PAD)
    peak = tl.full([1], LOWEST, tl.float32)
    total = tl.zeros([1], tl.float32)
    if HAS_SINKS:
        peak, total = _sinks_of(sinks, head + tl.zeros([1], tl.int32), total == 0.0)
    acc = tl.zeros([DIM_PAD], tl.float32)
    # Unrolled, so that the reads of several parts are under way at once.
    for base in range(first_split, last_split + 1, UNROLL):
        for i in tl.static_range(UNROLL):
            split = base + i + tl.zeros([1], tl.int64)
            valid = split <= last_split
            at = part * num_parts + split
            peak_of_split = tl.load(part_stats + at * 2, mask=valid, other=LOWEST)
            total_of_split = tl.load(part_stats + at * 2 + 1, mask=valid, other=0.0)
            acc_of_split = tl.load(part_acc + at * DIM + columns, mask=valid & (columns < DIM), other=0.0)
            peak, total, decay, share = _fold(peak, total, peak_of_split, total_of_split)
            acc = tl.fma(acc, decay, acc_of_split * share)
    value_scale = 1.0
    if HAS_SCALES:
        value_scale = tl.load(scales + 1)
    result = acc / total * value_scale
    out_at = out + (start + index).to(tl.int64) * out_token_stride + head * out_head_stride + columns
    tl.store(out_at, result.to(out.dtype.element_ty), mask=columns < DIM)


@triton.jit(do_not_specialize=["table_stride", "tail_stride", "num_seqs", "max_queries", "window"])
def walk_kernel(
    query, keys, values, scales, sinks, out,
    query_starts, context_lens, block_tables, tail_firsts, tail_slots,
    query_token_stride, query_head_stride, out_token_stride, out_head_stride, slot_stride, head_stride, table_stride, tail_stride,
    num_seqs, max_queries, window, scale, cap,
    MIN_KEYS: tl.constexpr, MOST: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_TAILS: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, key/value head), for sequences with more than `max_queries` queries: all splits, in order. Padding
    gets its zeros here whatever its length, as split_kernel does not run where there is nothing to split."""
    behind_last(OVERLAPS)
    kv_head = tl.program_id(1)
    sequence = _sequence_of(tl.program_id(0), query_starts, num_seqs, GROUP, BLOCK_M)
    start = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - start
    context = tl.load(context_lens + sequence)
    # Tiles with the most keys begin first, so that the last ones are short.
    num_tiles = (num_queries * GROUP + BLOCK_M - 1) // BLOCK_M
    tile = num_tiles - 1 - (tl.program_id(0) - (start * GROUP // BLOCK_M + sequence))
    if ((num_queries <= max_queries) & (context > 0)) | (tile < 0):
        return
    index, head, alive, position, lowest = _rows(tile, num_queries, context, window, kv_head, GROUP, BLOCK_M, HAS_WINDOW)
    columns = tl.arange(0, DIM_PAD)
    present = alive[:, None] & (columns < DIM)[None, :]
    token = (start + index).to(tl.int64)
    out_at = out + token[:, None] * out_token_stride + head[:, None] * out_head_stride + columns[None, :]
    if context == 0:
        tl.store(out_at, tl.zeros([BLOCK_M, DIM_PAD], out.dtype.element_ty), mask=present)
        return
    query_at = query + token[:, None] * query_token_stride + head[:, None] * query_head_stride + columns[None, :]
    rows = tl.load(query_at, mask=present, other=0.0)
    table = block_tables + sequence.to(tl.int64) * table_stride
    tails = tail_slots + sequence.to(tl.int64) * tail_stride
    tail_first = tl.load(tail_firsts + sequence)
    value_scale = 1.0
    if HAS_SCALES:
        if HAS_CAP:
            cap = cap * tl.load(scales)
        else:
            scale = scale * tl.load(scales)
        value_scale = tl.load(scales + 1)
    head_keys, head_values = keys + kv_head * head_stride, values + kv_head * head_stride
    first, last = _ends(tile, num_queries, context, GROUP, BLOCK_M)
    shortest, longest, own = _log_lens(first, last, position, MIN_KEYS, MOST)
    sum_peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    sum_total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        sum_peak, sum_total = _sinks_of(sinks, head, alive)
    sum_acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    # Keys that every row sees need no mask; where rows differ in their splits or windows begin, all are masked.
    all_see = (first + 1) // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        all_see = all_see * 0
    all_see = tl.where(shortest == longest, all_see, 0)
    for log_len in range(shortest, longest + 1):
        length = 1 << log_len
        member = alive & (own == log_len)
        horizon = tl.where(member, position, -1)
        first_key, num_keys = _keys_of(log_len, shortest, longest, first, last, window, MOST, HAS_WINDOW)
        for split in range(first_key >> log_len, (num_keys + length - 1) >> log_len):
            begin = tl.maximum(split * length, first_key // BLOCK_N * BLOCK_N)
            end = tl.minimum((split + 1) * length, num_keys)
            between = tl.minimum(tl.maximum(all_see, begin), end)
            peak = tl.full([BLOCK_M], LOWEST, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
            if not HAS_WINDOW:
                peak, total, acc = _attend_tiles(
                    rows, peak, total, acc, begin, between, lowest, horizon, first_key, num_keys, scale, cap, head_keys,
                    head_values, slot_stride, table, tails, tail_first,
                    BLOCK_N, BLOCK_SIZE, DIM, DIM_PAD, HAS_TAILS, HAS_CAP, False,
                )  # fmt: skip
            peak, total, acc = _attend_tiles(
                rows, peak, total, acc, between, end, lowest, horizon, first_key, num_keys, scale, cap, head_keys,
                head_values, slot_stride, table, tails, tail_first, BLOCK_N, BLOCK_SIZE, DIM, DIM_PAD, HAS_TAILS, HAS_CAP, True,
            )  # fmt: skip
            sum_peak, sum_total, decay, share = _fold(sum_peak, sum_total, peak, total)
            sum_acc = tl.fma(sum_acc, decay[:, None], acc * share[:, None])
    result = sum_acc / tl.where(alive, sum_total, 1.0)[:, None] * value_scale
    tl.store(out_at, result.to(out.dtype.element_ty), mask=present)


settle_keys(globals())
