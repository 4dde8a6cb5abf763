// Latent attention (DeepSeek-V2, 2024, section 2.1): a token has one key for all heads, whose first `value_dim` numbers are its value
// too. The pool holds the first half of it where keys lie, the second where values lie. So each chunk is laid out anew, as panels of
// whole keys and of whole values, for all rows of a tile.
#pragma once

#include "attention.h"
#include "buffers.h"

namespace pdmesh {

// A 16 x 16 block of keys (pairs of dimensions of a token) becomes one of values (pairs of tokens of a dimension), or the reverse.
template <class Number, int kPair>
void transpose_block(const Number* from, Number* to) {
    for (int i = 0; i < kGroup; i++)
        for (int j = 0; j < kGroup; j++) to[i / kPair * kGroup * kPair + j * kPair + i % kPair] = from[j / kPair * kGroup * kPair + i * kPair + j % kPair];
}

// int8 numbers become bfloat16 with their scales applied; `index(slot, d, pair)` says where a number lies.
template <class Index>
void widen(const int8_t* from, const float* scales, int dim, uint16_t* to, const Index& index) {
    for (int d = 0; d < dim; d++)
        for (int slot = 0; slot < kGroup; slot++) {
            const int at = index(slot, d, 2);
            to[at] = to_bf16(from[at] * scales[slot]);
        }
}

// What one thread lays out of a chunk.
class LatentChunk {
  public:
    LatentChunk(const KVGeometry& kv, const AttentionShape& shape)
        : half_(kv.head_dim), shape_(shape), format_(kv.format) {
        const size_t number = format_ == kFloat32 ? 4 : 2;
        key_bytes_ = kGroup * shape.key_dim * number;
        value_bytes_ = kGroup * shape.value_dim * number;
        keys_.reserve(key_bytes_ * kChunkGroups);
        values_.reserve(value_bytes_ * kChunkGroups);
        if (format_ == kInt8) widened_.reserve(2 * kGroup * half_);
    }

    // Tokens from `num_visible` on may not be written yet: they have probability 0, and values of 0.
    Chunk lay_out(const Chunk& chunk, int num_visible) {
        Chunk result = chunk;
        for (int g = 0; g < chunk.groups; g++) {
            uint8_t *keys = keys_.get() + g * key_bytes_, *values = values_.get() + g * value_bytes_;
            const int visible = std::min(kGroup, num_visible - g * kGroup);
            if (format_ == kFloat32) lay_out_group<float, 1>(chunk.keys[g], chunk.values[g], visible, keys, values);
            else if (format_ == kBFloat16) lay_out_group<uint16_t, 2>(chunk.keys[g], chunk.values[g], visible, keys, values);
            else lay_out_int8(chunk, g, visible, keys, values);
            result.keys[g] = keys;
            result.values[g] = values;
        }
        for (int g = chunk.groups; g < kChunkGroups; g++) {
            result.keys[g] = result.keys[chunk.groups - 1];
            result.values[g] = result.values[chunk.groups - 1];
        }
        return result;
    }

  private:
    void lay_out_int8(const Chunk& chunk, int g, int visible, uint8_t* keys, uint8_t* values) {
        uint16_t *first = widened_.get(), *second = first + kGroup * half_;
        widen(reinterpret_cast<const int8_t*>(chunk.keys[g]), chunk.key_scales[g], half_, first, key_index);
        widen(reinterpret_cast<const int8_t*>(chunk.values[g]), chunk.value_scales[g], half_, second, value_index);
        lay_out_group<uint16_t, 2>(first, second, visible, keys, values);
    }

    template <class Number, int kPair>
    void lay_out_group(const void* first_half, const void* second_half, int visible, uint8_t* to_keys, uint8_t* to_values) {
        constexpr int block = kGroup * kGroup;
        const auto *first = static_cast<const Number*>(first_half), *second = static_cast<const Number*>(second_half);
        auto *keys = reinterpret_cast<Number*>(to_keys), *values = reinterpret_cast<Number*>(to_values);
        std::memcpy(keys, first, sizeof(Number) * kGroup * half_);
        for (int d = half_; d < shape_.key_dim; d += kGroup) transpose_block<Number, kPair>(second + (d - half_) / kGroup * block, keys + d / kGroup * block);
        const int from_first = std::min(half_, shape_.value_dim);
        for (int d = 0; d < from_first; d += kGroup) {
            Number* panel = values + d / kGroup * block;
            transpose_block<Number, kPair>(first + d / kGroup * block, panel);
            for (int slot = visible; slot < kGroup; slot++)
                for (int i = 0; i < kGroup; i++) panel[value_index(slot, i, kPair)] = 0;
        }
        if (shape_.value_dim > half_) std::memcpy(values + half_ * kGroup, second, sizeof(Number) * kGroup * (shape_.value_dim - half_));
    }

    int half_;
    AttentionShape shape_;
    int format_;
    size_t key_bytes_, value_bytes_;
    Buffer<uint8_t> keys_, values_;
    Buffer<uint16_t> widened_;
};

// A row of one head's product, [head][token], to [token][head * width].
struct PerHead {
    static constexpr bool kPairs = false;
    float* out;
    int num_tokens;
    size_t stride;
    int width;
    template <int NR>
    [[gnu::always_inline]] void operator()(int row, int panel, const F (&x)[NR]) const {
        float* p = out + row % num_tokens * stride + static_cast<size_t>(row / num_tokens) * width + panel * kPanel;
#pragma GCC unroll 8
        for (int j = 0; j < NR; j++) f_store_first(p + j * kPanel, x[j], width - (panel + j) * kPanel);
    }
};

}  // namespace pdmesh
