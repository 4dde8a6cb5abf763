// Where keys and values lie in the KV pool, and how a token's are written.
//
// A block of the pool holds, for each key/value head, groups of 16 tokens that are panels of a product (gemm.h):
//
//     keys    [num_kv_heads][block_size / 16][ head_dim as units ][16 tokens]      scores = queries x keys:    lanes are tokens
//     values  [num_kv_heads][block_size / 16][head_dim / 16][16 tokens as units][16 dimensions]   output = p x values: lanes are dims
//     int8:   after either, float32 scales [num_kv_heads][block_size]
//
// (a unit is 4 bytes: 2 bf16 or 1 float32; int8 lies as bf16 does, a byte for each number.)
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "abi.h"
#include "simd.h"

namespace pdmesh {

constexpr int kGroup = 16;        // tokens of a group

// Where things lie in the pool of one model.
struct KVGeometry {
    int num_kv_heads, head_dim, block_size, format;
    int64_t num_blocks;
    uint8_t* base;

    int element() const { return format == kFloat32 ? 4 : format == kBFloat16 ? 2 : 1; }
    int group_bytes() const { return kGroup * head_dim * element(); }
    int64_t numbers_bytes() const { return static_cast<int64_t>(num_kv_heads) * block_size * head_dim * element(); }
    int64_t block_bytes() const { return numbers_bytes() + (format == kInt8 ? num_kv_heads * block_size * 4 : 0); }
    uint8_t* block(int layer, int is_value, int64_t id) const {
        return base + ((static_cast<int64_t>(layer) * 2 + is_value) * num_blocks + id) * block_bytes();
    }
    // `slot` counts from the start of the block; its group's numbers.
    uint8_t* group(uint8_t* block, int head, int slot) const {
        return block + (static_cast<int64_t>(head) * (block_size / kGroup) + slot / kGroup) * group_bytes();
    }
    float* scales(uint8_t* block, int head) const {
        return reinterpret_cast<float*>(block + numbers_bytes()) + head * block_size;
    }
    // Of a LooseGroup: keys, values, and the scales of either (int8 only).
    int loose_group_bytes() const { return 2 * group_bytes() + 2 * kGroup * static_cast<int>(sizeof(float)); }
};

// A group that lies for itself, outside the pool: the one with this number of those at `base`.
struct LooseGroup {
    uint8_t *keys, *values;
    float *key_scales, *value_scales;
    LooseGroup(const KVGeometry& kv, uint8_t* base, int number)
        : keys(base + static_cast<int64_t>(number) * kv.loose_group_bytes()), values(keys + kv.group_bytes()),
          key_scales(reinterpret_cast<float*>(values + kv.group_bytes())), value_scales(key_scales + kGroup) {}
};

// One number of a group: token `slot` (0 to 15), dimension d. `pair` is 2 where a unit holds two numbers.
inline int key_index(int slot, int d, int pair) { return d / pair * kGroup * pair + slot * pair + d % pair; }
inline int value_index(int slot, int d, int pair) {
    return (d / kGroup * (kGroup / pair) + slot / pair) * kGroup * pair + d % kGroup * pair + slot % pair;
}

inline uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

constexpr int kMostHeadDim = 512;

// Rounded to the pool's type, in order; int8 has a scale.
inline void round_numbers(const KVGeometry& kv, const float* x, uint8_t* out, float* scale) {
    const int dim = kv.head_dim;
    if (kv.format == kFloat32) {
        std::memcpy(out, x, sizeof(float) * dim);
    } else if (kv.format == kBFloat16) {
        for (int d = 0; d < dim; d += 16) f_store_bf16(reinterpret_cast<uint16_t*>(out) + d, f_load(x + d));
    } else {
        F most = f_zero(), finite = f_zero();  // the latter is NaN where a number is NaN or infinite: integers would hide it
        for (int d = 0; d < dim; d += 16) {
            most = f_max(most, f_abs(f_load(x + d)));
            finite = f_fma(f_load(x + d), f_zero(), finite);
        }
        const float peak = f_hmax(most);
        const F factor = f_set(peak > 0 ? 127.0f / peak : 0.0f);
        for (int d = 0; d < dim; d += 16) f_store_i8(reinterpret_cast<int8_t*>(out) + d, f_load(x + d) * factor);
        *scale = peak / 127.0f + f_sum(finite);
    }
}

// A token's key: the numbers of a unit lie together.
template <class Unit>
inline void spread_key(const uint8_t* from, int num_units, int slot, uint8_t* group) {
    auto* to = reinterpret_cast<Unit*>(group) + slot;
    for (int u = 0; u < num_units; u++) std::memcpy(to + u * kGroup, from + u * sizeof(Unit), sizeof(Unit));
}

// A token's value: `kPair` tokens share a unit.
template <class Number, int kPair>
inline void spread_value(const uint8_t* from, int dim, int slot, uint8_t* group) {
    const auto* numbers = reinterpret_cast<const Number*>(from);
    for (int d = 0; d < dim; d += kGroup) {
        auto* to = reinterpret_cast<Number*>(group) + value_index(slot, d, kPair);
        for (int i = 0; i < kGroup; i++) to[i * kPair] = numbers[d + i];
    }
}

inline void write_key(const KVGeometry& kv, uint8_t* group, float* scale, int slot, const float* x) {
    alignas(64) uint8_t rounded[kMostHeadDim * 4];
    round_numbers(kv, x, rounded, scale);
    if (kv.format == kInt8) spread_key<uint16_t>(rounded, kv.head_dim / 2, slot, group);
    else spread_key<uint32_t>(rounded, kv.head_dim * kv.element() / 4, slot, group);
}

inline void write_value(const KVGeometry& kv, uint8_t* group, float* scale, int slot, const float* x) {
    alignas(64) uint8_t rounded[kMostHeadDim * 4];
    round_numbers(kv, x, rounded, scale);
    if (kv.format == kFloat32) spread_value<float, 1>(rounded, kv.head_dim, slot, group);
    else if (kv.format == kBFloat16) spread_value<uint16_t, 2>(rounded, kv.head_dim, slot, group);
    else spread_value<int8_t, 2>(rounded, kv.head_dim, slot, group);
}

// The values of a group's tokens [first, end) become zero.
inline void clear_values(const KVGeometry& kv, uint8_t* group, int first, int end) {
    const int pair = kv.format == kFloat32 ? 1 : 2, unit = kGroup * pair * kv.element();  // of `pair` tokens and 16 dimensions
    for (int panel = 0; panel < kv.head_dim; panel += kGroup, group += kGroup * kGroup * kv.element()) {
        const auto clear_one = [&](int slot) {
            for (int d = 0; d < kGroup; d++) std::memset(group + value_index(slot, d, pair) * kv.element(), 0, kv.element());
        };
        int slot = first;
        for (; slot < end && slot % pair; slot++) clear_one(slot);
        const int whole = (end - slot) / pair;
        if (whole > 0) {
            std::memset(group + slot / pair * unit, 0, static_cast<size_t>(whole) * unit);
            slot += whole * pair;
        }
        for (; slot < end; slot++) clear_one(slot);
    }
}

// One token's key and value of one head. The slots after this one in its group, up to `open_end`, are not written yet;
// they become zero, because their probability 0 times what lies there must be 0.
inline void write_token(const KVGeometry& kv, int layer, int head, int64_t slot, int open_end, const float* key, const float* value) {
    const int in_block = static_cast<int>(slot % kv.block_size), in_group = in_block % kGroup;
    uint8_t* keys = kv.block(layer, 0, slot / kv.block_size);
    uint8_t* values = kv.block(layer, 1, slot / kv.block_size);
    const bool has_scales = kv.format == kInt8;
    write_key(kv, kv.group(keys, head, in_block), has_scales ? kv.scales(keys, head) + in_block : nullptr, in_group, key);
    uint8_t* group = kv.group(values, head, in_block);
    float* scales = has_scales ? kv.scales(values, head) + in_block : nullptr;
    write_value(kv, group, scales, in_group, value);
    if (in_group + 1 >= open_end) return;
    clear_values(kv, group, in_group + 1, open_end);
    if (has_scales) std::fill(scales + 1, scales + open_end - in_group, 0.0f);
}

}  // namespace pdmesh
