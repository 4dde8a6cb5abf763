// One engine step on the CPU: the whole forward pass over a mixed batch, in one parallel region.
//
//     hidden = embed(tokens)
//     each layer:   prepare -> qkv -> rope + KV write -> attention -> prepare -> output -> prepare -> gate_up -> prepare -> down
//     logits = head(prepare(hidden[rows]))
//
// Stages are separated by barriers; within a stage the ranks share out tiles, tokens or attention items. Hidden states stay in
// float32; a product rounds its input rows to its weights' partner format ("prepare"). With few rows every rank prepares all rows
// for itself, which costs less than a barrier.
#include <unistd.h>

#include <array>
#include <atomic>
#include <climits>
#include <cmath>
#include <memory>
#include <mutex>
#include <numeric>

#include "abi.h"
#include "attention.h"
#include "gemm.h"
#include "kv_copy.h"
#include "parallel.h"
#include "rows.h"

namespace pdmesh {
namespace {

constexpr int kFewRows = 3;        // up to here every rank prepares all rows itself
constexpr int kFewTokens = 16;     // up to here one rank writes a head's keys and values of all tokens
constexpr int kTileTarget = 48;    // rows of an attention tile: enough to hide the loads of keys
constexpr int kSplitQueries = 16;  // sequences with more queries in a step are not split over their keys

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class T>
struct Buffer {  // 64-byte aligned, grows, never shrinks; contents are lost when it grows
    std::unique_ptr<T[], void (*)(T*)> data{nullptr, [](T* p) { ::operator delete[](p, std::align_val_t(64)); }};
    size_t size = 0;
    T* reserve(size_t count) {
        if (count > size) {
            count = std::max(count, size + size / 2);  // contexts grow step by step, buffers seldom
            data.reset(static_cast<T*>(::operator new[](count * sizeof(T), std::align_val_t(64))));
            std::memset(static_cast<void*>(data.get()), 0, count * sizeof(T));
            size = count;
        }
        return data.get();
    }
    T* get() const { return data.get(); }
};

struct RowBuffer {
    Buffer<uint8_t> data;
    Buffer<float> scales, scratch;
    Buffer<int32_t> sums;
    Buffer<Outliers> outliers;
    // Room for the rows of any of these maps.
    void reserve(const PdmeshLinear& linear, int num_rows) {
        const size_t scales_of_rows = static_cast<size_t>(num_groups(linear)) * num_rows;
        data.reserve(static_cast<size_t>(round_up(row_units(linear) * 4, 64)) * num_rows + 64);
        scales.reserve(scales_of_rows);
        sums.reserve(scales_of_rows);
        outliers.reserve(num_rows);
        scratch.reserve(scratch_floats(linear));
    }
    Rows view(const PdmeshLinear& linear) const {
        const int units = row_units(linear);
        return {data.get(), static_cast<size_t>(round_up(units * 4, 64)), units, scales.get(), sums.get(), num_groups(linear), outliers.get()};
    }
};

// What one thread computes at a time: a tile of queries against all its chunks, or (split) one chunk with its result kept apart.
struct Item {
    int seq, head, first_query, num_queries, chunk_begin, chunk_end, partial;  // partial: -1 for a whole tile
    int64_t cost() const { return static_cast<int64_t>(num_queries) * (chunk_end - chunk_begin); }
};

// Sequences that follow each other and begin with the same keys, `shared` chunks of them: a drafted tree. All its queries see all
// of those.
struct Family {
    int first, members, queries, shared;
};

// A sequence and head whose chunks were computed apart. Of the shared ones its rows begin at `row`.
struct Split {
    Item item;
    int shared, shared_partial, row;
};

struct TailGroup {
    const Tail* tail;
    int head, number;
};

struct Emitted {  // [rows][stride] = product
    static constexpr bool kPairs = false;
    float* out;
    size_t stride;
    int width;
    template <int NR>
    [[gnu::always_inline]] void operator()(int row, int panel, const F (&x)[NR]) const {
        float* p = out + row * stride + panel * kPanel;
#pragma GCC unroll 8
        for (int j = 0; j < NR; j++) f_store_first(p + j * kPanel, x[j], width - (panel + j) * kPanel);
    }
};
struct Added {  // [rows][stride] += product; rows are padded to whole panels
    static constexpr bool kPairs = false;
    float* out;
    size_t stride;
    template <int NR>
    [[gnu::always_inline]] void operator()(int row, int panel, const F (&x)[NR]) const {
        float* p = out + row * stride + panel * kPanel;
#pragma GCC unroll 8
        for (int j = 0; j < NR; j++) f_store(p + j * kPanel, f_load(p + j * kPanel) + x[j]);
    }
};
struct Gated {  // [rows][stride] = silu(gate) * up of alternating panels
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

class Engine {
  public:
    // Engines may have one team: they compute in turn.
    Engine(const PdmeshModel& model, std::shared_ptr<Team> team)
        : model_(model), layers_(model.layers, model.layers + model.num_layers), shared_team_(std::move(team)), team_(*shared_team_) {
        model_.layers = layers_.data();
        groups_ = model.num_heads / model.num_kv_heads;
        has_window_ = std::any_of(layers_.begin(), layers_.end(), [](const PdmeshLayer& layer) { return layer.window != 0; });
        tile_queries_ = std::max(1, kTileTarget / groups_);
        hidden_stride_ = round_up(model.hidden, 16);
        inner_stride_ = round_up(model.intermediate, 16);
        attended_stride_ = model.num_heads * model.head_dim;
        qkv_stride_ = attended_stride_ + 2 * model.num_kv_heads * model.head_dim;
        for (int rank = 0; rank < team_.size(); rank++) {
            scratch_.push_back(std::make_unique<AttentionScratch>(tile_queries_ * groups_, model.head_dim));
            own_rows_.push_back(std::make_unique<RowBuffer>());
            heads_.emplace_back(2 * model.head_dim);
        }
    }

    const std::shared_ptr<Team>& team() const { return shared_team_; }

    void step(const PdmeshStep& step) {
        std::lock_guard lock(mutex_);  // of the buffers; the team has its own
        step_ = &step;
        kv_ = {model_.num_kv_heads, model_.head_dim, model_.block_size, model_.kv_format, step.num_blocks, step.kv};
        reserve(step.num_tokens);
        plan(step);
        profile_ = {};
        const int64_t start = now_ns();
        team_.run([this](int rank) { forward(rank); });
        profile_.total = now_ns() - start;
        if (step.profile) *step.profile = profile_;
    }

  private:
    void reserve(int num_tokens) {
        const size_t rows = num_tokens;
        hidden_.reserve(rows * hidden_stride_);
        qkv_.reserve(rows * qkv_stride_);
        attended_.reserve(rows * attended_stride_);
        inner_.reserve(rows * inner_stride_);
        queries_.reserve(rows * attended_stride_ * 4 + 64);
        const auto for_rows_of = [&](const PdmeshLinear& linear) {
            shared_rows_.reserve(linear, num_tokens);
            for (auto& own : own_rows_) own->reserve(linear, kFewRows);
        };
        for (const PdmeshLayer& layer : layers_)
            for (const PdmeshLinear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) for_rows_of(*linear);
        for_rows_of(model_.head);
    }

    // Attention items, the same for all layers: a window only makes some chunks empty.
    void plan(const PdmeshStep& step) {
        items_.clear();
        splits_.clear();
        plan_tails(step);
        plan_families(step);
        int64_t tiles = 0;
        for (int s = 0; s < step.num_seqs; s++) tiles += (queries_of(s) + tile_queries_ - 1) / tile_queries_ * model_.num_kv_heads;
        int num_partials = 0, most_queries = 1;
        for (const Family& family : families_)
            if (family.queries <= kSplitQueries) most_queries = std::max(most_queries, family.queries);
        partial_rows_ = round_up(most_queries * groups_, 16);
        const bool may_split = team_.size() > 1 && tiles < 8 * team_.size();
        for (const Family& family : families_)
            for (int head = 0; head < model_.num_kv_heads; head++) {
                const int shared_partial = num_partials;
                for (int c = 0; c < family.shared; c++) items_.push_back({family.first, head, 0, family.queries, c, c + 1, num_partials++});
                for (int m = 0, row = 0; m < family.members; row += queries_of(family.first + m++) * groups_)
                    plan_sequence(step, family.first + m, head, may_split, {{}, family.shared, shared_partial, row}, num_partials);
            }
        // Large ones first, so that no rank is left with one at the end.
        std::stable_sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) { return a.cost() > b.cost(); });
        // The heads of a sequence lie side by side: one rank takes them all where that leaves enough for the others.
        bundle_ = static_cast<int>(items_.size()) >= 8 * team_.size() * model_.num_kv_heads ? model_.num_kv_heads : 1;
        partial_sums_.reserve(static_cast<size_t>(num_partials) * partial_rows_ * 2 + kPanel);  // merge reads whole vectors
        partial_outputs_.reserve(static_cast<size_t>(num_partials) * partial_rows_ * model_.head_dim);
        mark_open_groups(step);
    }

    // One sequence and head, from the chunk on that it does not share.
    void plan_sequence(const PdmeshStep& step, int s, int head, bool may_split, Split split, int& num_partials) {
        const int num = queries_of(s), chunks = (step.context_lens[s] + kChunk - 1) / kChunk;
        if (split.shared || (may_split && num <= kSplitQueries && num <= tile_queries_ && chunks > 1)) {
            split.item = {s, head, 0, num, split.shared, chunks, num_partials};
            splits_.push_back(split);
            for (int c = split.shared; c < chunks; c++) items_.push_back({s, head, 0, num, c, c + 1, num_partials++});
            return;
        }
        for (int q = 0; q < num; q += tile_queries_) {
            const int count = std::min(tile_queries_, num - q), last = step.context_lens[s] - num + q + count;
            items_.push_back({s, head, q, count, 0, (last + kChunk - 1) / kChunk, -1});
        }
    }

    void plan_families(const PdmeshStep& step) {
        families_.clear();
        for (int s = 0; s < step.num_seqs; s += families_.back().members) families_.push_back(family_of(step, s));
    }

    // The sequence and the branches behind it, as many as make one tile.
    Family family_of(const PdmeshStep& step, int s) const {
        Family family{s, 1, queries_of(s), 0};
        int alike = alike_until(step, s);
        for (int next = s + 1; next < step.num_seqs && tails_of_[next] && !has_window_; next++) {
            alike = std::min(alike, alike_until(step, next));
            const int shared = alike / kChunk, queries = family.queries + queries_of(next);
            if (!shared || queries > std::min(kSplitQueries, tile_queries_) || !is_same_beginning(step, s, next, shared * kChunk)) break;
            family = {s, family.members + 1, queries, shared};
        }
        return family;
    }

    // Up to this position all queries of a sequence see all keys, and these lie in its blocks.
    int alike_until(const PdmeshStep& step, int s) const {
        const int first_query = step.context_lens[s] - queries_of(s);
        return tails_of_[s] ? std::min(first_query, tails_of_[s]->start) : first_query;
    }

    bool is_same_beginning(const PdmeshStep& step, int s, int other, int num_keys) const {
        const int32_t *blocks = step.blocks + step.block_starts[s], *others = step.blocks + step.block_starts[other];
        return std::equal(blocks, blocks + (num_keys + model_.block_size - 1) / model_.block_size, others);
    }

    // See write_token: the last token of a sequence in this step, unless an earlier step has begun its group. A branch's tokens
    // lie anywhere behind: each of them.
    void mark_open_groups(const PdmeshStep& step) {
        open_ends_.assign(step.num_tokens, 0);
        for (int s = 0; s < step.num_seqs; s++) {
            const int last = step.query_starts[s + 1] - 1;
            if (queries_of(s) > 1 || step.slots[last] % kGroup == 0) open_ends_[last] = kGroup;
            if (tails_of_[s]) std::fill(open_ends_.begin() + step.query_starts[s], open_ends_.begin() + last + 1, kGroup);
        }
        if (!tails_.empty()) end_at_written_slots(step);
    }

    // What lies behind a token may be a branch, which another rank writes at the same time.
    void end_at_written_slots(const PdmeshStep& step) {
        written_.assign(step.slots, step.slots + step.num_tokens);
        std::sort(written_.begin(), written_.end());
        for (int t = 0; t < step.num_tokens; t++) {
            if (!open_ends_[t]) continue;
            const auto next = std::upper_bound(written_.begin(), written_.end(), step.slots[t]);
            if (next != written_.end() && *next / kGroup == step.slots[t] / kGroup) open_ends_[t] = *next % kGroup;
        }
    }

    // Groups of 16 positions that have keys in a tail are put together anew in each layer, each key at its place: so sums have
    // the order that they have where all keys lie in the sequence's blocks.
    void plan_tails(const PdmeshStep& step) {
        tails_.clear();
        tails_of_.assign(step.num_seqs, nullptr);
        tail_groups_.clear();
        tails_.reserve(step.num_tails);
        int num_loose = 0;
        for (int64_t i = 0; i < step.num_tails; i++) {
            const auto [seq, first, slots] = std::to_array(step.tails[i]);
            const int start = first / kGroup * kGroup, groups = (step.context_lens[seq] - start + kGroup - 1) / kGroup;
            tails_.push_back({step.blocks + step.block_starts[seq], step.tail_slots + slots, start, first, step.context_lens[seq], groups, num_loose});
            tails_of_[seq] = &tails_.back();
            num_loose += groups * model_.num_kv_heads;
            for (int head = 0; head < model_.num_kv_heads; head++)
                for (int g = 0; g < groups; g++) tail_groups_.push_back({&tails_.back(), head, g});
        }
        loose_groups_.reserve(static_cast<size_t>(num_loose) * kv_.loose_group_bytes());
    }

    uint8_t* loose_groups(const Tail& tail, int head) const {
        return loose_groups_.get() + (tail.num_before + static_cast<int64_t>(head) * tail.groups) * kv_.loose_group_bytes();
    }

    void gather_tails(int rank, int layer) {
        for (int i; (i = team_.take()) < static_cast<int>(tail_groups_.size());) {
            const auto& [tail, head, number] = tail_groups_[i];
            gather_group(kv_, layer, head, *tail, number, LooseGroup(kv_, loose_groups(*tail, head), number));
        }
    }

    float* partial_sums(int partial) { return partial_sums_.get() + static_cast<size_t>(partial) * partial_rows_ * 2; }
    float* partial_output(int partial) {
        return partial_outputs_.get() + static_cast<size_t>(partial) * partial_rows_ * model_.head_dim;
    }

    int queries_of(int seq) const { return step_->query_starts[seq + 1] - step_->query_starts[seq]; }

    // ---- one rank's way through the step

    struct Clock {  // adds the time since the last mark to a stage
        int64_t last;
        bool is_on;
        void mark(int64_t& stage) {
            if (!is_on) return;
            const int64_t now = now_ns();
            stage += now - last;
            last = now;
        }
    };

    void forward(int rank) {
        Clock clock{now_ns(), rank == 0 && step_->profile};
        embed(rank);
        team_.barrier();
        clock.mark(profile_.embed);
        int num_rows = step_->num_tokens;
        const bool is_whole = step_->num_rows == step_->num_tokens;
        for (int index = 0; index < model_.num_layers; index++) {
            const PdmeshLayer& layer = layers_[index];
            Rows rows = prepare(rank, layer.qkv, hidden_.get(), hidden_stride_, layer.input_norm, num_rows);
            clock.mark(profile_.prepare);
            multiply(team_, rank, layer.qkv, rows, num_rows, Emitted{qkv_.get(), size_t(qkv_stride_), qkv_stride_});
            team_.barrier();
            clock.mark(profile_.qkv);
            rotate_and_write(rank, index, layer);
            team_.barrier();
            if (rank == 0 && step_->layers_done) tell_layer_done(index);
            if (!tails_.empty()) {
                gather_tails(rank, index);
                team_.barrier();
            }
            clock.mark(profile_.rope);
            attend(rank, index, layer.window);
            team_.barrier();
            if (index == model_.num_layers - 1 && !is_whole) {  // from here on only the tokens whose logits are wanted matter
                if (rank == 0) keep_wanted_rows();
                num_rows = step_->num_rows;
                team_.barrier();
            }
            clock.mark(profile_.attention);
            if (num_rows == 0) break;
            rows = prepare(rank, layer.output, attended_.get(), attended_stride_, nullptr, num_rows);
            clock.mark(profile_.prepare);
            multiply(team_, rank, layer.output, rows, num_rows, Added{hidden_.get(), size_t(hidden_stride_)});
            team_.barrier();
            clock.mark(profile_.output);
            rows = prepare(rank, layer.gate_up, hidden_.get(), hidden_stride_, layer.mlp_norm, num_rows);
            clock.mark(profile_.prepare);
            multiply(team_, rank, layer.gate_up, rows, num_rows, Gated{inner_.get(), size_t(inner_stride_)});
            team_.barrier();
            clock.mark(profile_.gate_up);
            rows = prepare(rank, layer.down, inner_.get(), inner_stride_, nullptr, num_rows);
            clock.mark(profile_.prepare);
            multiply(team_, rank, layer.down, rows, num_rows, Added{hidden_.get(), size_t(hidden_stride_)});
            team_.barrier();
            clock.mark(profile_.down);
        }
        if (num_rows == 0) return;
        if (step_->hidden) tell_hidden(rank);
        const Rows rows = prepare(rank, model_.head, hidden_.get(), hidden_stride_, model_.norm, step_->num_rows);
        multiply(team_, rank, model_.head, rows, step_->num_rows, Emitted{step_->logits, size_t(model_.vocab), model_.vocab});
        clock.mark(profile_.head);
    }

    // For pushes that send KV while the step still runs.
    void tell_layer_done(int index) const {
        std::atomic_ref<int32_t>(*step_->layers_done).store(index + 1, std::memory_order_release);
        if (step_->signal_fd < 0 || ((index + 1) % step_->signal_every && index + 1 < model_.num_layers)) return;
        const char byte = 0;
        if (write(step_->signal_fd, &byte, 1) < 0) return;  // full: then its reader is awake as well
    }

    // What the wanted tokens' states are after the last layer.
    void tell_hidden(int rank) const {
        const size_t width = model_.hidden;
        for (int r = rank; r < step_->num_rows; r += team_.size())
            std::memcpy(step_->hidden + r * width, hidden_.get() + r * static_cast<size_t>(hidden_stride_), sizeof(float) * width);
    }

    void embed(int rank) {
        const int width = model_.hidden;
        for (int t = rank; t < step_->num_tokens; t += team_.size()) {
            float* out = hidden_.get() + static_cast<size_t>(t) * hidden_stride_;
            const int64_t first = step_->token_ids[t] * width;
            if (model_.embedding_format == kFloat32) {
                std::memcpy(out, reinterpret_cast<const float*>(model_.embedding) + first, sizeof(float) * width);
            } else {
                const auto* from = reinterpret_cast<const uint16_t*>(model_.embedding) + first;
                for (int i = 0; i < width; i++) {
                    const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
                    std::memcpy(out + i, &bits, 4);
                }
            }
            for (int i = width; i < hidden_stride_; i++) out[i] = 0;
        }
    }

    // All rows, ready for `linear`. Ends with a barrier where the ranks shared the work.
    Rows prepare(int rank, const PdmeshLinear& linear, const float* x, int stride, const float* weight, int num_rows) {
        if (num_rows <= kFewRows) {
            Rows rows = own_rows_[rank]->view(linear);
            for (int r = 0; r < num_rows; r++)
                prepare_row(linear, x + static_cast<size_t>(r) * stride, weight, model_.eps, own_rows_[rank]->scratch.get(), rows, r);
            return rows;
        }
        Rows rows = shared_rows_.view(linear);
        const int begin = static_cast<int64_t>(num_rows) * rank / team_.size();
        const int end = static_cast<int64_t>(num_rows) * (rank + 1) / team_.size();
        for (int r = begin; r < end; r++)
            prepare_row(linear, x + static_cast<size_t>(r) * stride, weight, model_.eps, own_rows_[rank]->scratch.get(), rows, r);
        team_.barrier();
        return rows;
    }

    // Queries: norm, rotation, scale, into `queries_` [head][token][query head of it][head_dim]. Keys and values: into the pool.
    [[gnu::noinline]] void rotate_and_write(int rank, int index, const PdmeshLayer& layer) {
        const bool has_chains = step_->num_seqs * 2 <= step_->num_tokens;
        if (step_->num_tokens <= (has_chains ? kFewTokens : kFewTokens / 2)) return rotate_and_write_few(rank, index, layer);
        constexpr int step = 4;
        const int num_tokens = step_->num_tokens;
        for (int item; (item = team_.take()) * step < num_tokens;)
            for (int t = item * step; t < std::min(num_tokens, (item + 1) * step); t++)
                for (int head = 0; head < model_.num_kv_heads; head++) {
                    ask_for_slot(index, head, step_->slots[t]);
                    rotate_queries(rank, layer, t, head);
                    write_key_value(rank, index, layer, t, head);
                }
    }

    // Tokens that follow each other lie in the same lines of memory: one rank writes a head's keys and values of all of them.
    void rotate_and_write_few(int rank, int index, const PdmeshLayer& layer) {
        constexpr int step = 4;
        const int num_tokens = step_->num_tokens, heads = model_.num_kv_heads, pieces = (num_tokens + step - 1) / step;
        for (int item; (item = team_.take()) < heads * (1 + pieces);) {
            const int head = item % heads;
            if (item < heads) {
                for (int t = 0; t < num_tokens; t++)
                    if (t == 0 || step_->slots[t] / kGroup != step_->slots[t - 1] / kGroup) ask_for_slot(index, head, step_->slots[t]);
                for (int t = 0; t < num_tokens; t++) write_key_value(rank, index, layer, t, head);
                continue;
            }
            const int first = (item / heads - 1) * step;
            for (int t = first; t < std::min(num_tokens, first + step); t++) rotate_queries(rank, layer, t, head);
        }
    }

    void rotate_queries(int rank, const PdmeshLayer& layer, int token, int head) {
        const int dim = model_.head_dim;
        const float* row = qkv_.get() + static_cast<size_t>(token) * qkv_stride_;
        float* rotated = heads_[rank].data();
        const size_t element = kv_.format == kFloat32 ? 4 : 2;
        for (int g = 0; g < groups_; g++) {
            rotate(row + (head * groups_ + g) * dim, layer.query_norm, step_->positions[token], rotated);
            // Scores are exponents of 2 from here on.
            const F scale = f_set(model_.attention_scale * 1.44269504f);
            uint8_t* out = queries_.get() + ((static_cast<size_t>(head) * step_->num_tokens + token) * groups_ + g) * dim * element;
            for (int d = 0; d < dim; d += 16) {
                const F x = f_load(rotated + d) * scale;
                if (element == 4) f_store(reinterpret_cast<float*>(out) + d, x);
                else f_store_bf16(reinterpret_cast<uint16_t*>(out) + d, x);
            }
        }
    }

    void write_key_value(int rank, int index, const PdmeshLayer& layer, int token, int head) {
        const int dim = model_.head_dim;
        const float* row = qkv_.get() + static_cast<size_t>(token) * qkv_stride_;
        float* rotated = heads_[rank].data();
        rotate(row + (model_.num_heads + head) * dim, layer.key_norm, step_->positions[token], rotated);
        const float* value = row + (model_.num_heads + model_.num_kv_heads + head) * dim;
        write_token(kv_, index, head, step_->slots[token], open_ends_[token], rotated, value);
    }

    // A token's key lies in all lines of its group: they arrive while the queries are rotated.
    [[gnu::always_inline]] void ask_for_slot(int index, int head, int64_t slot) const {
        const int in_block = static_cast<int>(slot % kv_.block_size);
        const uint8_t* keys = kv_.group(kv_.block(index, 0, slot / kv_.block_size), head, in_block);
        const uint8_t* values = kv_.group(kv_.block(index, 1, slot / kv_.block_size), head, in_block);
        for (int at = 0; at < kv_.group_bytes(); at += 64) prefetch(keys + at);
        const int panel_bytes = kv_.group_bytes() / (kv_.head_dim / kPanel);
        for (int at = in_block % kGroup * panel_bytes / kGroup; at < kv_.group_bytes(); at += panel_bytes) prefetch(values + at);
    }

    [[gnu::noinline]] void rotate(const float* x, const float* weight, int64_t position, float* out) const {
        const int dim = model_.head_dim, half = model_.rotary_dim / 2;
        float normed[512];
        if (weight) {
            const F factor = f_set(inverse_rms(x, dim, dim, model_.eps));
            for (int d = 0; d < dim; d += 16) f_store(normed + d, f_load(x + d) * factor * f_load(weight + d));
            x = normed;
        }
        const float *cos = model_.cos + position * half, *sin = model_.sin + position * half;
        for (int i = 0; i < half; i++) {
            out[i] = x[i] * cos[i] - x[i + half] * sin[i];
            out[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
        }
        for (int i = 2 * half; i < dim; i++) out[i] = x[i];
    }

    QueryTile tile_of(const Item& item, int64_t window) const {
        const int first = step_->query_starts[item.seq] + item.first_query;
        const int element = kv_.format == kFloat32 ? 4 : 2;
        const size_t row = (static_cast<size_t>(item.head) * step_->num_tokens + first) * groups_;
        const size_t stride = static_cast<size_t>(model_.head_dim) * element;
        const int position = step_->context_lens[item.seq] - queries_of(item.seq) + item.first_query;
        const Tail* tail = tails_of_[item.seq];
        return {queries_.get() + row * stride, stride, item.num_queries, groups_, position, item.head, window,
                step_->blocks + step_->block_starts[item.seq], tail ? tail->start : INT_MAX, tail ? loose_groups(*tail, item.head) : nullptr};
    }

    float* target_of(const Item& item) const {
        const size_t token = step_->query_starts[item.seq] + item.first_query;
        return attended_.get() + token * attended_stride_ + item.head * groups_ * model_.head_dim;
    }

    // One rank's way through the items' chunks; it stands on one that some row sees.
    class Cursor {
      public:
        Cursor(Engine& engine, int layer, int64_t window) : engine_(engine), layer_(layer), window_(window) { open(); }
        // To the next chunk, of this item or of another.
        void advance() {
            if (!find(index + 1)) open();
        }
        bool is_on() const { return item != nullptr; }
        const Item* item = nullptr;
        QueryTile tile{};
        Chunk chunk{};
        int index = 0;

      private:
        void open() {
            const int count = static_cast<int>(engine_.items_.size());
            for (;;) {
                if (next_ == end_) {
                    next_ = engine_.team_.take() * engine_.bundle_;
                    end_ = std::min(next_ + engine_.bundle_, count);
                    if (next_ >= count) break;
                }
                item = &engine_.items_[next_++];
                tile = engine_.tile_of(*item, window_);
                if (find(item->chunk_begin)) return;
            }
            next_ = end_;
            item = nullptr;
        }
        bool find(int from) {
            for (index = from; index < item->chunk_end; index++)
                if (locate(engine_.kv_, layer_, tile, index, chunk)) return true;
            return false;
        }
        Engine& engine_;
        int layer_;
        int64_t window_;
        int next_ = 0, end_ = 0;
    };

    [[gnu::noinline]] void attend(int rank, int index, int64_t window) {
        with_dot(kv_.format, [&](auto dot) {
            // The cursor runs one chunk ahead, so that its keys arrive while the one before is computed.
            Cursor cursor(*this, index, window);
            const Item* before = nullptr;
            while (cursor.is_on()) {
                const Item& item = *cursor.item;
                const QueryTile tile = cursor.tile;
                const Chunk chunk = cursor.chunk;
                cursor.advance();
                const bool is_first = &item != before, is_last = cursor.item != &item;
                attend_chunk<decltype(dot)>(kv_, tile, chunk, cursor.is_on() ? cursor.chunk : chunk, *scratch_[rank]);
                keep(rank, item, tile, is_first, is_last);
                before = &item;
            }
        });
        if (splits_.empty()) return;
        team_.barrier();
        for (int i; (i = team_.take()) < static_cast<int>(splits_.size());) merge(rank, window, splits_[i]);
    }

    // What a chunk gave: into the item's result, or (split) to be merged later.
    void keep(int rank, const Item& item, const QueryTile& tile, bool is_first, bool is_last) {
        AttentionScratch& scratch = *scratch_[rank];
        const int rows = tile.rows(), dim = model_.head_dim;
        const Sums& chunk = scratch.chunk;
        if (item.partial >= 0) {
            float* sums = partial_sums(item.partial);
            std::memcpy(sums, chunk.peaks.data(), sizeof(float) * rows);
            std::memcpy(sums + partial_rows_, chunk.totals.data(), sizeof(float) * rows);
            std::memcpy(partial_output(item.partial), scratch.output.data(), sizeof(float) * rows * dim);
            return;
        }
        if (is_first) clear(scratch.folded, scratch.result.data(), rows, dim);
        fold(scratch.folded, scratch.result.data(), chunk.peaks.data(), chunk.totals.data(), scratch.output.data(), rows, dim);
        if (is_last) finish(scratch.folded, scratch.result.data(), tile, dim, target_of(item), attended_stride_);
    }

    void merge(int rank, int64_t window, const Split& split) {
        const QueryTile tile = tile_of(split.item, window);
        AttentionScratch& scratch = *scratch_[rank];
        const int rows = tile.rows(), dim = model_.head_dim;
        clear(scratch.folded, scratch.result.data(), rows, dim);
        // Chunks before the window were not computed, and what lies there is another's.
        for (int c = tile.first_visible(tile.position) / kChunk; c < split.item.chunk_end; c++) {
            const bool is_shared = c < split.shared;
            const int partial = is_shared ? split.shared_partial + c : split.item.partial + c - split.shared, row = is_shared ? split.row : 0;
            const float* peaks = partial_sums(partial) + row;
            const float* output = partial_output(partial) + static_cast<size_t>(row) * dim;
            fold(scratch.folded, scratch.result.data(), peaks, peaks + partial_rows_, output, rows, dim);
        }
        finish(scratch.folded, scratch.result.data(), tile, dim, target_of(split.item), attended_stride_);
    }

    // Rows are in ascending order, so moving each down to its place overwrites only what is not wanted any more.
    void keep_wanted_rows() {
        for (int r = 0; r < step_->num_rows; r++) {
            const size_t from = step_->logits_rows[r];
            if (from == static_cast<size_t>(r)) continue;
            std::memcpy(hidden_.get() + r * static_cast<size_t>(hidden_stride_), hidden_.get() + from * hidden_stride_, sizeof(float) * hidden_stride_);
            std::memcpy(attended_.get() + r * static_cast<size_t>(attended_stride_), attended_.get() + from * attended_stride_,
                        sizeof(float) * attended_stride_);
        }
    }

    PdmeshModel model_;
    std::vector<PdmeshLayer> layers_;
    std::shared_ptr<Team> shared_team_;
    Team& team_;
    std::mutex mutex_;
    int groups_, tile_queries_, partial_rows_ = 0, bundle_ = 1, hidden_stride_, inner_stride_, attended_stride_, qkv_stride_;
    const PdmeshStep* step_ = nullptr;
    KVGeometry kv_{};
    PdmeshProfile profile_{};
    Buffer<float> hidden_, qkv_, attended_, inner_, partial_sums_, partial_outputs_;
    Buffer<uint8_t> queries_, loose_groups_;
    RowBuffer shared_rows_;
    std::vector<std::unique_ptr<RowBuffer>> own_rows_;
    std::vector<std::unique_ptr<AttentionScratch>> scratch_;
    std::vector<std::vector<float>> heads_;
    std::vector<Item> items_;
    std::vector<Split> splits_;
    std::vector<Family> families_;
    bool has_window_;
    std::vector<uint8_t> open_ends_;  // of the tokens: see write_token
    std::vector<int64_t> written_;
    std::vector<Tail> tails_;
    std::vector<const Tail*> tails_of_;  // of the sequences; mostly null
    std::vector<TailGroup> tail_groups_;
};

}  // namespace
}  // namespace pdmesh

using pdmesh::Engine;

extern "C" {

// Sizes of the structs as this library was compiled: library.py compares them with its own.
void pdmesh_abi(int64_t* sizes) {
    sizes[0] = sizeof(PdmeshLinear);
    sizes[1] = sizeof(PdmeshLayer);
    sizes[2] = sizeof(PdmeshModel);
    sizes[3] = sizeof(PdmeshStep);
    sizes[4] = sizeof(PdmeshProfile);
    sizes[5] = sizeof(PdmeshPool);
}

// The weights stay the caller's and must outlive the engine. Null without memory or threads.
void* pdmesh_engine_create(const PdmeshModel* model, int32_t num_threads, int32_t spin_us) {
    try {
        return new Engine(*model, std::make_shared<pdmesh::Team>(num_threads, spin_us));
    } catch (const std::exception&) {
        return nullptr;
    }
}

// One that computes with the threads of `other`, which may be destroyed before it. Null without memory.
void* pdmesh_engine_create_beside(const PdmeshModel* model, void* other) {
    try {
        return new Engine(*model, static_cast<Engine*>(other)->team());
    } catch (const std::exception&) {
        return nullptr;
    }
}

void pdmesh_engine_destroy(void* engine) { delete static_cast<Engine*>(engine); }

// The engine's threads, for the sampler that runs between steps.
void* pdmesh_engine_team(void* engine) { return static_cast<Engine*>(engine)->team().get(); }

// 0, or 1 without memory for the step's buffers.
int32_t pdmesh_engine_step(void* engine, const PdmeshStep* step) {
    try {
        static_cast<Engine*>(engine)->step(*step);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}
