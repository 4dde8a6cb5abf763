// Attention of a step, layer by layer: threads take the plan's items, and merge what was split.
#pragma once

#include <memory>
#include <vector>

#include "attention.h"
#include "attention_plan.h"
#include "buffers.h"
#include "latent.h"
#include "parallel.h"

namespace pdmesh {

class AttentionStage {
  public:
    AttentionStage(Team& team, const KVGeometry& kv, int groups, bool has_window, const AttentionShape& shape)
        : team_(team), kv_(kv), groups_(groups), shape_(shape), plan_(kv.num_kv_heads, groups, kv.block_size, has_window, shape.is_latent ? kLatentTarget : kTileTarget) {
        for (int rank = 0; rank < team.capacity(); rank++) {
            scratch_.push_back(std::make_unique<AttentionScratch>(plan_.most_rows(), shape));
            if (shape.is_latent) latents_.push_back(std::make_unique<LatentChunk>(kv, shape));
        }
    }

    // Of this step, whose queries lie as [key/value head][token][query head of it][key_dim]. Room is made for them.
    void begin(const PdmeshStep& step) {
        step_ = &step;
        kv_.num_blocks = step.num_blocks;
        kv_.base = step.kv;
        plan_.make(step, team_.expected_size());
        loose_groups_.reserve(static_cast<size_t>(plan_.num_loose_groups) * kv_.loose_group_bytes());
        partial_sums_.reserve(static_cast<size_t>(plan_.num_partials) * plan_.partial_rows * 2 + kPanel);  // merge reads whole vectors
        partial_outputs_.reserve(static_cast<size_t>(plan_.num_partials) * plan_.partial_rows * shape_.value_dim);
        const size_t query_rows = static_cast<size_t>(step.num_tokens) * kv_.num_kv_heads * groups_ + 32;  // matrix tiles read some more
        queries_.reserve(query_rows * shape_.key_dim * 4);
        query_scales_.reserve(query_rows);
        attended_.reserve(static_cast<size_t>(step.num_tokens) * attended_stride());
    }

    const KVGeometry& kv() const { return kv_; }
    const AttentionPlan& plan() const { return plan_; }
    bool has_tails() const { return !plan_.tails.empty(); }
    // `query` [key_dim], times `factor`, to where the products take it: float32 beside a pool in float32; int16 and a scale beside one
    // in int8 that no matrix tiles multiply; else bfloat16.
    [[gnu::always_inline]] void write_query(int token, int head, int group, const float* query, float factor) const {
        const size_t row = row_of(token, head, group);
        uint8_t* out = query_row(row);
        with_dot(dot_format(), shape_, [&](auto dot) {
            constexpr bool is_words = std::is_same_v<decltype(dot), DotInt8AsWords>;
            F most = f_zero(), finite = f_zero();  // the latter stays 0, but NaN where a number is NaN or infinite: integers would hide it
            if constexpr (is_words) {
                for (int d = 0; d < shape_.key_dim; d += 16) {
                    const F x = f_load(query + d);
                    most = f_max(most, f_abs(x));
                    finite = f_fma(x, f_zero(), finite);
                }
                const float limit = f_hmax(most);
                query_scales_.get()[row] = limit / kMostWord * factor + f_sum(finite);
                factor = factor_of_words(limit);
            }
            const F factors = f_set(factor);
            for (int d = 0; d < shape_.key_dim; d += 16) {
                const F x = f_load(query + d) * factors;
                if constexpr (std::is_same_v<decltype(dot), DotFloat32>) f_store(reinterpret_cast<float*>(out) + d, x);
                else if constexpr (is_words) f_store_i16(reinterpret_cast<int16_t*>(out) + d, x);
                else f_store_bf16(reinterpret_cast<uint16_t*>(out) + d, x);
            }
        });
    }
    // [token][query head][value_dim]
    float* attended() const { return attended_.get(); }
    int attended_stride() const { return kv_.num_kv_heads * groups_ * shape_.value_dim; }

    void gather_tails(int layer) {
        for (int i; (i = team_.take()) < static_cast<int>(plan_.tail_groups.size());) {
            const auto& [tail, head, number] = plan_.tail_groups[i];
            gather_group(kv_, layer, head, *tail, number, LooseGroup(kv_, loose_groups(*tail, head), number));
        }
    }

    // Call on every rank; a barrier after.
    [[gnu::noinline]] void attend(int rank, int index, const PdmeshLayer& layer) {
        with_dot(dot_format(), shape_, [&](auto dot) {
            // The cursor runs one chunk ahead, so that its keys arrive while the one before is computed.
            Cursor cursor(*this, index, layer);
            const Item* before = nullptr;
            while (cursor.is_on()) {
                const Item& item = *cursor.item;
                const QueryTile tile = cursor.tile;
                const Chunk chunk = cursor.chunk;
                cursor.advance();
                const bool is_first = &item != before, is_last = cursor.item != &item;
                if (shape_.is_latent) {
                    const Chunk own = latents_[rank]->lay_out(chunk, tile.last() + 1 - chunk.start);
                    attend_chunk<decltype(dot)>(shape_, tile, own, own, *scratch_[rank]);
                } else {
                    attend_chunk<decltype(dot)>(shape_, tile, chunk, cursor.is_on() ? cursor.chunk : chunk, *scratch_[rank]);
                }
                keep(rank, item, tile, is_first, is_last);
                before = &item;
            }
        });
        if (plan_.splits.empty()) return;
        team_.barrier();
        for (int i; (i = team_.take()) < static_cast<int>(plan_.splits.size());) merge(rank, layer, plan_.splits[i]);
    }

  private:
    uint8_t* loose_groups(const Tail& tail, int head) const {
        return loose_groups_.get() + (tail.num_before + static_cast<int64_t>(head) * tail.groups) * kv_.loose_group_bytes();
    }

    // Latent keys and values are laid out as bf16 before they are multiplied.
    int dot_format() const { return shape_.is_latent && kv_.format == kInt8 ? kBFloat16 : kv_.format; }
    size_t row_of(int token, int head, int group) const { return (static_cast<size_t>(head) * step_->num_tokens + token) * groups_ + group; }
    size_t query_stride() const { return static_cast<size_t>(shape_.key_dim) * (kv_.format == kFloat32 ? 4 : 2); }
    uint8_t* query_row(size_t row) const { return queries_.get() + row * query_stride(); }

    float* partial_sums(int partial) { return partial_sums_.get() + static_cast<size_t>(partial) * plan_.partial_rows * 2; }
    float* partial_output(int partial) {
        return partial_outputs_.get() + static_cast<size_t>(partial) * plan_.partial_rows * shape_.value_dim;
    }

    QueryTile tile_of(const Item& item, const PdmeshLayer& layer) const {
        const int first = step_->query_starts[item.seq] + item.first_query;
        const int position = step_->context_lens[item.seq] - plan_.queries_of(item.seq) + item.first_query;
        const Tail* tail = plan_.tails_of[item.seq];
        const float* sinks = layer.sinks ? layer.sinks + item.head * groups_ : nullptr;
        const size_t row = row_of(first, item.head, 0);
        return {query_row(row), query_scales_.get() + row, query_stride(), item.num_queries, groups_, position, item.head,
                layer.window, step_->blocks + step_->block_starts[item.seq], tail ? tail->start : INT_MAX,
                tail ? loose_groups(*tail, item.head) : nullptr, sinks};
    }

    float* target_of(const Item& item) const {
        const size_t token = step_->query_starts[item.seq] + item.first_query;
        return attended_.get() + token * attended_stride() + item.head * groups_ * shape_.value_dim;
    }

    // One rank's way through the items' chunks; it stands on one that some row sees.
    class Cursor {
      public:
        Cursor(AttentionStage& stage, int layer, const PdmeshLayer& weights) : stage_(stage), layer_(layer), weights_(weights) { open(); }
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
            const int count = static_cast<int>(stage_.plan_.items.size());
            for (;;) {
                if (next_ == end_) {
                    next_ = stage_.team_.take() * stage_.plan_.bundle;
                    end_ = std::min(next_ + stage_.plan_.bundle, count);
                    if (next_ >= count) break;
                }
                item = &stage_.plan_.items[next_++];
                tile = stage_.tile_of(*item, weights_);
                if (find(item->chunk_begin)) return;
            }
            next_ = end_;
            item = nullptr;
        }
        bool find(int from) {
            for (index = from; index < item->chunk_end; index++)
                if (locate(stage_.kv_, layer_, tile, index, chunk)) return true;
            return false;
        }
        AttentionStage& stage_;
        int layer_;
        const PdmeshLayer& weights_;
        int next_ = 0, end_ = 0;
    };

    // What a chunk gave: into the item's result, or (split) to be merged later.
    void keep(int rank, const Item& item, const QueryTile& tile, bool is_first, bool is_last) {
        AttentionScratch& scratch = *scratch_[rank];
        const int rows = tile.rows(), dim = shape_.value_dim;
        const Sums& chunk = scratch.chunk;
        if (item.partial >= 0) {
            float* sums = partial_sums(item.partial);
            std::memcpy(sums, chunk.peaks.data(), sizeof(float) * rows);
            std::memcpy(sums + plan_.partial_rows, chunk.totals.data(), sizeof(float) * rows);
            std::memcpy(partial_output(item.partial), scratch.output.get(), sizeof(float) * rows * dim);
            return;
        }
        if (is_first) clear(scratch.folded, scratch.result.get(), rows, dim);
        fold(scratch.folded, scratch.result.get(), chunk.peaks.data(), chunk.totals.data(), scratch.output.get(), rows, dim);
        if (is_last) finish(scratch.folded, scratch.result.get(), tile, dim, target_of(item), attended_stride());
    }

    void merge(int rank, const PdmeshLayer& layer, const Split& split) {
        const QueryTile tile = tile_of(split.item, layer);
        AttentionScratch& scratch = *scratch_[rank];
        const int rows = tile.rows(), dim = shape_.value_dim;
        clear(scratch.folded, scratch.result.get(), rows, dim);
        // Chunks before the window were not computed, and what lies there is another's.
        for (int c = tile.first_visible(tile.position) / kChunk; c < split.item.chunk_end; c++) {
            const bool is_shared = c < split.shared;
            const int partial = is_shared ? split.shared_partial + c : split.item.partial + c - split.shared, row = is_shared ? split.row : 0;
            const float* peaks = partial_sums(partial) + row;
            const float* output = partial_output(partial) + static_cast<size_t>(row) * dim;
            fold(scratch.folded, scratch.result.get(), peaks, peaks + plan_.partial_rows, output, rows, dim);
        }
        finish(scratch.folded, scratch.result.get(), tile, dim, target_of(split.item), attended_stride());
    }

    Team& team_;
    KVGeometry kv_;
    int groups_;
    AttentionShape shape_;
    AttentionPlan plan_;
    const PdmeshStep* step_ = nullptr;
    Buffer<uint8_t> queries_, loose_groups_;
    Buffer<float> query_scales_, attended_, partial_sums_, partial_outputs_;
    std::vector<std::unique_ptr<AttentionScratch>> scratch_;
    std::vector<std::unique_ptr<LatentChunk>> latents_;
};

}  // namespace pdmesh
