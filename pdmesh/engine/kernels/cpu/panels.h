// Packed weights, rows of activations, and the inner loop that multiplies them.
//
// A weight matrix lies in panels of 16 outputs; a panel is a stream of 64-byte units, 4 bytes of input for each of 16 outputs:
//
//     unit u:  | out 0: w[4u..4u+3] | out 1: w[4u..4u+3] | ... | out 15 |        (int8; bf16: 2 inputs, float32: 1)
//
// so that one vector instruction adds a unit's part to 16 outputs at once, and no sum over lanes is ever needed. A tile is MR
// rows x NR panels held in registers: each unit of weights is loaded once for MR rows, each 4 bytes of a row once for NR panels.
//
// Bits. Every output is one chain of additions over its units in order (int4: over its groups in order), however many rows and
// panels a tile has: the result of a row does not depend on the rows beside it, nor on which tile shape was chosen.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi.h"
#include "simd.h"

namespace pdmesh {

constexpr int kPanel = 16;  // outputs of a panel: lanes of a vector
constexpr int kUnit = 64;   // bytes of a unit
constexpr int kMostGroup = 128;  // inputs of an int4 group
constexpr size_t kNearBytes = 32 << 10;  // of weights that surely stay in a core's first cache

inline int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// Rows of activations in the form that a weight format multiplies with. `data`: float32, bf16 or int8 numbers, rows `stride`
// bytes apart (a multiple of 64), of `units` times 4 bytes, padded with zeros. int8 rows have for each group of inputs (one group
// for int8 weights) a scale and the sum of their numbers. Rows for int8 weights have outliers too.
struct Outliers;
struct Rows {
    uint8_t* data;
    size_t stride;
    int units;
    float* scales;
    int32_t* sums;
    int num_groups;
    Outliers* outliers;
};

// What a few units of an int8 row exceed the range of the others by. One scale for a whole row of activations would be set by one
// or two of them, and leave the others four or five bits (Dettmers et al., LLM.int8(), 2022); so a row is
// scale * data + outliers.scale * (the excess of kOutliers units). Measured: see benchmarks/accuracy.py.
constexpr int kOutliers = 4;
struct Outliers {
    float scale;
    int32_t sum;
    int32_t unit[kOutliers];
    int32_t excess[kOutliers];  // 4 int8 each
};

struct DotFloat32 {
    using Acc = F;
    static constexpr TileRoom kRoom = kFloatRoom;
    static constexpr int kStep = 64;
    static Acc zero() { return f_zero(); }
    static I load(const uint8_t* w) { return i_load(w); }
    static Acc dot(Acc acc, I w, I a) { return f_fma(f_bits(w), f_bits(a), acc); }
};
struct DotBFloat16 {
    using Acc = F;
    static constexpr TileRoom kRoom = kBFloat16Room;
    static constexpr int kStep = 64;
    static Acc zero() { return f_zero(); }
    static I load(const uint8_t* w) { return i_load(w); }
    static Acc dot(Acc acc, I w, I a) { return dot_bf16(acc, w, a); }
};
struct DotWideBFloat16 {  // bf16 in memory, one input of 16 outputs in 32 bytes; float32 in the product
    using Acc = F;
    static constexpr TileRoom kRoom = kFloatRoom;
    static constexpr int kStep = 32;
    static Acc zero() { return f_zero(); }
    static F load(const uint8_t* w) { return f_load_bf16(reinterpret_cast<const uint16_t*>(w)); }
    static Acc dot(Acc acc, F w, I a) { return f_fma(w, f_bits(a), acc); }
};
struct DotInt8 {  // weights w + 128, activations signed
    using Acc = I;
    static constexpr TileRoom kRoom = kInt8Room;
    static constexpr int kStep = 64;
    static Acc zero() { return i_zero(); }
    using Weights = decltype(i_weights(nullptr));
    static Weights load(const uint8_t* w) { return i_weights(w); }
    static Acc dot(Acc acc, const Weights& w, I a) { return dot_weights(acc, w, a); }
};
// int8 in memory, int16 in the product: the KV cache, whose rows of probabilities and queries are int16. Twice the multiplications
// of float32 an instruction, exact sums, and rows that are rounded 128 times finer than int8 would be.
struct DotInt8AsWords {
    using Acc = I;
    static constexpr TileRoom kRoom = kWordsRoom;
    static constexpr int kStep = 32;
    static Acc zero() { return i_zero(); }
    using Weights = decltype(words_from_i8(nullptr));
    static Weights load(const uint8_t* w) { return words_from_i8(reinterpret_cast<const int8_t*>(w)); }
    static Acc dot(Acc acc, const Weights& w, I a) { return dot_words(acc, w, a); }
};

// acc[i][j] += row i x panel j over `units`. `next`: panels to be asked for unit by unit meanwhile, or null.
template <class Dot, int MR, int NR>
[[gnu::always_inline]] inline void tile(const uint8_t* a, size_t stride, const uint8_t* const (&w)[NR], int units,
                                        const uint8_t* const* next, typename Dot::Acc (&acc)[MR][NR]) {
    for (int u = 0; u < units; u++) {
        decltype(Dot::load(nullptr)) weights[NR];
#pragma GCC unroll 8
        for (int j = 0; j < NR; j++) weights[j] = Dot::load(w[j] + static_cast<size_t>(u) * Dot::kStep);
        if (next) {
#pragma GCC unroll 8
            for (int j = 0; j < NR; j++) prefetch_far(next[j] + static_cast<size_t>(u) * Dot::kStep);
        }
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) {
            const I x = i_broadcast(a + i * stride + u * 4);
#pragma GCC unroll 8
            for (int j = 0; j < NR; j++) acc[i][j] = Dot::dot(acc[i][j], weights[j], x);
        }
    }
}

// The rest of an int8 row: its outliers, then scales.
template <int NR>
[[gnu::always_inline]] inline void finish_int8(const PdmeshLinear& linear, const Rows& rows, int row, int panel,
                                               const uint8_t* const (&w)[NR], const I (&acc)[NR], F (&out)[NR]) {
    const Outliers& outliers = rows.outliers[row];
    I excess[NR];
#pragma GCC unroll 8
    for (int j = 0; j < NR; j++) excess[j] = i_zero();
#pragma GCC unroll 4
    for (int t = 0; t < kOutliers; t++) {
        const I x = i_broadcast(&outliers.excess[t]);
#pragma GCC unroll 8
        for (int j = 0; j < NR; j++) excess[j] = dot_weights(excess[j], i_weights(w[j] + static_cast<size_t>(outliers.unit[t]) * kUnit), x);
    }
    const I sum = i_broadcast(rows.sums + row), excess_sum = i_broadcast(&outliers.sum);
    const F scale = f_set(rows.scales[row]), excess_scale = f_set(outliers.scale);
#pragma GCC unroll 8
    for (int j = 0; j < NR; j++) {
        const F all = f_fma(f_from(i_products(excess[j], excess_sum)), excess_scale, f_from(i_products(acc[j], sum)) * scale);
        out[j] = all * f_load(linear.scales + (panel + j) * kPanel);
    }
}

}  // namespace pdmesh
