// Copies of single tokens' keys and values, from group to group: pure copies, so that no bit of a number changes.
#pragma once

#include "attention.h"

namespace pdmesh {

// Where one token's key and value of one head lie: its groups, its number in them, and its scales (int8 only, else null).
struct TokenPlace {
    uint8_t *keys, *values;
    int in_group;
    float *key_scale, *value_scale;

    static TokenPlace in_pool(const KVGeometry& kv, int layer, int head, int64_t slot) {
        const int in_block = static_cast<int>(slot % kv.block_size);
        uint8_t *keys = kv.block(layer, 0, slot / kv.block_size), *values = kv.block(layer, 1, slot / kv.block_size);
        TokenPlace place{kv.group(keys, head, in_block), kv.group(values, head, in_block), in_block % kGroup, nullptr, nullptr};
        if (kv.format == kInt8) {
            place.key_scale = kv.scales(keys, head) + in_block;
            place.value_scale = kv.scales(values, head) + in_block;
        }
        return place;
    }
    static TokenPlace in_group_of(const KVGeometry& kv, const LooseGroup& group, int in_group) {
        if (kv.format != kInt8) return {group.keys, group.values, in_group, nullptr, nullptr};
        return {group.keys, group.values, in_group, group.key_scales + in_group, group.value_scales + in_group};
    }
};

// A unit of a key holds `kPair` numbers of one token, one of a value that many tokens: see key_index and value_index.
template <class Number, int kPair>
void copy_numbers(const TokenPlace& from, const TokenPlace& to, int dim) {
    constexpr int unit = sizeof(Number) * kPair;
    const uint8_t* key = from.keys + from.in_group * unit;
    uint8_t* new_key = to.keys + to.in_group * unit;
    for (int u = 0; u < dim / kPair; u++) std::memcpy(new_key + u * kGroup * unit, key + u * kGroup * unit, unit);
    const auto* value = reinterpret_cast<const Number*>(from.values) + value_index(from.in_group, 0, kPair);
    auto* new_value = reinterpret_cast<Number*>(to.values) + value_index(to.in_group, 0, kPair);
    for (int panel = 0; panel < dim; panel += kGroup, value += kGroup * kGroup, new_value += kGroup * kGroup)
        for (int d = 0; d < kGroup; d++) new_value[d * kPair] = value[d * kPair];
}

inline void copy_token(const KVGeometry& kv, const TokenPlace& from, const TokenPlace& to) {
    switch (kv.format) {
        case kFloat32: return copy_numbers<uint32_t, 1>(from, to, kv.head_dim);
        case kBFloat16: return copy_numbers<uint16_t, 2>(from, to, kv.head_dim);
        default: break;
    }
    copy_numbers<uint8_t, 2>(from, to, kv.head_dim);
    *to.key_scale = *from.key_scale;
    *to.value_scale = *from.value_scale;
}

// A whole group; `first` is its first token.
inline void copy_group(const KVGeometry& kv, const TokenPlace& first, const LooseGroup& to) {
    std::memcpy(to.keys, first.keys, kv.group_bytes());
    std::memcpy(to.values, first.values, kv.group_bytes());
    if (kv.format != kInt8) return;
    std::memcpy(to.key_scales, first.key_scale, sizeof(float) * kGroup);
    std::memcpy(to.value_scales, first.value_scale, sizeof(float) * kGroup);
}

// The end of a sequence whose keys and values lie elsewhere from position `first` on, in `groups` groups from position `start`.
struct Tail {
    const int32_t* blocks;
    const int64_t* slots;  // of the positions from `first` to the end of the context
    int start, first, context_len, groups, num_before;  // num_before: loose groups of other tails before this one's
};

// One group of a tail, put together from where its tokens lie. Values behind the context become zero, as in write_token.
inline void gather_group(const KVGeometry& kv, int layer, int head, const Tail& tail, int number, const LooseGroup& to) {
    const int start = tail.start + number * kGroup;
    if (start < tail.first) {
        const int64_t block = tail.blocks[start / kv.block_size];
        copy_group(kv, TokenPlace::in_pool(kv, layer, head, block * kv.block_size + start % kv.block_size), to);
    }
    const int end = std::min(start + kGroup, tail.context_len);
    for (int position = std::max(start, tail.first); position < end; position++) {
        const TokenPlace target = TokenPlace::in_group_of(kv, to, position - start);
        copy_token(kv, TokenPlace::in_pool(kv, layer, head, tail.slots[position - tail.first]), target);
    }
    clear_values(kv, to.values, end - start, kGroup);
    if (kv.format == kInt8) std::fill(to.value_scales + (end - start), to.value_scales + kGroup, 0.0f);
}

}  // namespace pdmesh
