// LoRA adapters beside a layer's products (pdmesh/engine/lora/__init__.py): y = W x + B A x for the rows of each adapter.
//
//     prepare     the rows of adapters also in float32, those of one adapter one after the other
//     lower       A x, shared out over the ranks              ── arrive
//     product     W x of a rank's own outputs, to a buffer
//     raise       (all have arrived) + B A x of the same outputs; then what the product does with its tiles
//
// So a product with adapters has as many barriers as one without, and every number of A and B is read by one rank. Both are products
// of float32 rows as in gemm.h: a row's bits depend on its adapter alone, and rows without one have the bits of a step without adapters.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "abi.h"
#include "activations.h"
#include "buffers.h"
#include "gemm.h"
#include "parallel.h"
#include "rows.h"

namespace pdmesh {

// Places [first, first + count) of AdapterRows are the rows of one adapter.
struct AdapterRun {
    const PdmeshAdapterMap* maps;  // [num_layers][kAdaptedProducts]
    int first, count;
};

struct AdapterRows {
    std::vector<AdapterRun> runs;
    std::vector<int32_t> rows;    // of each place; ascending within a run
    std::vector<int32_t> places;  // of each row; -1: it has no adapter

    void group(const std::vector<int32_t>& slots, const PdmeshAdapterMap* const* adapters) {
        runs.clear();
        rows.clear();
        places.assign(slots.size(), -1);
        for (size_t r = 0; r < slots.size(); r++) {
            if (slots[r] < 0 || places[r] >= 0) continue;
            const int first = static_cast<int>(rows.size());
            for (size_t s = r; s < slots.size(); s++)
                if (slots[s] == slots[r]) {
                    places[s] = static_cast<int32_t>(rows.size());
                    rows.push_back(static_cast<int32_t>(s));
                }
            runs.push_back({adapters[slots[r]], first, static_cast<int>(rows.size()) - first});
        }
    }
};

// One product of the step that runs, and its rows; null: no row's adapter adds to it.
struct Adapted {
    const AdapterRows* rows = nullptr;
    int index = 0;
    explicit operator bool() const { return rows != nullptr; }
    const PdmeshAdapterMap& map_of(const AdapterRun& run) const { return run.maps[index]; }
};

struct AddedAt {  // [rows[row]][stride] += product, whose panels go to panels first, first + step, ...
    static constexpr bool kPairs = false;
    float* out;
    size_t stride;
    const int32_t* rows;
    int first, step;
    template <int NR>
    [[gnu::always_inline]] void operator()(int row, int panel, const F (&x)[NR]) const {
        float* p = out + rows[row] * stride + (first + static_cast<size_t>(panel) * step) * kPanel;
#pragma GCC unroll 8
        for (int j = 0; j < NR; j++) {
            float* at = p + static_cast<size_t>(j) * step * kPanel;
            f_store(at, f_load(at) + x[j]);
        }
    }
};

// Rows [row, end) and panels [panel, panel + count) of a product with A or with B. `first`, `step`: see AddedAt.
struct ThinPiece {
    const PdmeshLinear* linear;
    Rows rows;
    int row, end, panel, count, first, step;
    size_t panel_bytes() const { return static_cast<size_t>(rows.units) * (linear->format == kFloat32 ? DotFloat32::kStep : DotWideBFloat16::kStep); }
    const uint8_t* weights() const { return linear->packed + panel * panel_bytes(); }
};

// `ask`: weights that are asked for meanwhile, as many as the tile's own; or null.
template <class Dot, int MR, int NR, class Emit>
[[gnu::noinline]] void thin_tile(const ThinPiece& piece, int row, int panel, const uint8_t* ask, const Emit& emit) {
    const size_t panel_bytes = piece.panel_bytes();
    const uint8_t *w[NR], *next[NR], *a = piece.rows.data + row * piece.rows.stride;
    F acc[MR][NR];
#pragma GCC unroll 8
    for (int j = 0; j < NR; j++) {
        w[j] = piece.linear->packed + (panel + j) * panel_bytes;
        next[j] = ask + j * panel_bytes;
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
        for (int j = 0; j < NR; j++) acc[i][j] = f_zero();
    if (ask) tile<Dot, MR, NR>(a, piece.rows.stride, w, piece.rows.units, next, acc);
    else tile<Dot, MR, NR>(a, piece.rows.stride, w, piece.rows.units, nullptr, acc);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) emit(row + i, panel, acc[i]);
}

template <class Dot, int NR, class Emit>
void thin_rows(const ThinPiece& piece, int panel, const uint8_t* ask, const Emit& emit) {
    constexpr int high = Dot::kRoom.fits(4, NR) ? 4 : 2;
    for (int row = piece.row; row < piece.end; row += high, ask = nullptr) {
        switch (std::min(piece.end - row, high)) {
            case 1: thin_tile<Dot, 1, NR>(piece, row, panel, ask, emit); break;
            case 2: thin_tile<Dot, 2, NR>(piece, row, panel, ask, emit); break;
            case 3: if constexpr (high >= 3) thin_tile<Dot, 3, NR>(piece, row, panel, ask, emit); break;
            default: if constexpr (high >= 4) thin_tile<Dot, 4, NR>(piece, row, panel, ask, emit);
        }
    }
}

// `ask`: where the weights of the piece that follows begin.
template <class Dot, class Emit>
void thin_panels(const ThinPiece& piece, const uint8_t* ask, const Emit& emit) {
    const int last = piece.panel + piece.count;
    for (int panel = piece.panel; panel < last;) {
        const int width = std::min(last - panel, kMostPanels);
        if constexpr (kMostPanels >= 4) {
            if (width == 4) thin_rows<Dot, 4>(piece, panel, ask, emit);
            if (width == 3) thin_rows<Dot, 3>(piece, panel, ask, emit);
        }
        if (width == 2) thin_rows<Dot, 2>(piece, panel, ask, emit);
        if (width == 1) thin_rows<Dot, 1>(piece, panel, ask, emit);
        panel += width;
        if (ask) ask += width * piece.panel_bytes();
    }
}

// Each piece asks for the weights of the next, the last for `after`: thin products wait for their sums, memory need not wait for them.
template <class EmitOf>
void thin_products(const std::vector<ThinPiece>& pieces, const uint8_t* after, const EmitOf& emit_of) {
    for (size_t i = 0; i < pieces.size(); i++) {
        const ThinPiece& piece = pieces[i];
        const uint8_t* ask = i + 1 < pieces.size() ? pieces[i + 1].weights() : after;
        if (piece.linear->format == kFloat32) thin_panels<DotFloat32>(piece, ask, emit_of(piece));
        else thin_panels<DotWideBFloat16>(piece, ask, emit_of(piece));
    }
}

// A product's tiles once more, from where they were kept: [rows][stride].
template <class Emit>
void emit_kept(const float* kept, size_t stride, int row, int end, int panel, int count, const Emit& emit) {
    for (; row < end; row++) {
        const float* from = kept + row * stride;
        int p = panel;
        for (; p + 2 <= panel + count; p += 2) {
            const F pair[2] = {f_load(from + p * kPanel), f_load(from + (p + 1) * kPanel)};
            emit(row, p, pair);
        }
        if constexpr (!Emit::kPairs) {
            if (p == panel + count) continue;
            const F last[1] = {f_load(from + p * kPanel)};
            emit(row, p, last);
        }
    }
}

class StepAdapters {
  public:
    StepAdapters(Team& team, int num_layers, int most_outputs)
        : team_(team), num_maps_(num_layers * kAdaptedProducts), most_panels_(round_up(most_outputs, kPanel) / kPanel),
          own_wide_(team.capacity()), kept_(team.capacity()), pieces_(team.capacity()) {}

    // Before the region. `few`: up to so many rows every rank prepares all rows itself.
    void begin(const PdmeshStep& step, int few) {
        is_on_ = step.adapter_slots && std::any_of(step.adapter_slots, step.adapter_slots + step.num_seqs, [](int slot) { return slot >= 0; });
        if (!is_on_) return;
        num_tokens_ = step.num_tokens;
        few_ = few;
        slots_.resize(step.num_tokens);
        for (int s = 0; s < step.num_seqs; s++)
            std::fill(slots_.begin() + step.query_starts[s], slots_.begin() + step.query_starts[s + 1], step.adapter_slots[s]);
        all_.group(slots_, step.adapters);
        for (int r = 0; r < step.num_rows; r++) slots_[r] = slots_[step.logits_rows[r]];  // ascending: see keep_wanted_rows
        slots_.resize(step.num_rows);
        wanted_.group(slots_, step.adapters);
        reserve();
    }

    // Whether any row of the step has one.
    bool is_on() const { return is_on_; }

    Adapted of(int layer, PdmeshAdapted product, int num_rows) const {
        if (!is_on_) return {};
        const Adapted adapted{num_rows == num_tokens_ ? &all_ : &wanted_, layer * kAdaptedProducts + product};
        for (const AdapterRun& run : adapted.rows->runs)
            if (adapted.map_of(run).down.n) return adapted;
        return {};
    }

    // Where a place's row lies for A.
    float* wide_row(int rank, int num_rows, int place) { return wide(rank, num_rows) + static_cast<size_t>(place) * wide_stride_; }

    // As multiply (gemm.h), with what adapters add to the product.
    template <class Emit>
    void multiply(int rank, const Adapted& adapted, const PdmeshLinear& linear, const Rows& rows, int num_rows, const Emit& emit) {
        lower(rank, adapted, wide(rank, num_rows));
        team_.arrive();
        share_out(team_, rank, panels_of(linear), num_rows, [&](int row, int end, int panel, int count) {
            const size_t stride = static_cast<size_t>(count) * kPanel;
            float* kept = origin(kept_[rank].get(), row * stride + static_cast<size_t>(panel) * kPanel);
            emit_panels(linear, rows, row, end, panel, count, Emitted{kept, stride, (panel + count) * kPanel});
            team_.await_all();
            raise(rank, adapted, row, end, panel, count, kept, stride);
            emit_kept(kept, stride, row, end, panel, count, emit);
        });
    }

  private:
    static constexpr int kMostParts = 3;  // of a product: query, key and value

    // Where a buffer of whole rows and panels would begin of which `data` is a part.
    static float* origin(float* data, size_t offset) {
        return reinterpret_cast<float*>(reinterpret_cast<uintptr_t>(data) - offset * sizeof(float));
    }

    void reserve() {
        int inputs = 0, ranks = 0;
        for (const AdapterRun& run : all_.runs)
            for (int m = 0; m < num_maps_; m++) {
                inputs = std::max(inputs, run.maps[m].down.k);
                ranks = std::max(ranks, run.maps[m].down.n);
            }
        wide_stride_ = round_up(inputs, kPanel);
        lowered_stride_ = round_up(ranks, kPanel);
        const size_t places = all_.rows.size(), tile_rows = std::min(num_tokens_, kItemRows);
        const int tile_panels = std::max(kItemPanels, 2 * (most_panels_ / 2 / team_.own_size() + 2));
        wide_.reserve(places * wide_stride_);
        lowered_.reserve(places * lowered_stride_);
        for (auto& pieces : pieces_) pieces.reserve(kMostParts * all_.runs.size() + places / kItemRows);
        for (Buffer<float>& own : own_wide_) own.reserve(static_cast<size_t>(few_) * wide_stride_);
        for (Buffer<float>& kept : kept_) kept.reserve(tile_rows * tile_panels * kPanel);
    }

    float* wide(int rank, int num_rows) { return num_rows <= few_ ? own_wide_[rank].get() : wide_.get(); }

    static int blocks_of(const AdapterRun& run) { return (run.count + kItemRows - 1) / kItemRows; }

    static Rows thin_rows_of(float* data, size_t stride, const PdmeshLinear& linear) {
        return {reinterpret_cast<uint8_t*>(data), stride * sizeof(float), linear.k, nullptr, nullptr, 1, nullptr};
    }

    // A rank's share of A x: panels of A for up to kItemRows rows, counted through.
    void lower(int rank, const Adapted& adapted, float* wide) {
        int64_t total = 0;
        for (const AdapterRun& run : adapted.rows->runs) total += panels_of(adapted.map_of(run).down) * blocks_of(run);
        const int begin = static_cast<int>(total * rank / team_.size()), end = static_cast<int>(total * (rank + 1) / team_.size());
        std::vector<ThinPiece>& pieces = pieces_[rank];
        pieces.clear();
        int at = 0;
        for (const AdapterRun& run : adapted.rows->runs) {
            const PdmeshLinear& down = adapted.map_of(run).down;
            const int panels = panels_of(down);
            for (int block = 0; block < blocks_of(run); block++, at += panels) {
                const int first = std::max(begin - at, 0), last = std::min(end - at, panels), row = run.first + block * kItemRows;
                if (first >= last) continue;
                const int limit = std::min(row + kItemRows, run.first + run.count);
                pieces.push_back({&down, thin_rows_of(wide, wide_stride_, down), row, limit, first, last - first, 0, 1});
            }
        }
        const Emitted lowered{lowered_.get(), lowered_stride_, static_cast<int>(lowered_stride_)};
        const PdmeshAdapterMap& next = adapted.map_of(adapted.rows->runs[0]);
        const uint8_t* after = next.num_parts ? weights_from(next.parts[0].up, rank) : nullptr;
        thin_products(pieces, after, [&](const ThinPiece&) { return lowered; });
    }

    // B A x of these rows and panels, added to `out`.
    void raise(int rank, const Adapted& adapted, int row, int end, int panel, int count, float* out, size_t stride) {
        const int32_t* rows = adapted.rows->rows.data();
        std::vector<ThinPiece>& pieces = pieces_[rank];
        pieces.clear();
        for (const AdapterRun& run : adapted.rows->runs) {
            const auto place_of = [&](int r) { return static_cast<int>(std::lower_bound(rows + run.first, rows + run.first + run.count, r) - rows); };
            const int first = place_of(row), last = place_of(end);
            const PdmeshAdapterMap& map = adapted.map_of(run);
            for (int p = 0; p < map.num_parts && first < last; p++) take_part(pieces, map.parts[p], first, last, panel, count);
        }
        thin_products(pieces, next_lowered(rank, adapted), [&](const ThinPiece& piece) { return AddedAt{out, stride, rows, piece.first, piece.step}; });
    }

    // About where a rank's share of a thin product begins.
    const uint8_t* weights_from(const PdmeshLinear& linear, int rank) const {
        const ThinPiece piece{&linear, thin_rows_of(nullptr, 0, linear), 0, 0, panels_of(linear) * rank / team_.size(), 0, 0, 1};
        return piece.weights();
    }
    const uint8_t* next_lowered(int rank, const Adapted& adapted) const {
        if (adapted.index + 1 == num_maps_) return nullptr;
        const std::vector<AdapterRun>& runs = adapted.rows->runs;
        return runs[runs.size() * rank / team_.size()].maps[adapted.index + 1].down.packed;
    }

    // Of the part's panels those that are among the product's.
    void take_part(std::vector<ThinPiece>& pieces, const PdmeshAdapterPart& part, int first, int last, int panel, int count) {
        const auto before = [&](int limit) {
            return std::min((std::max(limit - part.first, 0) + part.step - 1) / part.step, panels_of(part.up));
        };
        const int begin = before(panel), end = before(panel + count);
        const Rows rows = thin_rows_of(lowered_.get() + part.column, lowered_stride_, part.up);
        if (begin < end) pieces.push_back({&part.up, rows, first, last, begin, end - begin, part.first, part.step});
    }

    Team& team_;
    int num_maps_, most_panels_, num_tokens_ = 0, few_ = 0;
    size_t wide_stride_ = 0, lowered_stride_ = 0;
    bool is_on_ = false;
    std::vector<int32_t> slots_;
    AdapterRows all_, wanted_;
    Buffer<float> wide_, lowered_;
    std::vector<Buffer<float>> own_wide_, kept_;  // of each rank
    std::vector<std::vector<ThinPiece>> pieces_;
};

}  // namespace pdmesh
