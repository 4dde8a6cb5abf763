// How a step's attention is divided into items that threads take, before the first layer: the same for all layers.
#pragma once

#include <algorithm>
#include <array>
#include <climits>
#include <tuple>
#include <vector>

#include "abi.h"
#include "kv_copy.h"

namespace pdmesh {

constexpr int kTileTarget = 48;    // rows of an attention tile: enough to hide the loads of keys
constexpr int kLatentTarget = 128; // the same where each tile lays out its keys anew
constexpr int kSplitQueries = 16;  // sequences with more queries in a step are not split over their keys
constexpr int64_t kMostPartialRows = 1 << 15;  // results that are kept apart at most, where heads are read together

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

class AttentionPlan {
  public:
    // `groups`: query heads of each key/value head. `has_window`: of any layer.
    AttentionPlan(int num_kv_heads, int groups, int block_size, bool has_window, int tile_target)
        : num_heads_(num_kv_heads), groups_(groups), block_size_(block_size), has_window_(has_window),
          tile_queries_(std::max(1, tile_target / groups)) {}

    int most_rows() const { return tile_queries_ * groups_; }
    int queries_of(int seq) const { return step_->query_starts[seq + 1] - step_->query_starts[seq]; }

    // Attention items, the same for all layers: a window only makes some chunks empty. `team_size`: threads among which they are shared.
    void make(const PdmeshStep& step, int team_size) {
        step_ = &step;
        items.clear();
        splits.clear();
        plan_tails(step);
        plan_families(step);
        int64_t tiles = 0;
        for (int s = 0; s < step.num_seqs; s++) tiles += (queries_of(s) + tile_queries_ - 1) / tile_queries_ * num_heads_;
        int num_partials = 0, most_queries = 1;
        const int most_split = std::min(kSplitQueries, tile_queries_);
        for (const Family& family : families_)
            if (family.queries <= most_split) most_queries = std::max(most_queries, family.queries);
        partial_rows = round_up(most_queries * groups_, 16);
        // The heads of a block lie side by side in memory: split, they are read one after the other, as memory sends them fastest.
        const bool may_split = (num_heads_ > 1 && rows_of_all_partials(step) <= kMostPartialRows) || (team_size > 1 && tiles < 8 * team_size);
        for (const Family& family : families_)
            for (int head = 0; head < num_heads_; head++) {
                const int shared_partial = num_partials;
                for (int c = 0; c < family.shared; c++) items.push_back({family.first, head, 0, family.queries, c, c + 1, num_partials++});
                for (int m = 0, row = 0; m < family.members; row += queries_of(family.first + m++) * groups_)
                    plan_sequence(step, family.first + m, head, may_split, {{}, family.shared, shared_partial, row}, num_partials);
            }
        // Large ones first, so that no rank is left with one at the end; all heads of a chunk together.
        std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
            return std::tuple(-a.cost(), a.seq, a.chunk_begin, a.head) < std::tuple(-b.cost(), b.seq, b.chunk_begin, b.head);
        });
        // The heads of a sequence lie side by side: one rank takes them all where that leaves enough for the others.
        bundle = static_cast<int>(items.size()) >= 8 * team_size * num_heads_ ? num_heads_ : 1;
        this->num_partials = num_partials;
        mark_open_groups(step);
    }

    std::vector<Item> items;
    std::vector<Split> splits;
    int num_partials = 0, partial_rows = 0, bundle = 1, num_loose_groups = 0;
    std::vector<uint8_t> open_ends;  // of the tokens: see write_token
    std::vector<Tail> tails;
    std::vector<const Tail*> tails_of;  // of the sequences; mostly null
    std::vector<TailGroup> tail_groups;

  private:
    // One sequence and head, from the chunk on that it does not share.
    void plan_sequence(const PdmeshStep& step, int s, int head, bool may_split, Split split, int& num_partials) {
        const int num = queries_of(s), chunks = (step.context_lens[s] + kChunk - 1) / kChunk;
        if (split.shared || (may_split && num <= kSplitQueries && num <= tile_queries_ && chunks > 1)) {
            split.item = {s, head, 0, num, split.shared, chunks, num_partials};
            splits.push_back(split);
            for (int c = split.shared; c < chunks; c++) items.push_back({s, head, 0, num, c, c + 1, num_partials++});
            return;
        }
        for (int q = 0; q < num; q += tile_queries_) {
            const int count = std::min(tile_queries_, num - q), last = step.context_lens[s] - num + q + count;
            items.push_back({s, head, q, count, 0, (last + kChunk - 1) / kChunk, -1});
        }
    }

    // If every sequence that may be split is.
    int64_t rows_of_all_partials(const PdmeshStep& step) const {
        int64_t chunks = 0;
        for (int s = 0; s < step.num_seqs; s++)
            if (queries_of(s) <= std::min(kSplitQueries, tile_queries_)) chunks += (step.context_lens[s] + kChunk - 1) / kChunk;
        return chunks * num_heads_ * partial_rows;
    }

    void plan_families(const PdmeshStep& step) {
        families_.clear();
        for (int s = 0; s < step.num_seqs; s += families_.back().members) families_.push_back(family_of(step, s));
    }

    // The sequence and the branches behind it, as many as make one tile.
    Family family_of(const PdmeshStep& step, int s) const {
        Family family{s, 1, queries_of(s), 0};
        int alike = alike_until(step, s);
        for (int next = s + 1; next < step.num_seqs && tails_of[next] && !has_window_; next++) {
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
        return tails_of[s] ? std::min(first_query, tails_of[s]->start) : first_query;
    }

    bool is_same_beginning(const PdmeshStep& step, int s, int other, int num_keys) const {
        const int32_t *blocks = step.blocks + step.block_starts[s], *others = step.blocks + step.block_starts[other];
        return std::equal(blocks, blocks + (num_keys + block_size_ - 1) / block_size_, others);
    }

    // See write_token: the last token of a sequence in this step, unless an earlier step has begun its group. A branch's tokens
    // lie anywhere behind: each of them.
    void mark_open_groups(const PdmeshStep& step) {
        open_ends.assign(step.num_tokens, 0);
        for (int s = 0; s < step.num_seqs; s++) {
            const int last = step.query_starts[s + 1] - 1;
            if (queries_of(s) > 1 || step.slots[last] % kGroup == 0) open_ends[last] = kGroup;
            if (tails_of[s]) std::fill(open_ends.begin() + step.query_starts[s], open_ends.begin() + last + 1, kGroup);
        }
        if (!tails.empty()) end_at_written_slots(step);
    }

    // What lies behind a token may be a branch, which another rank writes at the same time.
    void end_at_written_slots(const PdmeshStep& step) {
        written_.assign(step.slots, step.slots + step.num_tokens);
        std::sort(written_.begin(), written_.end());
        for (int t = 0; t < step.num_tokens; t++) {
            if (!open_ends[t]) continue;
            const auto next = std::upper_bound(written_.begin(), written_.end(), step.slots[t]);
            if (next != written_.end() && *next / kGroup == step.slots[t] / kGroup) open_ends[t] = *next % kGroup;
        }
    }

    // Groups of 16 positions that have keys in a tail are put together anew in each layer, each key at its place: so sums have
    // the order that they have where all keys lie in the sequence's blocks.
    void plan_tails(const PdmeshStep& step) {
        tails.clear();
        tails_of.assign(step.num_seqs, nullptr);
        tail_groups.clear();
        tails.reserve(step.num_tails);
        int num_loose = 0;
        for (int64_t i = 0; i < step.num_tails; i++) {
            const auto [seq, first, slots] = std::to_array(step.tails[i]);
            const int start = first / kGroup * kGroup, groups = (step.context_lens[seq] - start + kGroup - 1) / kGroup;
            tails.push_back({step.blocks + step.block_starts[seq], step.tail_slots + slots, start, first, step.context_lens[seq], groups, num_loose});
            tails_of[seq] = &tails.back();
            num_loose += groups * num_heads_;
            for (int head = 0; head < num_heads_; head++)
                for (int g = 0; g < groups; g++) tail_groups.push_back({&tails.back(), head, g});
        }
        num_loose_groups = num_loose;
    }

    const PdmeshStep* step_ = nullptr;
    int num_heads_, groups_, block_size_;
    bool has_window_;
    int tile_queries_;
    std::vector<Family> families_;
    std::vector<int64_t> written_;
};

}  // namespace pdmesh
