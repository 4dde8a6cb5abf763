// Paged attention over the KV pool, without gathering it: flash-decoding and prefill are one computation.
//
// A block of the pool holds, for each key/value head, groups of 16 tokens that are panels of a product (gemm.h):
//
//     keys    [num_kv_heads][block_size / 16][ head_dim as units ][16 tokens]      scores = queries x keys:    lanes are tokens
//     values  [num_kv_heads][block_size / 16][head_dim / 16][16 tokens as units][16 dimensions]   output = p x values: lanes are dims
//     int8:   after either, float32 scales [num_kv_heads][block_size]
//
// (a unit is 4 bytes: 2 bf16 or 1 float32; int8 lies as bf16 does, a byte for each number.) The query heads of one key/value head
// are rows of one product.
//
// Bits. Keys are taken in chunks of 128 that begin at fixed positions. A chunk gives a row its own maximum, sum and output, by a
// fixed order of operations; chunks are folded into the result in order. So it changes no bit which thread took a chunk, how
// many queries were taken together or whether the cache was split at all.
#pragma once

#include <cstring>
#include <limits>
#include <vector>

#include "activations.h"
#include "gemm.h"

namespace pdmesh {

constexpr int kGroup = 16;        // tokens of a group
constexpr int kChunk = 128;       // keys of a chunk
constexpr int kChunkGroups = kChunk / kGroup;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Where things lie in the pool of one model.
struct KVGeometry {
    int num_kv_heads, head_dim, block_size, format;
    int64_t num_blocks;
    uint8_t* base;

    int element() const { return format == kFloat32 ? 4 : format == kBFloat16 ? 2 : 1; }
    int group_bytes() const { return kGroup * head_dim * element(); }
    int64_t numbers_bytes() const { return static_cast<int64_t>(num_kv_heads) * block_size * head_dim * element(); }
    int64_t block_bytes() const { return numbers_bytes() + (format == kInt8 ? num_kv_heads * block_size * 4 : 0); }
    uint8_t* block(int layer, int is_value, int64_t id) const {
        return base + ((static_cast<int64_t>(layer) * 2 + is_value) * num_blocks + id) * block_bytes();
    }
    // `slot` counts from the start of the block; its group's numbers.
    uint8_t* group(uint8_t* block, int head, int slot) const {
        return block + (static_cast<int64_t>(head) * (block_size / kGroup) + slot / kGroup) * group_bytes();
    }
    float* scales(uint8_t* block, int head) const {
        return reinterpret_cast<float*>(block + numbers_bytes()) + head * block_size;
    }
    // Of a LooseGroup: keys, values, and the scales of either (int8 only).
    int loose_group_bytes() const { return 2 * group_bytes() + 2 * kGroup * static_cast<int>(sizeof(float)); }
};

// A group that lies for itself, outside the pool: the one with this number of those at `base`.
struct LooseGroup {
    uint8_t *keys, *values;
    float *key_scales, *value_scales;
    LooseGroup(const KVGeometry& kv, uint8_t* base, int number)
        : keys(base + static_cast<int64_t>(number) * kv.loose_group_bytes()), values(keys + kv.group_bytes()),
          key_scales(reinterpret_cast<float*>(values + kv.group_bytes())), value_scales(key_scales + kGroup) {}
};

// One number of a group: token `slot` (0 to 15), dimension d. `pair` is 2 where a unit holds two numbers.
inline int key_index(int slot, int d, int pair) { return d / pair * kGroup * pair + slot * pair + d % pair; }
inline int value_index(int slot, int d, int pair) {
    return (d / kGroup * (kGroup / pair) + slot / pair) * kGroup * pair + d % kGroup * pair + slot % pair;
}

inline uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class Index>
void write_numbers(const KVGeometry& kv, uint8_t* group, float* scale, int slot, const float* x, const Index& index) {
    const int dim = kv.head_dim;
    if (kv.format == kFloat32) {
        for (int d = 0; d < dim; d++) reinterpret_cast<float*>(group)[index(slot, d, 1)] = x[d];
    } else if (kv.format == kBFloat16) {
        for (int d = 0; d < dim; d++) reinterpret_cast<uint16_t*>(group)[index(slot, d, 2)] = to_bf16(x[d]);
    } else {
        float peak = 0;
        for (int d = 0; d < dim; d++) peak = std::max(peak, __builtin_fabsf(x[d]));
        const float factor = peak > 0 ? 127.0f / peak : 0.0f;
        for (int d = 0; d < dim; d++)
            reinterpret_cast<int8_t*>(group)[index(slot, d, 2)] = static_cast<int8_t>(__builtin_rintf(x[d] * factor));
        *scale = peak / 127.0f;
    }
}

// The values of a group's tokens [first, end) become zero.
inline void clear_values(const KVGeometry& kv, uint8_t* group, int first, int end) {
    const int pair = kv.format == kFloat32 ? 1 : 2, unit = kGroup * pair * kv.element();  // of `pair` tokens and 16 dimensions
    for (int panel = 0; panel < kv.head_dim; panel += kGroup, group += kGroup * kGroup * kv.element()) {
        const auto clear_one = [&](int slot) {
            for (int d = 0; d < kGroup; d++) std::memset(group + value_index(slot, d, pair) * kv.element(), 0, kv.element());
        };
        int slot = first;
        for (; slot < end && slot % pair; slot++) clear_one(slot);
        const int whole = (end - slot) / pair;
        if (whole > 0) {
            std::memset(group + slot / pair * unit, 0, static_cast<size_t>(whole) * unit);
            slot += whole * pair;
        }
        for (; slot < end; slot++) clear_one(slot);
    }
}

// One token's key and value of one head. The slots after this one in its group, up to `open_end`, are not written yet;
// they become zero, because their probability 0 times what lies there must be 0.
inline void write_token(const KVGeometry& kv, int layer, int head, int64_t slot, int open_end, const float* key, const float* value) {
    const int in_block = static_cast<int>(slot % kv.block_size), in_group = in_block % kGroup;
    uint8_t* keys = kv.block(layer, 0, slot / kv.block_size);
    uint8_t* values = kv.block(layer, 1, slot / kv.block_size);
    const bool has_scales = kv.format == kInt8;
    write_numbers(kv, kv.group(keys, head, in_block), has_scales ? kv.scales(keys, head) + in_block : nullptr, in_group, key, key_index);
    uint8_t* group = kv.group(values, head, in_block);
    float* scales = has_scales ? kv.scales(values, head) + in_block : nullptr;
    write_numbers(kv, group, scales, in_group, value, value_index);
    if (in_group + 1 >= open_end) return;
    clear_values(kv, group, in_group + 1, open_end);
    if (has_scales) std::fill(scales + 1, scales + open_end - in_group, 0.0f);
}

// Some rows of one sequence and one key/value head: `num_queries` tokens from position `position`, each with the query heads of
// the key/value head. `queries` as prepare_query leaves them, rows [num_queries * num_groups].
struct QueryTile {
    const uint8_t* queries;
    size_t stride;
    int num_queries, num_groups, position, head;
    int64_t window;  // 0: none; below 0: chunks of so many tokens
    const int32_t* blocks;
    int tail_start;  // from this position on (a multiple of 16), keys and values lie in loose groups at `tail`; INT_MAX: none
    uint8_t* tail;
    const float* sinks;  // logits of the tile's query heads that take their part of the softmax, or null
    int rows() const { return num_queries * num_groups; }
    int last() const { return position + num_queries - 1; }
    int first_visible(int query) const {
        if (window < 0) return static_cast<int>(query - query % window);
        return window ? std::max<int64_t>(0, query - window + 1) : 0;
    }
};

// What a set of keys gives some rows, beside the outputs [rows][head_dim]: the largest score of a row, and the sum of
// 2^(score - largest). Padded to whole vectors.
struct Sums {
    std::vector<float> peaks, totals;
    explicit Sums(int rows) : peaks(round_up(rows, 16), kNothing), totals(round_up(rows, 16)) {}
};

// What a row is multiplied with: keys and values are `key_dim` and `value_dim` numbers. `cap`, of scores s (exponents of 2):
// cap * tanh(s / cap) is taken; 0: none. `is_latent`: see latent.h.
struct AttentionShape {
    int key_dim, value_dim;
    float cap;
    bool is_latent;
};

// Buffers of one thread for tiles of up to `max_rows` rows with values of `dim` numbers.
struct AttentionScratch {
    int max_rows, dim;
    std::vector<float> scores, output, result;
    std::vector<uint8_t> weights;
    Sums chunk, folded;
    AttentionScratch(int max_rows, int dim)
        : max_rows(max_rows), dim(dim), scores(max_rows * kChunk), output(max_rows * dim), result(max_rows * dim),
          weights(max_rows * kChunk * 4), chunk(max_rows), folded(max_rows) {}
};

// out[rows][16 * NR panels at `column`] (+)= rows x panels, over `num_lists` lists of panels: see attend_chunk.
template <class Dot, int MR, int NR, bool kAhead, class Panels>
[[gnu::always_inline]] inline void small_product(const uint8_t* a, size_t stride, int num_lists, int units, const Panels& panels, float* out,
                                                 int out_stride) {
    typename Dot::Acc acc[MR][NR];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
        for (int j = 0; j < NR; j++) acc[i][j] = Dot::zero();
    for (int list = 0; list < num_lists; list++) {
        const uint8_t *w[NR], *next[NR];
#pragma GCC unroll 8
        for (int j = 0; j < NR; j++) {
            w[j] = panels(list, j, false);
            next[j] = panels(list, j, true);
        }
        tile<Dot, MR, NR>(a + static_cast<size_t>(list) * units * 4, stride, w, units, kAhead ? next : nullptr, acc);
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
        for (int j = 0; j < NR; j++) f_store(out + i * out_stride + j * kPanel, acc[i][j]);
}

template <class Dot, int NR, class Panels>
[[gnu::noinline]] void small_rows(const uint8_t* a, size_t stride, int rows, int num_lists, int units, const Panels& panels, float* out,
                                  int out_stride) {
    if (rows >= 6) small_product<Dot, 6, NR, true>(a, stride, num_lists, units, panels, out, out_stride);
    int row = rows >= 6 ? 6 : 0;
    for (; rows - row >= 6; row += 6)
        small_product<Dot, 6, NR, false>(a + row * stride, stride, num_lists, units, panels, out + row * out_stride, out_stride);
    a += row * stride;
    out += row * out_stride;
    switch (rows - row) {
        case 1: return small_product<Dot, 1, NR, true>(a, stride, num_lists, units, panels, out, out_stride);
        case 2: return small_product<Dot, 2, NR, true>(a, stride, num_lists, units, panels, out, out_stride);
        case 3: return small_product<Dot, 3, NR, true>(a, stride, num_lists, units, panels, out, out_stride);
        case 4: return small_product<Dot, 4, NR, true>(a, stride, num_lists, units, panels, out, out_stride);
        case 5: return small_product<Dot, 5, NR, true>(a, stride, num_lists, units, panels, out, out_stride);
        default: return;
    }
}

// A chunk of a tile's keys: where its groups lie. Past the last one the last stands again, so that tiles are always full.
struct Chunk {
    int start, groups;
    const uint8_t *keys[kChunkGroups], *values[kChunkGroups];
    const float *key_scales[kChunkGroups], *value_scales[kChunkGroups];
};

// False when no row of the tile sees any key of the chunk.
inline bool locate(const KVGeometry& kv, int layer, const QueryTile& tile, int index, Chunk& chunk) {
    const int start = index * kChunk, end = std::min(start + kChunk, tile.last() + 1);
    if (start >= end || end <= tile.first_visible(tile.position)) return false;
    chunk.start = start;
    chunk.groups = (end - start + kGroup - 1) / kGroup;
    for (int g = 0; g < kChunkGroups; g++) {
        const int position = start + std::min(g, chunk.groups - 1) * kGroup, slot = position % kv.block_size;
        if (position >= tile.tail_start) {
            const LooseGroup group(kv, tile.tail, (position - tile.tail_start) / kGroup);
            chunk.keys[g] = group.keys;
            chunk.values[g] = group.values;
            chunk.key_scales[g] = group.key_scales;
            chunk.value_scales[g] = group.value_scales;
            continue;
        }
        const int64_t id = tile.blocks[position / kv.block_size];
        uint8_t *keys = kv.block(layer, 0, id), *values = kv.block(layer, 1, id);
        chunk.keys[g] = kv.group(keys, tile.head, slot);
        chunk.values[g] = kv.group(values, tile.head, slot);
        if (kv.format == kInt8) {
            chunk.key_scales[g] = kv.scales(keys, tile.head) + slot;
            chunk.value_scales[g] = kv.scales(values, tile.head) + slot;
        }
    }
    return true;
}

// Scores of a chunk to weights, row by row: fills scratch.weights and scratch.chunk. Meanwhile each row asks for its share of the
// next values: the products ask for the keys, and memory is to be busy all the time.
template <class Dot, bool kCapped>
void weigh_scores(const QueryTile& tile, const Chunk& chunk, const Chunk& next, int lines, float cap, AttentionScratch& scratch) {
    constexpr bool is_float = std::is_same_v<Dot, DotFloat32>, is_int8 = std::is_same_v<Dot, DotInt8AsBFloat16>;
    const int start = chunk.start, groups = chunk.groups, rows = tile.rows();
    const size_t weight_stride = kChunk * (is_float ? 4 : 2);
    for (int row = 0; row < rows; row++) {
        const int query = tile.position + row / tile.num_groups;
        const int visible = query + 1 - start, hidden = tile.first_visible(query) - start;
        float* scores = scratch.scores.data() + row * kChunk;
        F most = f_set(kNothing);
        for (int g = 0; g < groups; g++) {
            F s = f_load(scores + g * kGroup);
            if constexpr (is_int8) s = s * f_load(chunk.key_scales[g]);
            if constexpr (kCapped) s = f_tanh(s * f_set(1.0f / cap)) * f_set(cap);
            if (visible < (g + 1) * kGroup) s = f_first(s, std::max(0, visible - g * kGroup), kNothing);
            if (hidden > g * kGroup) s = f_from_lane(s, hidden - g * kGroup, kNothing);
            if constexpr (is_int8 || kCapped) f_store(scores + g * kGroup, s);
            else if (visible < (g + 1) * kGroup || hidden > g * kGroup) f_store(scores + g * kGroup, s);
            most = f_max(most, s);
        }
        const float peak = f_hmax(most);
        const int first_line = lines * row / rows, last_line = lines * (row + 1) / rows;
        F total = f_zero();
        uint8_t* weights = scratch.weights.data() + row * weight_stride;
        for (int g = 0; g < groups; g++) {
            for (int line = first_line; line < last_line; line++) prefetch_far(next.values[g] + line * 64);
            F p = peak == kNothing ? f_zero() : f_exp2(f_load(scores + g * kGroup) - f_set(peak));
            total = total + p;
            if constexpr (is_int8) p = p * f_load(chunk.value_scales[g]);
            if constexpr (is_float) f_store(reinterpret_cast<float*>(weights) + g * kGroup, p);
            else f_store_bf16(reinterpret_cast<uint16_t*>(weights) + g * kGroup, p);
        }
        scratch.chunk.peaks[row] = peak;
        scratch.chunk.totals[row] = f_sum(total);
    }
}

// Attention of a tile's rows to one chunk of keys: fills scratch.chunk and scratch.output. `next`, the chunk that comes after it
// (or the same), is asked for meanwhile: groups lie apart in memory, and the processor's own prefetcher learns a stream only from
// its first lines.
template <class Dot>
void attend_chunk(const AttentionShape& shape, const QueryTile& tile, const Chunk& chunk, const Chunk& next, AttentionScratch& scratch) {
    constexpr bool is_float = std::is_same_v<Dot, DotFloat32>, is_int8 = std::is_same_v<Dot, DotInt8AsBFloat16>;
    constexpr int pair = is_float ? 1 : 2, panel_bytes = kGroup * kPanel * (is_float ? 4 : is_int8 ? 1 : 2);
    const int groups = chunk.groups, rows = tile.rows(), dim = shape.value_dim;
    const size_t weight_stride = kChunk * (is_float ? 4 : 2);
    for (int g = 0; g < groups; g += 4) {
        const auto panels = [&](int, int j, bool ahead) { return (ahead ? next : chunk).keys[g + j]; };
        small_rows<Dot, 4>(tile.queries, tile.stride, rows, 1, shape.key_dim / pair, panels, scratch.scores.data() + g * kGroup, kChunk);
    }
    const int value_bytes = panel_bytes * (dim / kPanel), lines = value_bytes / 64;
    if (shape.cap) weigh_scores<Dot, true>(tile, chunk, next, lines, shape.cap, scratch);
    else weigh_scores<Dot, false>(tile, chunk, next, lines, 0, scratch);
    for (int column = 0; column < dim; column += 4 * kPanel) {
        const int panel = column / kPanel;
        const auto panels = [&](int g, int j, bool) { return chunk.values[g] + (panel + j) * panel_bytes; };
        float* out = scratch.output.data() + column;
        switch (std::min(4, dim / kPanel - panel)) {
            case 1: small_rows<Dot, 1>(scratch.weights.data(), weight_stride, rows, groups, kGroup / pair, panels, out, dim); break;
            case 2: small_rows<Dot, 2>(scratch.weights.data(), weight_stride, rows, groups, kGroup / pair, panels, out, dim); break;
            case 3: small_rows<Dot, 3>(scratch.weights.data(), weight_stride, rows, groups, kGroup / pair, panels, out, dim); break;
            default: small_rows<Dot, 4>(scratch.weights.data(), weight_stride, rows, groups, kGroup / pair, panels, out, dim); break;
        }
    }
    for (int g = groups; g < next.groups; g++)
        for (int at = 0; at < value_bytes; at += 64) prefetch_far(next.values[g] + at);
}

inline void clear(Sums& folded, float* result, int rows, int dim) {
    std::fill(folded.peaks.begin(), folded.peaks.end(), kNothing);
    std::fill(folded.totals.begin(), folded.totals.end(), 0.0f);
    std::memset(result, 0, sizeof(float) * rows * dim);
}

// One chunk more into the result (Milakov and Gimelshein, 2018): peaks, totals [rows padded to 16], output [rows][dim].
inline void fold(Sums& folded, float* result, const float* peaks, const float* totals, const float* output, int rows, int dim) {
    for (int first = 0; first < rows; first += 16) {
        const F old_peak = f_load(&folded.peaks[first]), chunk_peak = f_load(peaks + first), peak = f_max(old_peak, chunk_peak);
        // A row that has seen no key yet: the difference of two infinities would be NaN.
        const F base = f_max(peak, f_set(-1e30f));
        const F old_part = f_exp2(old_peak - base), new_part = f_exp2(chunk_peak - base);
        f_store(&folded.peaks[first], peak);
        f_store(&folded.totals[first], f_fma(f_load(&folded.totals[first]), old_part, f_load(totals + first) * new_part));
        float old_factors[16], new_factors[16];
        f_store(old_factors, old_part);
        f_store(new_factors, new_part);
        for (int row = first; row < std::min(first + 16, rows); row++) {
            const F old_factor = f_set(old_factors[row - first]), new_factor = f_set(new_factors[row - first]);
            for (int d = 0; d < dim; d += kPanel) {
                const F added = f_load(output + row * dim + d) * new_factor;
                f_store(result + row * dim + d, f_fma(f_load(result + row * dim + d), old_factor, added));
            }
        }
    }
}

inline float exp2_of(float x) {
    float lanes[16];
    f_store(lanes, f_exp2(f_set(x)));
    return lanes[0];
}

// The factor of a result whose softmax has a sink besides its keys.
inline float share_beside(float sink, float peak, float total) {
    const float own = sink * 1.44269504f, largest = std::max(own, peak), part = exp2_of(peak - largest);
    return part / (total * part + exp2_of(own - largest));
}

// result / total into the attention output: row r belongs to token r / num_groups, query head r % num_groups of the tile's head.
// `out` points at the tile's first token and head; tokens are `token_stride` floats apart.
inline void finish(const Sums& folded, const float* result, const QueryTile& tile, int dim, float* out, size_t token_stride) {
    for (int row = 0; row < tile.rows(); row++) {
        const int head = row % tile.num_groups;
        const float total = folded.totals[row];
        const F factor = f_set(tile.sinks ? share_beside(tile.sinks[head], folded.peaks[row], total) : 1.0f / total);
        float* target = out + row / tile.num_groups * token_stride + head * dim;
        for (int d = 0; d < dim; d += kPanel) f_store(target + d, f_load(result + row * dim + d) * factor);
    }
}

template <class Visit>
auto with_dot(int format, const Visit& visit) {
    if (format == kFloat32) return visit(DotFloat32{});
    if (format == kInt8) return visit(DotInt8AsBFloat16{});
    return visit(DotBFloat16{});
}

}  // namespace pdmesh
