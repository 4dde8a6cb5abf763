// Paged attention over the KV pool, without gathering it: flash-decoding and prefill are one computation.
//
// The pool's groups of 16 tokens are panels of a product (kv_layout.h): scores = queries x keys, where lanes are tokens, and
// output = p x values, where lanes are dimensions. The query heads of one key/value head are rows of one product.
//
// int8 keys and values are multiplied as int16 (DotInt8AsWords), where no matrix tiles do it: a row of queries has a scale of its
// own, a row of weights one for each chunk, and sums are exact.
//
// Bits. Keys are taken in chunks of 128 that begin at fixed positions. A chunk gives a row its own maximum, sum and output, by a
// fixed order of operations; chunks are folded into the result in order. So it changes no bit which thread took a chunk, how
// many queries were taken together or whether the cache was split at all.
#pragma once

#include <array>
#include <cstring>
#include <vector>

#include "activations.h"
#include "attention_chunk.h"
#include "attention_tiles.h"
#include "gemm.h"

namespace pdmesh {

struct OnTilesInt8 {};  // int8 keys and values on matrix tiles, as bf16

template <class Dot>
constexpr bool kInt8Keys = std::is_same_v<Dot, DotInt8AsWords> || std::is_same_v<Dot, OnTilesInt8>;

template <class Dot>
bool takes_tiles(const AttentionShape& shape) {
    if constexpr (std::is_same_v<Dot, DotBFloat16>) return fits_tiles(shape);
    return std::is_same_v<Dot, OnTilesInt8>;
}

// out[rows][16 * NR panels at `column`] (+)= rows x panels, over `num_lists` lists of panels: see attend_chunk. `scales`: of the rows,
// where they are integers.
template <class Dot, int MR, int NR, bool kAhead, class Panels>
[[gnu::always_inline]] inline void small_product(const uint8_t* a, size_t stride, int num_lists, int units, const Panels& panels, const float* scales,
                                                 float* out, int out_stride) {
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
        for (int j = 0; j < NR; j++) {
            float* target = out + i * out_stride + j * kPanel;
            if constexpr (std::is_same_v<typename Dot::Acc, I>) f_store(target, f_from(acc[i][j]) * f_set(scales[i]));
            else f_store(target, acc[i][j]);
        }
}

// The same panel by panel where the registers do not hold all.
template <class Dot, int MR, int NR, bool kAhead, class Panels>
[[gnu::always_inline]] inline void fitting_products(const uint8_t* a, size_t stride, int num_lists, int units, const Panels& panels, const float* scales,
                                                    float* out, int out_stride) {
    constexpr int at_once = Dot::kRoom.panels_at_once(MR, NR);
    for (int j = 0; j < NR; j += at_once) {
        const auto some = [&](int list, int number, bool ahead) { return panels(list, j + number, ahead); };
        small_product<Dot, MR, at_once, kAhead>(a, stride, num_lists, units, some, scales, out + j * kPanel, out_stride);
    }
}

template <class Dot, int NR, class Panels>
[[gnu::noinline]] void small_rows(const uint8_t* a, size_t stride, int rows, int num_lists, int units, const Panels& panels, const float* scales, float* out,
                                  int out_stride) {
    constexpr int high = Dot::kRoom.rows(6);
    if (rows >= high) fitting_products<Dot, high, NR, true>(a, stride, num_lists, units, panels, scales, out, out_stride);
    int row = rows >= high ? high : 0;
    for (; rows - row >= high; row += high)
        fitting_products<Dot, high, NR, false>(a + row * stride, stride, num_lists, units, panels, scales + row, out + row * out_stride, out_stride);
    a += row * stride;
    out += row * out_stride;
    scales += row;
    switch (rows - row) {
        case 1: return fitting_products<Dot, 1, NR, true>(a, stride, num_lists, units, panels, scales, out, out_stride);
        case 2: return fitting_products<Dot, 2, NR, true>(a, stride, num_lists, units, panels, scales, out, out_stride);
        case 3: return fitting_products<Dot, 3, NR, true>(a, stride, num_lists, units, panels, scales, out, out_stride);
        case 4: if constexpr (high > 4) fitting_products<Dot, 4, NR, true>(a, stride, num_lists, units, panels, scales, out, out_stride); return;
        case 5: if constexpr (high > 5) fitting_products<Dot, 5, NR, true>(a, stride, num_lists, units, panels, scales, out, out_stride); return;
        default: return;
    }
}

// A row's scores of `groups` groups to weights, 2^(score - largest), with its largest score and its weights' sum. `visible`: keys from
// here on, and before `hidden`, are not seen; kAllSeen: there are none such. `scale`: of the weights, where they are int16.
template <class Dot, bool kCapped, bool kAllSeen>
[[gnu::always_inline]] inline void weigh_row(const Chunk& chunk, int groups, int visible, int hidden, float cap, float* scores, uint8_t* weights,
                                             float& largest, float& sum, float& scale) {
    constexpr bool is_float = std::is_same_v<Dot, DotFloat32>, is_words = std::is_same_v<Dot, DotInt8AsWords>;
    F most = f_set(kNothing), total = f_zero();
    [[maybe_unused]] std::array<F, kAllSeen ? kChunkGroups : 0> seen;  // in registers; else they go back to `scores`
    const auto keep = [&](int g, F x) {
        if constexpr (kAllSeen) seen[g] = x;
        else f_store(scores + g * kGroup, x);
    };
    const auto kept = [&](int g) {
        if constexpr (kAllSeen) return seen[g];
        else return f_load(scores + g * kGroup);
    };
#pragma GCC unroll 8
    for (int g = 0; g < (kAllSeen ? kChunkGroups : groups); g++) {
        F s = f_load(scores + g * kGroup);
        if constexpr (kInt8Keys<Dot>) s = s * f_load(chunk.key_scales[g]);
        if constexpr (kCapped) s = f_tanh(s * f_set(1.0f / cap)) * f_set(cap);
        if constexpr (!kAllSeen) {
            if (visible < (g + 1) * kGroup) s = f_first(s, std::max(0, visible - g * kGroup), kNothing);
            if (hidden > g * kGroup) s = f_from_lane(s, hidden - g * kGroup, kNothing);
        }
        keep(g, s);
        most = f_max(most, s);
    }
    const float peak = f_hmax(most);
    const F base = f_set(peak);
    // The latter stays 0, but NaN where a weight is NaN or infinite: integers would hide it.
    [[maybe_unused]] F heaviest = f_zero(), finite = f_zero();
#pragma GCC unroll 8
    for (int g = 0; g < (kAllSeen ? kChunkGroups : groups); g++) {
        F p = !kAllSeen && peak == kNothing ? f_zero() : f_exp2(kept(g) - base);
        total = total + p;
        if constexpr (kInt8Keys<Dot>) p = p * f_load(chunk.value_scales[g]);
        if constexpr (is_words) {
            heaviest = f_max(heaviest, p);
            finite = f_fma(p, f_zero(), finite);
            keep(g, p);
        } else if constexpr (is_float) {
            f_store(reinterpret_cast<float*>(weights) + g * kGroup, p);
        } else {
            f_store_bf16(reinterpret_cast<uint16_t*>(weights) + g * kGroup, p);
        }
    }
    largest = peak;
    sum = f_sum(total);
    if constexpr (is_words) {
        const float limit = f_hmax(heaviest);
        const F factor = f_set(factor_of_words(limit));
        scale = limit / kMostWord + f_sum(finite);
#pragma GCC unroll 8
        for (int g = 0; g < (kAllSeen ? kChunkGroups : groups); g++) f_store_i16(reinterpret_cast<int16_t*>(weights) + g * kGroup, kept(g) * factor);
    }
}

// Scores of a chunk to weights, row by row: fills scratch.weights and scratch.chunk. Meanwhile each row asks for its share of the
// next values' `lines`: the products ask for the keys, and memory is to be busy all the time.
template <class Dot, bool kCapped>
void weigh_scores(const QueryTile& tile, const Chunk& chunk, const Chunk& next, int lines, float cap, AttentionScratch& scratch) {
    constexpr bool is_float = std::is_same_v<Dot, DotFloat32>;
    const int start = chunk.start, groups = chunk.groups, rows = tile.rows(), lines_of_row = (lines + rows - 1) / rows;
    const size_t weight_stride = kChunk * (is_float ? 4 : 2);
    float *scores = scratch.scores.get(), *peaks = scratch.chunk.peaks.data(), *totals = scratch.chunk.totals.data(), *scales = scratch.weight_scales.get();
    uint8_t* weights = scratch.weights.get();
    for (int row = 0, line = 0, query = tile.position; query < tile.position + tile.num_queries; query++) {
        const int visible = query + 1 - start, hidden = tile.first_visible(query) - start;
        const bool all_seen = groups == kChunkGroups && visible >= kChunk && hidden <= 0;
        for (int head = 0; head < tile.num_groups; head++, row++, scores += kChunk, weights += weight_stride) {
            for (const int last = std::min(line + lines_of_row, lines); line < last; line++)
                for (int g = 0; g < groups; g++) prefetch_far(next.values[g] + line * 64);
            if (all_seen) weigh_row<Dot, kCapped, true>(chunk, groups, visible, hidden, cap, scores, weights, peaks[row], totals[row], scales[row]);
            else weigh_row<Dot, kCapped, false>(chunk, groups, visible, hidden, cap, scores, weights, peaks[row], totals[row], scales[row]);
            if constexpr (!is_float && kHasTiles)  // tiles take groups in twos
                if (groups % 2) f_store_bf16(reinterpret_cast<uint16_t*>(weights) + groups * kGroup, f_zero());
        }
    }
}

// Fills scratch.output: weights x values of a chunk.
template <class Dot>
void mix(const Chunk& chunk, int rows, int dim, AttentionScratch& scratch) {
    constexpr bool is_float = std::is_same_v<Dot, DotFloat32>;
    constexpr int pair = is_float ? 1 : 2, panel_bytes = kGroup * kPanel * (is_float ? 4 : kInt8Keys<Dot> ? 1 : 2);
    const size_t stride = kChunk * (is_float ? 4 : 2);
    const float* scales = scratch.weight_scales.get();
    for (int column = 0; column < dim; column += 4 * kPanel) {
        const int panel = column / kPanel;
        const auto panels = [&](int g, int j, bool) { return chunk.values[g] + (panel + j) * panel_bytes; };
        float* out = scratch.output.get() + column;
        switch (std::min(4, dim / kPanel - panel)) {
            case 1: small_rows<Dot, 1>(scratch.weights.get(), stride, rows, chunk.groups, kGroup / pair, panels, scales, out, dim); break;
            case 2: small_rows<Dot, 2>(scratch.weights.get(), stride, rows, chunk.groups, kGroup / pair, panels, scales, out, dim); break;
            case 3: small_rows<Dot, 3>(scratch.weights.get(), stride, rows, chunk.groups, kGroup / pair, panels, scales, out, dim); break;
            default: small_rows<Dot, 4>(scratch.weights.get(), stride, rows, chunk.groups, kGroup / pair, panels, scales, out, dim); break;
        }
    }
}

// Attention of a tile's rows to one chunk of keys: fills scratch.chunk and scratch.output. `next`, the chunk that comes after it
// (or the same), is asked for meanwhile: groups lie apart in memory, and the processor's own prefetcher learns a stream only from
// its first lines.
template <class Dot>
void attend_chunk(const AttentionShape& shape, const QueryTile& tile, const Chunk& chunk, const Chunk& next, AttentionScratch& scratch) {
    constexpr bool is_float = std::is_same_v<Dot, DotFloat32>;
    constexpr int pair = is_float ? 1 : 2, panel_bytes = kGroup * kPanel * (is_float ? 4 : kInt8Keys<Dot> ? 1 : 2);
    const int groups = chunk.groups, rows = tile.rows(), dim = shape.value_dim;
    const bool on_tiles = takes_tiles<Dot>(shape);
    if (on_tiles) {
        score_on_tiles<kInt8Keys<Dot>>(shape, tile, chunk, next, scratch);
    } else if constexpr (!std::is_same_v<Dot, OnTilesInt8>) {
        for (int g = 0; g < groups; g += 4) {
            const auto panels = [&](int, int j, bool ahead) { return (ahead ? next : chunk).keys[g + j]; };
            small_rows<Dot, 4>(tile.queries, tile.stride, rows, 1, shape.key_dim / pair, panels, tile.query_scales, scratch.scores.get() + g * kGroup, kChunk);
        }
    }
    const int value_bytes = panel_bytes * (dim / kPanel), lines = value_bytes / 64;
    if (shape.cap) weigh_scores<Dot, true>(tile, chunk, next, lines, shape.cap, scratch);
    else weigh_scores<Dot, false>(tile, chunk, next, lines, 0, scratch);
    if (on_tiles) mix_on_tiles<kInt8Keys<Dot>>(shape, tile, chunk, scratch);
    else if constexpr (!std::is_same_v<Dot, OnTilesInt8>) mix<Dot>(chunk, rows, dim, scratch);
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

// `format`: of keys and values as attend_chunk gets them.
template <class Visit>
auto with_dot(int format, const AttentionShape& shape, const Visit& visit) {
    if (format == kFloat32) return visit(DotFloat32{});
    if (format == kBFloat16) return visit(DotBFloat16{});
    if constexpr (kHasTiles)
        if (fits_tiles(shape)) return visit(OnTilesInt8{});
    return visit(DotInt8AsWords{});
}

}  // namespace pdmesh
