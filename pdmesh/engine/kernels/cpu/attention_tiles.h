// The two products of attention on the processor's matrix tiles (tiles.h), where it has them.
//
// Keys of a group are tiles as they lie. Values of a group fill half a tile, so two groups are laid side by side; int8 numbers are
// widened to bf16 first. Bits: all rows take this way, however few, and keys that a row does not see add zeros.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "attention_chunk.h"
#include "gemm_tiles.h"

namespace pdmesh {

// Keys must fill whole steps: what lies behind a row is another's.
inline bool fits_tiles(const AttentionShape& shape) { return kHasTiles && shape.key_dim / 2 % kStepUnits == 0; }

#if defined(PDMESH_ISA_AMX)

// One panel of `units` units to bf16.
template <bool kInt8Numbers>
[[gnu::always_inline]] inline void copy_units(const uint8_t* from, int units, uint8_t* to) {
    for (int u = 0; u < units; u++) {
        if constexpr (kInt8Numbers) i_store(to + u * kUnit, bf16_from_i8(reinterpret_cast<const int8_t*>(from) + u * kUnit / 2));
        else i_store(to + u * kUnit, i_load(from + u * kUnit));
    }
}

// out[rows][NR panels] = rows at `a` x panels w, in blocks of up to 32 rows. beside(step) is called during the first block.
template <int NR, class Beside>
[[gnu::always_inline]] inline void multiply_rows(const uint8_t* a, size_t stride, int rows, const uint8_t* const (&w)[NR], int steps, float* out, int out_stride,
                                                 const Beside& beside) {
    const size_t out_bytes = out_stride * sizeof(float);
    for (int row = 0; row < rows; row += kBlockRows) {
        const auto maybe = [&](int step) { if (row == 0) beside(step); };
        const uint8_t* block = a + row * stride;
        if (rows - row > kTileHeight) multiply_block<kBFloat16, 2, NR>(block, stride, w, steps, out + row * out_stride, out_bytes, maybe);
        else multiply_block<kBFloat16, 1, NR>(block, stride, w, steps, out + row * out_stride, out_bytes, maybe);
    }
}

// Fills scratch.scores: queries x keys of a chunk, two groups at a time; the keys of `next` are asked for meanwhile.
template <bool kInt8Numbers>
[[gnu::noinline]] void score_on_tiles(const AttentionShape& shape, const QueryTile& tile, const Chunk& chunk, const Chunk& next, AttentionScratch& scratch) {
    const int units = shape.key_dim / 2, steps = units / kStepUnits;
    constexpr int unit_bytes = kInt8Numbers ? kUnit / 2 : kUnit;
    for (int g = 0; g < chunk.groups; g += 2) {
        const uint8_t* w[2] = {chunk.keys[g], chunk.keys[g + 1]};
        if constexpr (kInt8Numbers) {
            for (int j = 0; j < 2; j++) {
                uint8_t* wide = scratch.panels.get() + j * static_cast<size_t>(units) * kUnit;
                copy_units<true>(w[j], units, wide);
                w[j] = wide;
            }
        }
        const auto ask = [&](int step) {
            for (int j = 0; j < 2; j++)
                for (int at = 0; at < kStepUnits * unit_bytes; at += 64) prefetch_far(next.keys[g + j] + step * kStepUnits * unit_bytes + at);
        };
        multiply_rows<2>(tile.queries, tile.stride, tile.rows(), w, steps, scratch.scores.get() + g * kGroup, kChunk, ask);
    }
}

// NR panels of a chunk's values into scratch.panels, and weights x those into scratch.output.
template <bool kInt8Numbers, int NR>
[[gnu::always_inline]] inline void mix_panels(const QueryTile& tile, const Chunk& chunk, int panel, int dim, AttentionScratch& scratch) {
    constexpr int units = kGroup / 2, panel_bytes = kGroup * kPanel * (kInt8Numbers ? 1 : 2), laid_bytes = kChunkGroups * units * kUnit;
    const int steps = (chunk.groups + 1) / 2;
    const uint8_t* w[NR];
    for (int j = 0; j < NR; j++) {
        uint8_t* laid = scratch.panels.get() + j * laid_bytes;
        for (int g = 0; g < 2 * steps; g++) copy_units<kInt8Numbers>(chunk.values[g] + (panel + j) * panel_bytes, units, laid + g * units * kUnit);
        w[j] = laid;
    }
    multiply_rows<NR>(scratch.weights.get(), kChunk * 2, tile.rows(), w, steps, scratch.output.get() + panel * kPanel, dim, [](int) {});
}

// Fills scratch.output, 32 dimensions at a time.
template <bool kInt8Numbers>
[[gnu::noinline]] void mix_on_tiles(const AttentionShape& shape, const QueryTile& tile, const Chunk& chunk, AttentionScratch& scratch) {
    const int panels = shape.value_dim / kPanel;
    for (int panel = 0; panel + 1 < panels; panel += 2) mix_panels<kInt8Numbers, 2>(tile, chunk, panel, shape.value_dim, scratch);
    if (panels % 2) mix_panels<kInt8Numbers, 1>(tile, chunk, panels - 1, shape.value_dim, scratch);
}

#else

template <bool>
void score_on_tiles(const AttentionShape&, const QueryTile&, const Chunk&, const Chunk&, AttentionScratch&) {}
template <bool>
void mix_on_tiles(const AttentionShape&, const QueryTile&, const Chunk&, AttentionScratch&) {}

#endif

}  // namespace pdmesh
