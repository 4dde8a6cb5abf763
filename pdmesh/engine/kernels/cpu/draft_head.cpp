// Draft heads (pdmesh/engine/speculation/draft_heads/weights.py draws what they compute): a block makes a state of a state and a token, the head
// scores states over a reduced vocabulary. The products are those of a step (gemm.h).
#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "abi.h"
#include "activations.h"
#include "buffers.h"
#include "gemm.h"
#include "parallel.h"
#include "rows.h"

extern "C" {

// block(state, token) = mix x + down(silu(gate x) * up x), x = (state, embedding(token) / rms). `gate_up` has alternating panels.
struct PdmeshDraftBlock {
    int32_t hidden, embedding_format;  // kFloat32 or kBFloat16
    const uint8_t* embedding;          // [vocab][hidden]
    PdmeshLinear mix, gate_up, down;
};

// Tokens to be guessed one after the other, of each row at most `most` and while the product of their chances is at least `least`.
struct PdmeshDraftChains {
    int32_t num_rows, depth;
    const float* norm;           // [hidden]
    const float* const* hidden;  // [num_rows] rows of [hidden]
    const int64_t *token_ids, *last;  // [head.n] which token each row of the head scores; [num_rows]
    const int32_t* most;         // [num_rows], at least 1
    const float* least;          // [num_rows]
    int64_t* tokens;             // [num_rows][depth]: what was guessed,
    float* chances;              // the same,
    int32_t* counts;             // [num_rows]: and how many
};

}

namespace pdmesh {
namespace {

constexpr float kEps = 1e-6f;

template <class T>
class Aligned {  // 64-byte aligned, zeros at first, grows
  public:
    T* reserve(size_t count) {
        if (count > size_) {
            data_.reset(static_cast<T*>(::operator new[](count * sizeof(T), std::align_val_t(64))));
            std::memset(static_cast<void*>(data_.get()), 0, count * sizeof(T));
            size_ = count;
        }
        return data_.get();
    }
    T* get() const { return data_.get(); }

  private:
    struct Free {
        void operator()(T* p) const { ::operator delete[](p, std::align_val_t(64)); }
    };
    std::unique_ptr<T[], Free> data_;
    size_t size_ = 0;
};

// Rows in the form that a product takes. Each rank makes its own: for a few rows that costs less than a barrier.
class OwnRows {
  public:
    void reserve(const PdmeshLinear& linear, int num_rows) {
        const size_t groups = static_cast<size_t>(num_groups(linear)) * num_rows;
        data_.reserve(row_bytes(linear) * (num_rows + kSpareRows) + 64);  // matrix tiles read some beside them
        scales_.reserve(groups);
        sums_.reserve(groups);
        outliers_.reserve(num_rows);
        scratch_.reserve(scratch_floats(linear));
    }
    // x: rows of floats, `stride` (a multiple of 16) apart, zero beyond their width.
    Rows prepare(const PdmeshLinear& linear, const float* x, int stride, int num_rows) {
        Rows rows{data_.get(), row_bytes(linear), row_units(linear), scales_.get(), sums_.get(), num_groups(linear), outliers_.get()};
        for (int row = 0; row < num_rows; row++)
            prepare_row(linear, x + static_cast<size_t>(row) * stride, PdmeshNorm{}, scratch_.get(), rows, row);
        return rows;
    }

  private:
    static size_t row_bytes(const PdmeshLinear& linear) { return round_up(row_units(linear) * 4, 64); }
    Aligned<uint8_t> data_;
    Aligned<float> scales_, scratch_;
    Aligned<int32_t> sums_;
    Aligned<Outliers> outliers_;
};

template <bool kAdds>
struct Store {  // [rows][stride] = or += product
    static constexpr bool kPairs = false;
    float* out;
    size_t stride;
    int width;
    template <int NR>
    [[gnu::always_inline]] void operator()(int row, int panel, const F (&x)[NR]) const {
        float* p = out + row * stride + panel * kPanel;
#pragma GCC unroll 8
        for (int j = 0; j < NR; j++, p += kPanel) {
            if constexpr (kAdds) f_store(p, x[j] + f_load(p));  // whole panels only
            else f_store_first(p, x[j], width - (panel + j) * kPanel);
        }
    }
};
struct StoreGated {  // [rows][stride] = silu(gate) * up of alternating panels
    static constexpr bool kPairs = true;
    float* out;
    size_t stride;
    template <int NR>
    [[gnu::always_inline]] void operator()(int row, int panel, const F (&x)[NR]) const {
        float* p = out + row * stride + panel / 2 * kPanel;
        if constexpr (NR >= 2) f_store(p, silu(x[0]) * x[1]);
        if constexpr (NR >= 4) f_store(p + kPanel, silu(x[2]) * x[3]);
    }
};

// out [hidden] = the token's embedding / rms.
void write_embedding(const PdmeshDraftBlock& block, int64_t token, float* out) {
    const size_t first = static_cast<size_t>(token) * block.hidden;
    for (int i = 0; i < block.hidden; i += kPanel) {
        if (block.embedding_format == kFloat32) f_store(out + i, f_load(reinterpret_cast<const float*>(block.embedding) + first + i));
        else f_store(out + i, f_load_bf16(reinterpret_cast<const uint16_t*>(block.embedding) + first + i));
    }
    const F factor = f_set(inverse_rms(out, block.hidden, block.hidden, kEps));
    for (int i = 0; i < block.hidden; i += kPanel) f_store(out + i, f_load(out + i) * factor);
}

// Of the thread that calls, for all ranks of its team.
struct Scratch {
    Aligned<float> inputs, inner, states, next, logits;
    std::vector<OwnRows> rows;
    std::vector<int> growing;  // of chains: the rows that are computed, in their order
    std::vector<int64_t> last, best;
    std::vector<float> chances, kept;
    // Before a region: within one no thread may run out of memory, since the others would wait at a barrier.
    void reserve(const Team& team, std::initializer_list<const PdmeshLinear*> linears, int num_rows) {
        if (rows.size() < static_cast<size_t>(team.size())) rows.resize(team.size());
        for (auto& own : rows)
            for (const PdmeshLinear* linear : linears) own.reserve(*linear, num_rows);
    }
};
thread_local Scratch scratch;

void run_block(Team& team, const PdmeshDraftBlock& block, int num_rows, const float* states, const int64_t* token_ids, float* out) {
    const int hidden = block.hidden, inner_stride = round_up(block.down.k, kPanel);
    Scratch& own = scratch;
    own.reserve(team, {&block.mix, &block.gate_up, &block.down}, num_rows);
    float* inputs = own.inputs.reserve(static_cast<size_t>(2 * hidden) * num_rows);
    float* inner = own.inner.reserve(static_cast<size_t>(inner_stride) * num_rows);
    for (int row = 0; row < num_rows; row++) {
        float* x = inputs + static_cast<size_t>(row) * 2 * hidden;
        std::memcpy(x, states + static_cast<size_t>(row) * hidden, sizeof(float) * hidden);
        write_embedding(block, token_ids[row], x + hidden);
    }
    team.run([&](int rank) {
        [[maybe_unused]] const TileSession tiles;
        Rows rows = own.rows[rank].prepare(block.mix, inputs, 2 * hidden, num_rows);
        multiply(team, rank, block.mix, rows, num_rows, Store<false>{out, static_cast<size_t>(hidden), hidden});
        team.barrier();
        multiply(team, rank, block.gate_up, rows, num_rows, StoreGated{inner, static_cast<size_t>(inner_stride)});
        team.barrier();
        rows = own.rows[rank].prepare(block.down, inner, inner_stride, num_rows);
        multiply(team, rank, block.down, rows, num_rows, Store<true>{out, static_cast<size_t>(hidden), hidden});
    });
}

// The place of the largest of `count` logits (the first among equals), and its probability.
void judge(const float* logits, int count, int64_t* best, float* chance) {
    F most = f_set(-__builtin_inff());
    int i = 0;
    for (; i + 16 <= count; i += 16) most = f_max(most, f_load(logits + i));
    float peak = f_hmax(most);
    for (; i < count; i++) peak = std::max(peak, logits[i]);
    *best = std::min<int64_t>(std::find(logits, logits + count, peak) - logits, count - 1);  // NaN is found nowhere
    F total = f_zero();
    const F factor = f_set(1.44269504f), top = f_set(peak);
    float rest[16];
    for (i = 0; i + 16 <= count; i += 16) total = total + f_exp2((f_load(logits + i) - top) * factor);
    for (int j = 0; j < 16; j++) rest[j] = i + j < count ? logits[i + j] : -__builtin_inff();
    *chance = 1.0f / f_sum(total + f_exp2((f_load(rest) - top) * factor));
}

void run_head(Team& team, const PdmeshLinear& head, int num_rows, const float* states, float* logits, int64_t* best, float* chances) {
    Scratch& own = scratch;
    own.reserve(team, {&head}, num_rows);
    team.run([&](int rank) {
        [[maybe_unused]] const TileSession tiles;
        const Rows rows = own.rows[rank].prepare(head, states, head.k, num_rows);
        multiply(team, rank, head, rows, num_rows, Store<false>{logits, static_cast<size_t>(head.n), head.n});
        team.barrier();
        for (int row; (row = team.take()) < num_rows;)
            judge(logits + static_cast<size_t>(row) * head.n, head.n, best + row, chances + row);
    });
}

void begin(int width, int num_rows, const float* const* hidden, const float* norm, float* out) {
    for (int row = 0; row < num_rows; row++, out += width) {
        const F factor = f_set(inverse_rms(hidden[row], width, width, kEps));
        for (int i = 0; i < width; i += kPanel) f_store(out + i, f_load(hidden[row] + i) * factor * f_load(norm + i));
    }
}

// Chains of the likeliest tokens, for all rows side by side; a row that has ended is computed no further.
void run_chains(Team& team, const PdmeshDraftBlock& block, const PdmeshLinear& head, const PdmeshDraftChains& chains) {
    const int rows = chains.num_rows, width = block.hidden;
    Scratch& own = scratch;
    float* states = own.states.reserve(static_cast<size_t>(width) * rows);
    float* next = own.next.reserve(static_cast<size_t>(width) * rows);
    float* logits = own.logits.reserve(static_cast<size_t>(head.n) * rows);
    own.growing.resize(rows);
    std::iota(own.growing.begin(), own.growing.end(), 0);
    own.last.assign(chains.last, chains.last + rows);
    own.best.resize(rows);
    own.chances.resize(rows);
    own.kept.assign(rows, 1.0f);
    std::fill_n(chains.counts, rows, 0);
    begin(width, rows, chains.hidden, chains.norm, states);
    for (int num = rows, after = 0; num > 0; num = after, after = 0) {
        run_block(team, block, num, states, own.last.data(), next);
        run_head(team, head, num, next, logits, own.best.data(), own.chances.data());
        for (int i = 0; i < num; i++) {
            const int row = own.growing[i];
            const float kept = own.kept[row] *= own.chances[i];
            if (kept < chains.least[row]) continue;
            const int64_t at = row * static_cast<int64_t>(chains.depth) + chains.counts[row]++;
            chains.tokens[at] = chains.token_ids[own.best[i]];
            chains.chances[at] = own.chances[i];
            if (chains.counts[row] >= std::min(chains.most[row], chains.depth)) continue;
            own.growing[after] = row;
            own.last[after] = chains.tokens[at];
            std::memcpy(states + static_cast<size_t>(after++) * width, next + static_cast<size_t>(i) * width, sizeof(float) * width);
        }
    }
}

}  // namespace
}  // namespace pdmesh

extern "C" {

// For the caller to compare: the structs are mirrored by hand.
int64_t pdmesh_draft_bytes() { return sizeof(PdmeshDraftBlock) + sizeof(PdmeshDraftChains); }

// hidden: num_rows rows of [width], a multiple of 16 -> out [num_rows][width] = row / rms * norm.
void pdmesh_draft_begin(int32_t width, int32_t num_rows, const float* const* hidden, const float* norm, float* out) {
    pdmesh::begin(width, num_rows, hidden, norm, out);
}

// Of recurrent heads, from the hidden states on. 0, or 1 without memory.
int32_t pdmesh_draft_chains(void* team, const PdmeshDraftBlock* block, const PdmeshLinear* head, const PdmeshDraftChains* chains) {
    try {
        pdmesh::run_chains(*static_cast<pdmesh::Team*>(team), *block, *head, *chains);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

// states, out [num_rows][hidden], not the same memory; hidden is a multiple of 16. 0, or 1 without memory.
int32_t pdmesh_draft_block(void* team, const PdmeshDraftBlock* block, int32_t num_rows, const float* states, const int64_t* token_ids,
                           float* out) {
    try {
        pdmesh::run_block(*static_cast<pdmesh::Team*>(team), *block, num_rows, states, token_ids, out);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

// states [num_rows][head.k] -> logits [num_rows][head.n], and of each row the place of the largest and its probability.
int32_t pdmesh_draft_scores(void* team, const PdmeshLinear* head, int32_t num_rows, const float* states, float* logits, int64_t* best,
                            float* chances) {
    try {
        pdmesh::run_head(*static_cast<pdmesh::Team*>(team), *head, num_rows, states, logits, best, chances);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}
