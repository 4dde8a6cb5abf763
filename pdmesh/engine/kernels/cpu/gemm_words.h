// Products of many int8 rows with int8 weights in int16, on processors that multiply pairs of int16 and have no such instruction for
// bytes: fewer instructions a product than bytes take there (dot_weights). The integers are the same, and so are all bits.
//
// Weights and rows are widened to int16, a block of inputs at a time that stays in the caches; sums are kept beside them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "abi.h"
#include "panels.h"
#include "simd.h"

namespace pdmesh {

constexpr int kFewestWordRows = 24;  // below, widening the weights takes more than it saves: measured

#if defined(PDMESH_WIDENED_INT8)

constexpr bool kMultipliesWords = true;
constexpr int kWordInputs = 256;  // of a block
constexpr int kMostWordRows = 96, kWordPanels = 4;

// int16 in memory and in the product: one pair of inputs of 16 outputs in 64 bytes.
struct DotWords {
    using Acc = I;
    static constexpr TileRoom kRoom = kWordsRoom;
    static constexpr int kStep = kUnit;
    static Acc zero() { return i_zero(); }
    static I load(const uint8_t* w) { return i_load(w); }
    static Acc dot(Acc acc, I w, I a) { return dot_words(acc, w, a); }
};

// Buffers of one thread.
struct WordBlock {
    alignas(64) int16_t rows[kMostWordRows][kWordInputs];
    alignas(64) uint8_t weights[kWordInputs / 2][kUnit];
    alignas(64) int32_t sums[kMostWordRows][kWordPanels][kPanel];
};
inline WordBlock& word_block() {
    static thread_local WordBlock block;
    return block;
}

// Adds rows x one panel's block of `pairs` pairs to the sums, which are begun at the first block.
template <int MR>
[[gnu::always_inline]] inline void add_words(WordBlock& block, int row, int panel, int pairs, bool is_first) {
    I acc[MR][1];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) acc[i][0] = is_first ? i_zero() : i_load(block.sums[row + i][panel]);
    const uint8_t* const w[1] = {block.weights[0]};
    tile<DotWords, MR, 1>(reinterpret_cast<const uint8_t*>(block.rows[row]), sizeof block.rows[0], w, pairs, nullptr, acc);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) i_store(block.sums[row + i][panel], acc[i][0]);
}

[[gnu::noinline]] inline void add_word_rows(WordBlock& block, int num_rows, int panel, int pairs, bool is_first) {
    constexpr int high = DotWords::kRoom.rows(6);
    int row = 0;
    for (; num_rows - row >= high; row += high) add_words<high>(block, row, panel, pairs, is_first);
    for (; num_rows - row >= 2; row += 2) add_words<2>(block, row, panel, pairs, is_first);
    if (row < num_rows) add_words<1>(block, row, panel, pairs, is_first);
}

// One row's sums of NR panels, the first of which is the block's `number`-th, to outputs.
template <int NR, class Emit>
[[gnu::always_inline]] inline void emit_word_sums(const PdmeshLinear& linear, const Rows& rows, const WordBlock& block, int begin, int r, int panel, int number,
                                                  const Emit& emit) {
    const size_t panel_bytes = static_cast<size_t>(rows.units) * kUnit;
    const uint8_t* w[NR];
    I acc[NR];
    F out[NR];
    for (int j = 0; j < NR; j++) {
        w[j] = linear.packed + (panel + j) * panel_bytes;
        acc[j] = i_load(block.sums[r][number + j]);
    }
    finish_int8<NR>(linear, rows, begin + r, panel, w, acc, out);
    if (linear.bias)
        for (int j = 0; j < NR; j++) out[j] = out[j] + f_load(linear.bias + (panel + j) * kPanel);
    emit(begin + r, panel, out);
}

// Rows [begin, end), at most kMostWordRows, of at most kWordPanels panels. `is_ahead`: the panels that follow are asked for.
template <class Emit>
[[gnu::noinline]] void emit_word_rows(const PdmeshLinear& linear, const Rows& rows, int begin, int end, int panel, int count, bool is_ahead, const Emit& emit) {
    WordBlock& block = word_block();
    const size_t panel_bytes = static_cast<size_t>(rows.units) * kUnit;
    const int num_rows = end - begin, inputs = rows.units * 4;
    for (int first = 0; first < inputs; first += kWordInputs) {
        const int block_inputs = std::min(kWordInputs, inputs - first);
        for (int r = 0; r < num_rows; r++) {
            const auto* numbers = reinterpret_cast<const int8_t*>(rows.data + (begin + r) * rows.stride) + first;
            for (int i = 0; i < block_inputs; i += 32) i_store(block.rows[r] + i, words_from_i8(numbers + i));  // rows are padded
        }
        for (int j = 0; j < count; j++) {
            const uint8_t* units = linear.packed + (panel + j) * panel_bytes + static_cast<size_t>(first) / 4 * kUnit;
            for (int u = 0; u < block_inputs / 4; u++) {
                widen_unit(units + static_cast<size_t>(u) * kUnit, block.weights[2 * u]);
                if (is_ahead) prefetch_far(units + kWordPanels * panel_bytes + static_cast<size_t>(u) * kUnit);
            }
            add_word_rows(block, num_rows, j, block_inputs / 2, first == 0);
        }
    }
    for (int r = 0; r < num_rows; r++)
        for (int j = 0; j < count; j += 2) {
            if (count - j >= 2) emit_word_sums<2>(linear, rows, block, begin, r, panel + j, j, emit);
            else if constexpr (!Emit::kPairs) emit_word_sums<1>(linear, rows, block, begin, r, panel + j, j, emit);  // pairs come in twos
        }
}

template <class Emit>
void emit_words(const PdmeshLinear& linear, const Rows& rows, int begin, int end, int panel, int count, const Emit& emit) {
    for (const int last = panel + count; panel < last; panel += kWordPanels)
        for (int row = begin; row < end; row += kMostWordRows) {
            const bool is_ahead = row == begin && last - panel >= 2 * kWordPanels;
            emit_word_rows(linear, rows, row, std::min(row + kMostWordRows, end), panel, std::min(kWordPanels, last - panel), is_ahead, emit);
        }
}

#else

constexpr bool kMultipliesWords = false;
template <class Emit>
void emit_words(const PdmeshLinear&, const Rows&, int, int, int, int, const Emit&) {}

#endif

}  // namespace pdmesh
