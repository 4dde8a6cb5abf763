// What attention computes at a time: the rows of a tile of queries, against a chunk of keys.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "buffers.h"
#include "kv_layout.h"
#include "panels.h"

namespace pdmesh {

constexpr int kChunk = 128;       // keys of a chunk
constexpr int kChunkGroups = kChunk / kGroup;
constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kMostWord = 32767;  // of a row of int16, which is symmetric

// What makes `limit`, the largest magnitude of a row, kMostWord. 0 for rows of zeros, and of numbers too small to be told apart.
inline float factor_of_words(float limit) { return limit > 1e-30f ? kMostWord / limit : 0.0f; }

// Some rows of one sequence and one key/value head: `num_queries` tokens from position `position`, each with the query heads of
// the key/value head. `queries` as AttentionStage::write_query leaves them, rows [num_queries * num_groups]; `query_scales`: of the
// rows, where they are int16.
struct QueryTile {
    const uint8_t* queries;
    const float* query_scales;
    size_t stride;
    int num_queries, num_groups, position, head;
    int64_t window;  // 0: none; below 0: chunks of so many tokens
    const int32_t* blocks;
    int tail_start;  // from this position on (a multiple of 16), keys and values lie in loose groups at `tail`; INT_MAX: none
    uint8_t* tail;
    const float* sinks;  // logits of the tile's query heads that take their part of the softmax, or null
    int rows() const { return num_queries * num_groups; }
    int last() const { return position + num_queries - 1; }
    int first_visible(int query) const {
        if (window < 0) return static_cast<int>(query - query % window);
        return window ? std::max<int64_t>(0, query - window + 1) : 0;
    }
};

// What a set of keys gives some rows, beside the outputs [rows][head_dim]: the largest score of a row, and the sum of
// 2^(score - largest). Padded to whole vectors.
struct Sums {
    std::vector<float> peaks, totals;
    explicit Sums(int rows) : peaks(round_up(rows, 16), kNothing), totals(round_up(rows, 16)) {}
};

// What a row is multiplied with: keys and values are `key_dim` and `value_dim` numbers. `cap`, of scores s (exponents of 2):
// cap * tanh(s / cap) is taken; 0: none. `is_latent`: see latent.h.
struct AttentionShape {
    int key_dim, value_dim;
    float cap;
    bool is_latent;
};

// Buffers of one thread for tiles of up to `max_rows` rows. Matrix tiles read and write rows beside them, up to a multiple of 32.
// `panels`: keys or values as these read them (attention_tiles.h).
struct AttentionScratch {
    Buffer<float> scores, output, result, weight_scales;
    Buffer<uint8_t> weights, panels;
    Sums chunk, folded;
    AttentionScratch(int max_rows, const AttentionShape& shape) : chunk(max_rows), folded(max_rows) {
        const size_t rows = round_up(max_rows, 32);
        scores.reserve(rows * kChunk);
        output.reserve(rows * shape.value_dim);
        result.reserve(rows * shape.value_dim);
        weights.reserve(rows * kChunk * 4);
        weight_scales.reserve(rows);
        panels.reserve(std::max(2 * (shape.key_dim / 2 * kUnit), kChunkGroups * 2 * (kGroup / 2 * kUnit)));
    }
};

// A chunk of a tile's keys: where its groups lie. Past the last one the last stands again, so that tiles are always full.
struct Chunk {
    int start, groups;
    const uint8_t *keys[kChunkGroups], *values[kChunkGroups];
    const float *key_scales[kChunkGroups], *value_scales[kChunkGroups];
};

// False when no row of the tile sees any key of the chunk.
inline bool locate(const KVGeometry& kv, int layer, const QueryTile& tile, int index, Chunk& chunk) {
    const int start = index * kChunk, end = std::min(start + kChunk, tile.last() + 1);
    if (start >= end || end <= tile.first_visible(tile.position)) return false;
    chunk.start = start;
    chunk.groups = (end - start + kGroup - 1) / kGroup;
    for (int g = 0; g < kChunkGroups; g++) {
        const int position = start + std::min(g, chunk.groups - 1) * kGroup, slot = position % kv.block_size;
        if (position >= tile.tail_start) {
            const LooseGroup group(kv, tile.tail, (position - tile.tail_start) / kGroup);
            chunk.keys[g] = group.keys;
            chunk.values[g] = group.values;
            chunk.key_scales[g] = group.key_scales;
            chunk.value_scales[g] = group.value_scales;
            continue;
        }
        const int64_t id = tile.blocks[position / kv.block_size];
        uint8_t *keys = kv.block(layer, 0, id), *values = kv.block(layer, 1, id);
        chunk.keys[g] = kv.group(keys, tile.head, slot);
        chunk.values[g] = kv.group(values, tile.head, slot);
        if (kv.format == kInt8) {
            chunk.key_scales[g] = kv.scales(keys, tile.head) + slot;
            chunk.value_scales[g] = kv.scales(values, tile.head) + slot;
        }
    }
    return true;
}

}  // namespace pdmesh
