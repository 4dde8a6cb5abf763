// Counter-based Gumbel noise: a token's noise is a function of (seed, choice, index, token id). The bits are those of
// pdmesh/engine/sampling/counter_rng.py, where the sources are named.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace pdmesh::sampling {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
constexpr float kMostNoise = 22.9f;  // 32 bits: -log(2^-33) = 22.87

struct NoiseKeys {
    uint64_t first, second;
};

inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

inline NoiseKeys noise_keys(uint64_t seed, int64_t choice, int64_t index) {
    uint64_t key = mix(seed);
    key = mix(key + kGolden * (static_cast<uint64_t>(choice) + 1));
    key = mix(key + kGolden * (static_cast<uint64_t>(index) + 1));
    return {key, mix(key ^ 0xD1B54A32D192ED03)};
}

inline uint32_t noise_bits(const NoiseKeys& keys, uint64_t token) {
    return static_cast<uint32_t>(mix(mix((token + 1) * kGolden + keys.first) ^ keys.second) >> 32);
}

// In (0, 1]: the few bits that round to 1 get noise -inf.
inline float uniform(uint32_t bits) { return (static_cast<float>(bits) + 0.5f) * 0x1p-32f; }

// -log(-log1p(-v)), each logarithm rounded to float32 once. In double, so that the bits do not depend on whose float functions
// these are; the few tokens that can win are all that need it.
inline float gumbel(float v) {
    const float exponential = static_cast<float>(-std::log1p(-static_cast<double>(v)));
    return static_cast<float>(-std::log(static_cast<double>(exponential)));
}

// No less than gumbel(v), but for roundings of 1e-5: -log(-log1p(-v)) <= -log(v), and the bits of a float, read as an integer,
// are 2^23 (127 + log2) or somewhat less.
inline float gumbel_bound(float v) {
    int32_t bits;
    std::memcpy(&bits, &v, sizeof bits);
    return static_cast<float>((127 << 23) - bits) * (0.69314718f * 0x1p-23f);
}

}  // namespace pdmesh::sampling
