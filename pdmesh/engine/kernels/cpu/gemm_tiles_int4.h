// Products with int4 weights on the processor's matrix tiles: integers within a group on tiles, groups added up by vectors.
//
// A group of 32 inputs fills half a tile, so its other half is zeros: then one tile of activations serves two groups.
// Bits: integers are exact, and groups add up as product_int4 (gemm.h) adds them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "gemm_tiles.h"

namespace pdmesh {

constexpr int kTileGroup = 32;       // inputs of a group that this way takes
constexpr int kMostInt4Rows = 128;   // whose sums stay in a core's first cache
constexpr int kFewestInt4Rows = 12;

inline bool int4_fits_tiles(const PdmeshLinear& linear) { return kHasTiles && linear.group == kTileGroup; }

#if defined(PDMESH_ISA_AMX)

constexpr int kHalfTile = kStepBytes / 2;

// Two groups of a panel, a byte for each number: zeros, group, zeros, group, zeros.
struct alignas(64) WideGroups {
    uint8_t bytes[5 * kHalfTile] = {};
    const uint8_t* tile(int group) const { return bytes + (group ? 2 : 1) * kHalfTile; }
    [[gnu::always_inline]] void widen(int group, const uint8_t* packed) {
        uint8_t* to = bytes + (group ? 3 : 1) * kHalfTile;
        for (int step = 0; step < kTileGroup / 8; step++, packed += kUnit, to += 2 * kUnit) {
            const I both = i_load(packed);
            i_store(to, i_low_nibbles(both));
            i_store(to + kUnit, i_high_nibbles(both));
        }
    }
};

// One group's integers of up to 32 rows and NR panels, from the activations in tiles 4 and 5.
template <int RT, int NR>
[[gnu::always_inline]] inline void multiply_group(const WideGroups (&wide)[NR], int group, BlockSums& sums) {
    constexpr size_t stride = sizeof sums.numbers[0];
    tile_load<6>(wide[0].tile(group), kUnit);
    tile_zero<0>();
    tile_dot_s8u8<0, 4, 6>();
    tile_store<0>(sums.numbers[0][0], stride);
    if constexpr (RT == 2) {
        tile_zero<2>();
        tile_dot_s8u8<2, 5, 6>();
        tile_store<2>(sums.numbers[kTileHeight][0], stride);
    }
    if constexpr (NR == 2) {
        tile_load<7>(wide[NR - 1].tile(group), kUnit);
        tile_zero<1>();
        tile_dot_s8u8<1, 4, 7>();
        tile_store<1>(sums.numbers[0][1], stride);
        if constexpr (RT == 2) {
            tile_zero<3>();
            tile_dot_s8u8<3, 5, 7>();
            tile_store<3>(sums.numbers[kTileHeight][1], stride);
        }
    }
}

// A group's integers of `count` rows from `row` on, scaled, to out[row of the block][panel].
template <int NR>
[[gnu::always_inline]] inline void add_group(const Rows& rows, int row, int count, int group, const uint8_t* const (&factors)[NR], const BlockSums& sums,
                                             float (*out)[NR][kPanel]) {
    F scale[NR], minimum[NR];
    for (int j = 0; j < NR; j++) {
        const auto* halves = reinterpret_cast<const uint16_t*>(factors[j]);
        scale[j] = f_load_f16(halves);
        minimum[j] = f_load_f16(halves + kPanel);
    }
    for (int r = 0; r < count; r++) {
        const size_t at = static_cast<size_t>(row + r) * rows.num_groups + group;
        const F sum = f_from(i_broadcast(rows.sums + at)), row_scale = f_set(rows.scales[at]);
#pragma GCC unroll 2
        for (int j = 0; j < NR; j++) {
            const F product = f_fma(scale[j], f_from(i_load(sums.numbers[r][j])), minimum[j] * sum);
            f_store(out[r][j], f_fma(product, row_scale, f_load(out[r][j])));
        }
    }
}

// Rows [begin, end), at most kMostInt4Rows, of NR panels.
template <int NR, class Emit>
[[gnu::noinline]] void emit_int4_rows(const PdmeshLinear& linear, const Rows& rows, int begin, int end, int panel, bool is_ahead, const Emit& emit) {
    constexpr size_t number_bytes = kTileGroup / 8 * kUnit, group_bytes = number_bytes + kUnit;
    const size_t panel_bytes = group_bytes * rows.num_groups;
    alignas(64) float out[kMostInt4Rows][NR][kPanel];
    WideGroups wide[NR];
    BlockSums sums[2];
    std::fill_n(&out[0][0][0], (end - begin) * NR * kPanel, 0.0f);
    for (int first = 0; first < rows.num_groups; first += 2) {
        const int groups = std::min(2, rows.num_groups - first);
        const uint8_t* factors[2][NR];
        for (int g = 0; g < groups; g++)
            for (int j = 0; j < NR; j++) {
                const uint8_t* packed = linear.packed + (panel + j) * panel_bytes + (first + g) * group_bytes;
                wide[j].widen(g, packed);
                factors[g][j] = packed + number_bytes;
                if (is_ahead)
                    for (size_t at = 0; at < group_bytes; at += kUnit) prefetch_far(packed + NR * panel_bytes + at);
            }
        for (int row = begin; row < end; row += kBlockRows) {
            const int count = std::min(kBlockRows, end - row);
            const uint8_t* a = rows.data + row * rows.stride + first * kTileGroup;
            tile_load<4>(a, rows.stride);
            if (count > kTileHeight) {
                tile_load<5>(a + kTileHeight * rows.stride, rows.stride);
                for (int g = 0; g < groups; g++) multiply_group<2, NR>(wide, g, sums[g]);
            } else {
                for (int g = 0; g < groups; g++) multiply_group<1, NR>(wide, g, sums[g]);
            }
            for (int g = 0; g < groups; g++) add_group<NR>(rows, row, count, first + g, factors[g], sums[g], out + (row - begin));
        }
    }
    for (int row = begin; row < end; row++) {
        F result[NR];
#pragma GCC unroll 2
        for (int j = 0; j < NR; j++) {
            result[j] = f_load(out[row - begin][j]);
            if (linear.bias) result[j] = result[j] + f_load(linear.bias + (panel + j) * kPanel);
        }
        emit(row, panel, result);
    }
}

template <class Emit>
void emit_int4_tiles(const PdmeshLinear& linear, const Rows& rows, int begin, int end, int panel, int count, const Emit& emit) {
    for (const int last = panel + count; panel < last; panel += 2)
        for (int row = begin; row < end; row += kMostInt4Rows) {
            const int until = std::min(row + kMostInt4Rows, end), left = last - panel;
            const bool is_ahead = row == begin && left >= 4;
            if (left >= 2) emit_int4_rows<2>(linear, rows, row, until, panel, is_ahead, emit);
            else if constexpr (!Emit::kPairs) emit_int4_rows<1>(linear, rows, row, until, panel, false, emit);  // pairs come in twos
        }
}

#else

template <class Emit>
void emit_int4_tiles(const PdmeshLinear&, const Rows&, int, int, int, int, const Emit&) {}

#endif

}  // namespace pdmesh
