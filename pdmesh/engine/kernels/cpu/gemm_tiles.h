// Products on the processor's matrix tiles (tiles.h), where it has them: blocks of up to 32 rows x 2 panels, 16 units a step.
//
// Bits. int8 sums are exact, so a row has the bits that vectors give it. bf16 sums have the order of the instruction, so all rows
// take this way, however few.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "abi.h"
#include "panels.h"
#include "simd.h"
#include "tiles.h"

namespace pdmesh {

template <int Format>
constexpr bool kHasTileProduct = kHasTiles && (Format == kInt8 || Format == kBFloat16);
// Below, vectors do it in the time that memory takes to send the weights.
template <int Format>
constexpr int kFewestTileRows = Format == kInt8 ? 4 : 1;

constexpr int kStepUnits = kTileHeight, kStepBytes = kStepUnits * kUnit;  // of a panel, multiplied at once
constexpr int kBlockRows = 2 * kTileHeight;

#if defined(PDMESH_ISA_AMX)

template <int Format, int C, int A, int B>
[[gnu::always_inline]] inline void tile_dot() {
    if constexpr (Format == kInt8) tile_dot_s8u8<C, A, B>();
    else tile_dot_bf16<C, A, B>();
}

// Sums of one block: [row][panel][output], int32 or float32.
struct alignas(64) BlockSums {
    int32_t numbers[kBlockRows][2][kPanel];
};

// One block of a product, `steps` steps long: rows at `a` (RT tiles of 16), panels at w. The sums go to `out`, rows `out_stride`
// bytes apart, a panel's beside the other's. beside(step) is called in each step: work that vectors do while the tiles multiply.
template <int Format, int RT, int NR, class Beside>
[[gnu::always_inline]] inline void multiply_block(const uint8_t* a, size_t stride, const uint8_t* const (&w)[NR], int steps, void* out, size_t out_stride,
                                                  const Beside& beside) {
    tile_zero<0>();
    if constexpr (NR == 2) tile_zero<1>();
    if constexpr (RT == 2) tile_zero<2>();
    if constexpr (RT == 2 && NR == 2) tile_zero<3>();
    for (int step = 0; step < steps; step++, a += kUnit) {
        tile_load<6>(w[0] + static_cast<size_t>(step) * kStepBytes, kUnit);
        tile_load<4>(a, stride);
        tile_dot<Format, 0, 4, 6>();
        if constexpr (NR == 2) {
            tile_load<7>(w[NR - 1] + static_cast<size_t>(step) * kStepBytes, kUnit);
            tile_dot<Format, 1, 4, 7>();
        }
        if constexpr (RT == 2) {
            tile_load<5>(a + kTileHeight * stride, stride);
            tile_dot<Format, 2, 5, 6>();
            if constexpr (NR == 2) tile_dot<Format, 3, 5, 7>();
        }
        beside(step);
    }
    auto* upper = static_cast<uint8_t*>(out);
    uint8_t* lower = upper + kTileHeight * out_stride;
    tile_store<0>(upper, out_stride);
    if constexpr (NR == 2) tile_store<1>(upper + kUnit, out_stride);
    if constexpr (RT == 2) tile_store<2>(lower, out_stride);
    if constexpr (RT == 2 && NR == 2) tile_store<3>(lower + kUnit, out_stride);
}

// One row of a block from sums to floats, with the units that fill no step, scales and bias: to `emit`.
template <int Format, int NR, class Emit>
[[gnu::always_inline]] inline void emit_sums(const PdmeshLinear& linear, const Rows& rows, int row, int panel, const uint8_t* const (&w)[NR],
                                             const int32_t* sums, const Emit& emit) {
    using Dot = std::conditional_t<Format == kInt8, DotInt8, DotBFloat16>;
    const int done = rows.units / kStepUnits * kStepUnits;
    typename Dot::Acc acc[1][NR];
    F out[NR];
#pragma GCC unroll 2
    for (int j = 0; j < NR; j++) {
        if constexpr (Format == kInt8) acc[0][j] = i_load(sums + j * kPanel);
        else acc[0][j] = f_load(reinterpret_cast<const float*>(sums) + j * kPanel);
    }
    if (done < rows.units) {
        const uint8_t* rest[NR];
        for (int j = 0; j < NR; j++) rest[j] = w[j] + static_cast<size_t>(done) * kUnit;
        tile<Dot, 1, NR>(rows.data + row * rows.stride + done * 4, rows.stride, rest, rows.units - done, nullptr, acc);
    }
    if constexpr (Format == kInt8) {
        finish_int8<NR>(linear, rows, row, panel, w, acc[0], out);
    } else {
#pragma GCC unroll 2
        for (int j = 0; j < NR; j++) out[j] = acc[0][j];
    }
    if (linear.bias) {
#pragma GCC unroll 2
        for (int j = 0; j < NR; j++) out[j] = out[j] + f_load(linear.bias + (panel + j) * kPanel);
    }
    emit(row, panel, out);
}

// Rows [begin, end) of NR panels. A block's sums are emitted while the next block is multiplied. `is_ahead`: meanwhile the panels
// that follow are asked for.
template <int Format, int NR, class Emit>
[[gnu::noinline]] void emit_tile_rows(const PdmeshLinear& linear, const Rows& rows, int begin, int end, int panel, bool is_ahead, const Emit& emit) {
    const size_t panel_bytes = static_cast<size_t>(rows.units) * kUnit;
    const int steps = rows.units / kStepUnits;
    const uint8_t* w[NR];
    for (int j = 0; j < NR; j++) w[j] = linear.packed + (panel + j) * panel_bytes;
    BlockSums sums[2];
    int waiting = begin, waiting_end = begin, waiting_first = begin, number = 0;  // rows of the block before, from `waiting` on not emitted
    const auto emit_until = [&](int last) {
        for (; waiting < last; waiting++) {
            if constexpr (requires { emit.ask(0, 0); })
                if (waiting + kBlockRows < end) emit.ask(waiting + kBlockRows, panel);
            emit_sums<Format, NR>(linear, rows, waiting, panel, w, sums[(number + 1) % 2].numbers[waiting - waiting_first][0], emit);
        }
    };
    for (int row = begin; row < end; number++) {
        const int count = std::min(kBlockRows, end - row), at_once = (waiting_end - waiting + steps - 1) / std::max(1, steps);
        const auto beside = [&](int step) {
            if (is_ahead && row == begin)
                for (int j = 0; j < NR; j++)
                    for (int line = 0; line < kStepUnits; line++) prefetch_far(w[j] + NR * panel_bytes + static_cast<size_t>(step) * kStepBytes + line * kUnit);
            emit_until(std::min(waiting + at_once, waiting_end));
        };
        const uint8_t* a = rows.data + row * rows.stride;
        if (count > kTileHeight) multiply_block<Format, 2, NR>(a, rows.stride, w, steps, &sums[number % 2], sizeof sums[0].numbers[0], beside);
        else multiply_block<Format, 1, NR>(a, rows.stride, w, steps, &sums[number % 2], sizeof sums[0].numbers[0], beside);
        emit_until(waiting_end);
        waiting = waiting_first = row;
        waiting_end = row += count;
    }
    emit_until(waiting_end);
}

template <int Format, class Emit>
void emit_tiles(const PdmeshLinear& linear, const Rows& rows, int begin, int end, int panel, int count, const Emit& emit) {
    for (const int last = panel + count; panel < last;) {
        const int left = last - panel;
        if (left >= 2) emit_tile_rows<Format, 2>(linear, rows, begin, end, panel, left >= 4, emit);
        else if constexpr (!Emit::kPairs) emit_tile_rows<Format, 1>(linear, rows, begin, end, panel, false, emit);  // pairs come in twos
        panel += 2;
    }
}

// Rows that an item of a product of many rows takes: as many as stay in a core's second cache, in whole blocks of about equal size.
inline int item_rows_of_tiles(const Rows& rows, int num_rows) {
    constexpr size_t kept_bytes = 768 << 10;
    const int most = static_cast<int>(std::clamp<size_t>(kept_bytes / rows.stride, 64, 512)), parts = (num_rows + most - 1) / most;
    return (num_rows / std::max(1, parts) / kBlockRows + 1) * kBlockRows;
}

#else

template <int Format, class Emit>
void emit_tiles(const PdmeshLinear&, const Rows&, int, int, int, int, const Emit&) {}
inline int item_rows_of_tiles(const Rows&, int) { return 0; }

#endif

}  // namespace pdmesh
