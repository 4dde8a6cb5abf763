// Products of a few to many rows with packed weights (panels.h), shared out over threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "abi.h"
#include "gemm_tiles.h"
#include "gemm_tiles_int4.h"
#include "gemm_words.h"
#include "panels.h"
#include "parallel.h"
#include "simd.h"

namespace pdmesh {

// One tile from a zero start to floats: out[i][j] = row i x panel (first + j), scales applied. `step`: how many panels later the
// one is that panel j asks for, where bit j of `ahead` is set.
template <class Dot, int MR, int NR>
inline void product(const PdmeshLinear& linear, const Rows& rows, int row, int panel, unsigned ahead, int step, F (&out)[MR][NR]) {
    const size_t panel_bytes = static_cast<size_t>(rows.units) * kUnit;
    const uint8_t *w[NR], *next[NR];
    typename Dot::Acc acc[MR][NR];
#pragma GCC unroll 8
    for (int j = 0; j < NR; j++) {
        w[j] = linear.packed + (panel + j) * panel_bytes;
        next[j] = w[j] + (ahead >> j & 1 ? step * panel_bytes : 0);  // what is asked for again costs next to nothing
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
        for (int j = 0; j < NR; j++) acc[i][j] = Dot::zero();
    const uint8_t* a = rows.data + row * rows.stride;
    if (ahead) tile<Dot, MR, NR>(a, rows.stride, w, rows.units, next, acc);
    else tile<Dot, MR, NR>(a, rows.stride, w, rows.units, nullptr, acc);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
        if constexpr (std::is_same_v<Dot, DotInt8>) {
            finish_int8<NR>(linear, rows, row + i, panel, w, acc[i], out[i]);
        } else {
#pragma GCC unroll 8
            for (int j = 0; j < NR; j++) out[i][j] = acc[i][j];
        }
    }
}

// Adds rows x panels of nibbles, units [first, last) of a group; `a`: where the first one's inputs are. Panel j asks for the unit
// `next` bytes later, where bit j of `ahead` is set.
template <int MR, int NR>
[[gnu::always_inline]] inline void add_nibbles(const uint8_t* a, size_t stride, const uint8_t* const (&w)[NR], int first, int last,
                                               unsigned ahead, size_t next, I (&acc)[MR][NR]) {
    for (int s = first; s < last; s++, a += 8) {
        I low[NR], high[NR];
#pragma GCC unroll 8
        for (int j = 0; j < NR; j++) {
            const I both = i_load(w[j] + s * kUnit);
            if (ahead >> j & 1) prefetch_far(w[j] + s * kUnit + next);
            low[j] = i_low_nibbles(both);
            high[j] = i_high_nibbles(both);
        }
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) {
            const I x = i_broadcast(a + i * stride), y = i_broadcast(a + i * stride + 4);
#pragma GCC unroll 8
            for (int j = 0; j < NR; j++) acc[i][j] = dot_nibbles(dot_nibbles(acc[i][j], low[j], x), high[j], y);
        }
    }
}

// The same for int4: integers are exact within a group; groups add up in float32, in order.
template <int MR, int NR>
inline void product_int4(const PdmeshLinear& linear, const Rows& rows, int row, int panel, unsigned ahead, int step, F (&out)[MR][NR]) {
    const int steps = linear.group / 8, groups = rows.num_groups;
    const size_t group_bytes = static_cast<size_t>(steps) * kUnit + kUnit, panel_bytes = group_bytes * groups;
    const uint8_t* a = rows.data + row * rows.stride;
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
        for (int j = 0; j < NR; j++) out[i][j] = f_zero();
    for (int g = 0; g < groups; g++) {
        const uint8_t* w[NR];
        I acc[MR][NR];
#pragma GCC unroll 8
        for (int j = 0; j < NR; j++) w[j] = linear.packed + (panel + j) * panel_bytes + g * group_bytes;
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
            for (int j = 0; j < NR; j++) acc[i][j] = i_zero();
        if constexpr (kNibbleSteps >= kMostGroup / 8) {
            add_nibbles<MR, NR>(a, rows.stride, w, 0, steps, ahead, step * panel_bytes, acc);
        } else {
            for (int s = 0; s < steps; s += kNibbleSteps) {
                I part[MR][NR];
#pragma GCC unroll 8
                for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
                    for (int j = 0; j < NR; j++) part[i][j] = i_zero();
                add_nibbles<MR, NR>(a + s * 8, rows.stride, w, s, std::min(steps, s + kNibbleSteps), ahead, step * panel_bytes, part);
#pragma GCC unroll 8
                for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
                    for (int j = 0; j < NR; j++) acc[i][j] = i_add_nibbles(acc[i][j], part[i][j]);
            }
        }
        a += steps * 8;
#pragma GCC unroll 8
        for (int j = 0; j < NR; j++) {
            const auto* halves = reinterpret_cast<const uint16_t*>(w[j] + steps * kUnit);
            const F scale = f_load_f16(halves), minimum = f_load_f16(halves + kPanel);
            if (ahead >> j & 1) prefetch_far(w[j] + steps * kUnit + step * panel_bytes);
#pragma GCC unroll 8
            for (int i = 0; i < MR; i++) {
                const size_t at = static_cast<size_t>(row + i) * groups + g;
                const F sum = f_from(i_broadcast(rows.sums + at));
                out[i][j] = f_fma(f_fma(scale, f_from(acc[i][j]), minimum * sum), f_set(rows.scales[at]), out[i][j]);
            }
        }
    }
}

template <int Format>
constexpr TileRoom kRoomOf = Format == kInt8 ? kInt8Room : Format == kInt4 ? kNibbleRoom : Format == kBFloat16 ? kBFloat16Room : kFloatRoom;

template <int Format, int MR, int NR>
inline void product_of(const PdmeshLinear& linear, const Rows& rows, int row, int panel, unsigned ahead, int step, F (&out)[MR][NR]) {
    if constexpr (constexpr int at_once = kRoomOf<Format>.panels_at_once(MR, NR); at_once < NR) {  // the registers do not hold it
        for (int j = 0; j < NR; j += at_once) {
            F part[MR][at_once];
            product_of<Format>(linear, rows, row, panel + j, ahead >> j, step, part);
#pragma GCC unroll 8
            for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
                for (int p = 0; p < at_once; p++) out[i][j + p] = part[i][p];
        }
    } else if constexpr (Format == kInt4)
        product_int4<MR, NR>(linear, rows, row, panel, ahead, step, out);
    else if constexpr (Format == kInt8)
        product<DotInt8, MR, NR>(linear, rows, row, panel, ahead, step, out);
    else if constexpr (Format == kBFloat16)
        product<DotBFloat16, MR, NR>(linear, rows, row, panel, ahead, step, out);
    else
        product<DotFloat32, MR, NR>(linear, rows, row, panel, ahead, step, out);
}

template <int Format, int MR, int NR, class Emit>
[[gnu::noinline]] void emit_tile(const PdmeshLinear& linear, const Rows& rows, int row, int panel, unsigned ahead, const Emit& emit) {
    F out[MR][NR];
    product_of<Format>(linear, rows, row, panel, ahead, NR, out);
    if (linear.bias) {
#pragma GCC unroll 8
        for (int j = 0; j < NR; j++) {
            const F bias = f_load(linear.bias + (panel + j) * kPanel);
#pragma GCC unroll 8
            for (int i = 0; i < MR; i++) out[i][j] = out[i][j] + bias;
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) emit(row + i, panel, out[i]);
}

// Tiles that fit the registers; int4 needs twice as many.
template <int Format>
constexpr int kTileRows = kRoomOf<Format>.rows(Format == kInt4 && kMostPanels >= 4 ? 4 : kMostRows);
template <int Format>
constexpr int kTilePanels = Format == kInt4 ? 2 : kMostPanels;

template <int Format>
constexpr int kPairRows = kTilePanels<Format> >= 4 ? 8 : kTileRows<Format>;  // of a tile of two panels

template <int Format, int kMost, int NR, class Emit>
void emit_height(const PdmeshLinear& linear, const Rows& rows, int row, int height, int panel, unsigned ahead, const Emit& emit) {
    switch (height) {
        case 1: return emit_tile<Format, 1, NR>(linear, rows, row, panel, ahead, emit);
        case 2: return emit_tile<Format, 2, NR>(linear, rows, row, panel, ahead, emit);
        case 3: return emit_tile<Format, 3, NR>(linear, rows, row, panel, ahead, emit);
        case 4: return emit_tile<Format, 4, NR>(linear, rows, row, panel, ahead, emit);
        case 5: if constexpr (kMost >= 5) return emit_tile<Format, 5, NR>(linear, rows, row, panel, ahead, emit); break;
        case 6: if constexpr (kMost >= 6) return emit_tile<Format, 6, NR>(linear, rows, row, panel, ahead, emit); break;
        case 7: if constexpr (kMost >= 7) return emit_tile<Format, 7, NR>(linear, rows, row, panel, ahead, emit); break;
        case 8: if constexpr (kMost >= 8) return emit_tile<Format, 8, NR>(linear, rows, row, panel, ahead, emit); break;
        default: break;
    }
}

// Rows [begin, end) in tiles of up to kMost, about equally high. `is_ahead`: the tiles ask for the panels that follow, each for
// its share of them, so that memory is busy all the time: bit j of a tile's `ahead` stands for its panel j.
template <int Format, int kMost, int NR, class Emit>
void emit_rows(const PdmeshLinear& linear, const Rows& rows, int begin, int end, int panel, bool is_ahead, const Emit& emit) {
    // Panels that fit the first cache are taken twice where once would do: while the second tile reads them there, memory sends
    // the next ones. Measured: 8 rows in one tile take 10 % longer.
    const bool fits = static_cast<size_t>(rows.units) * kUnit * NR <= kNearBytes;
    const int num_rows = end - begin, least = kMost > kTileRows<Format> && num_rows >= 3 && fits ? 2 : 1;
    const int tiles = std::max(least, (num_rows + kMost - 1) / kMost);
    for (int number = 0; number < tiles; number++) {
        const int first = num_rows * number / tiles, height = num_rows * (number + 1) / tiles - first;
        unsigned ahead = 0;
        for (int j = 0; j < NR; j++) ahead |= static_cast<unsigned>(is_ahead && j * std::min(tiles, NR) / NR == number) << j;
        emit_height<Format, kMost, NR>(linear, rows, begin + first, height, panel, ahead, emit);
    }
}

// Panels [panel, panel + count) for rows [begin, end).
template <int Format, class Emit>
void emit_panels(const PdmeshLinear& linear, const Rows& rows, int begin, int end, int panel, int count, const Emit& emit) {
    if constexpr (kHasTileProduct<Format>)
        if (end - begin >= kFewestTileRows<Format>) return emit_tiles<Format>(linear, rows, begin, end, panel, count, emit);
    if constexpr (kHasTiles && Format == kInt4)
        if (end - begin >= kFewestInt4Rows && int4_fits_tiles(linear)) return emit_int4_tiles(linear, rows, begin, end, panel, count, emit);
    if constexpr (kMultipliesWords && Format == kInt8)
        if (end - begin >= kFewestWordRows) return emit_words(linear, rows, begin, end, panel, count, emit);
    constexpr int most = kTilePanels<Format>, high = kTileRows<Format>, pair_high = kPairRows<Format>;
    // Few rows: what counts is that weights come from memory without a pause and are at hand for a second tile, so two panels at
    // a time. Many: that each load serves many products, so the widest tiles.
    const bool few = end - begin <= 2 * pair_high;
    for (const int last = panel + count; panel < last;) {
        const int left = last - panel;
        if (most >= 4 && left >= 4 && !few) {
            emit_rows<Format, high, most>(linear, rows, begin, end, panel, left >= 2 * most, emit);
            panel += most;
        } else if (left >= 2) {
            emit_rows<Format, pair_high, 2>(linear, rows, begin, end, panel, left >= 4, emit);
            panel += 2;
        } else {
            if constexpr (Emit::kPairs) return;  // never: pairs come in twos
            else emit_rows<Format, high, 1>(linear, rows, begin, end, panel, false, emit);
            panel += 1;
        }
    }
}

constexpr int kItemPanels = 4, kItemRows = 96;  // of a product of many rows

// A product's tiles, shared out over the team: visit(first row, end, first panel, number of panels); `item_rows` at a time.
template <class Visit>
void share_out(Team& team, int rank, int panels, int num_rows, const Visit& visit, int item_rows = kItemRows) {
    if (num_rows <= kItemRows) {
        // Memory counts: each rank streams one contiguous part, and knows what it will read next.
        const int pairs = (panels + 1) / 2;
        const int first = pairs * rank / team.size() * 2, last = std::min(pairs * (rank + 1) / team.size() * 2, panels);
        visit(0, num_rows, first, last - first);
        return;
    }
    const int row_blocks = (num_rows + item_rows - 1) / item_rows, panel_blocks = (panels + kItemPanels - 1) / kItemPanels;
    // Few rows stay in a core's first cache, beside any panels; many stay in the second one while all panels pass by.
    const bool keeps_rows = item_rows > kItemRows;
    for (int item; (item = team.take()) < panel_blocks * row_blocks;) {
        const int panel = (keeps_rows ? item % panel_blocks : item / row_blocks) * kItemPanels;
        const int row = (keeps_rows ? item / panel_blocks : item % row_blocks) * item_rows;
        visit(row, std::min(row + item_rows, num_rows), panel, std::min(kItemPanels, panels - panel));
    }
}

inline int panels_of(const PdmeshLinear& linear) { return round_up(linear.n, kPanel) / kPanel; }

// All outputs of all rows, shared out over the team: call on every rank, barrier after. emit(row, panel, F (&out)[NR]).
template <int Format, class Emit>
void multiply_format(Team& team, int rank, const PdmeshLinear& linear, const Rows& rows, int num_rows, const Emit& emit) {
    const auto visit = [&](int row, int end, int panel, int count) {
        emit_panels<Format>(linear, rows, row, end, panel, count, emit);
    };
    share_out(team, rank, panels_of(linear), num_rows, visit, kHasTileProduct<Format> ? item_rows_of_tiles(rows, num_rows) : kItemRows);
}

template <class Emit>
void emit_panels(const PdmeshLinear& linear, const Rows& rows, int begin, int end, int panel, int count, const Emit& emit) {
    switch (linear.format) {
        case kInt8: return emit_panels<kInt8>(linear, rows, begin, end, panel, count, emit);
        case kInt4: return emit_panels<kInt4>(linear, rows, begin, end, panel, count, emit);
        case kBFloat16: return emit_panels<kBFloat16>(linear, rows, begin, end, panel, count, emit);
        default: return emit_panels<kFloat32>(linear, rows, begin, end, panel, count, emit);
    }
}

template <class Emit>
void multiply(Team& team, int rank, const PdmeshLinear& linear, const Rows& rows, int num_rows, const Emit& emit) {
    switch (linear.format) {
        case kInt8: return multiply_format<kInt8>(team, rank, linear, rows, num_rows, emit);
        case kInt4: return multiply_format<kInt4>(team, rank, linear, rows, num_rows, emit);
        case kBFloat16: return multiply_format<kBFloat16>(team, rank, linear, rows, num_rows, emit);
        default: return multiply_format<kFloat32>(team, rank, linear, rows, num_rows, emit);
    }
}

// Rows [first, first + count) that have a map of their own. All maps of a product have one format.
struct RowGroup {
    const PdmeshLinear* linear;
    int first, count;
};

template <int Format, class Emit>
void multiply_groups_format(Team& team, const std::vector<RowGroup>& groups, const Rows& rows, const Emit& emit) {
    constexpr int step = 8, block = 96;  // panels and rows of an item
    const auto panels_of = [](const RowGroup& group) { return round_up(group.linear->n, kPanel) / kPanel; };
    const auto blocks_of = [](const RowGroup& group) { return (group.count + block - 1) / block; };
    size_t g = 0;
    for (int begin = 0;;) {
        const int item = team.take();
        for (; g < groups.size(); g++) {
            const int items = (panels_of(groups[g]) + step - 1) / step * blocks_of(groups[g]);
            if (item < begin + items) break;
            begin += items;
        }
        if (g == groups.size()) return;
        const RowGroup& group = groups[g];
        const int row_blocks = blocks_of(group), panel = (item - begin) / row_blocks * step;
        const int row = group.first + (item - begin) % row_blocks * block, end = std::min(row + block, group.first + group.count);
        emit_panels<Format>(*group.linear, rows, row, end, panel, std::min(step, panels_of(group) - panel), emit);
    }
}

// All outputs of all groups' rows, shared out over the team: call on every rank, barriers before and after.
template <class Emit>
void multiply_groups(Team& team, const std::vector<RowGroup>& groups, const Rows& rows, const Emit& emit) {
    if (groups.empty()) return;
    switch (groups[0].linear->format) {
        case kInt8: return multiply_groups_format<kInt8>(team, groups, rows, emit);
        case kInt4: return multiply_groups_format<kInt4>(team, groups, rows, emit);
        case kBFloat16: return multiply_groups_format<kBFloat16>(team, groups, rows, emit);
        default: return multiply_groups_format<kFloat32>(team, groups, rows, emit);
    }
}

}  // namespace pdmesh
