// Sixteen lanes on ARM64 with NEON and its dot product (FEAT_DotProd): four registers of four, `v[0]` with lanes 0-3. With
// PDMESH_ISA_NEON_BF16 also the products of bf16 pairs and of unsigned with signed bytes (FEAT_BF16, FEAT_I8MM). See simd.h for
// what each function means.
//
// Always inlined: the calling convention passes these structs in memory, which would cost more than the functions themselves.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#define PDMESH_INLINE [[gnu::always_inline]] inline
#if defined(PDMESH_ISA_NEON_BF16)
#define PDMESH_NEON_BF16 1
#else
#define PDMESH_SIGNED_WEIGHTS 1
#endif

namespace pdmesh {

constexpr int kMostRows = 6, kMostPanels = 2;  // of a tile
// A vector is four of the 32 registers; the last four hold what is broadcast. Pairs of nibbles, and of bf16 where the processor
// cannot multiply them, lie apart.
constexpr TileRoom kFloatRoom{1, 7}, kInt8Room{1, 7}, kNibbleRoom{2, 7}, kWordsRoom{1, 7};
#if defined(PDMESH_NEON_BF16)
constexpr TileRoom kBFloat16Room{1, 7};
#else
constexpr TileRoom kBFloat16Room{2, 7};
#endif

struct F {
    float32x4_t v[4];
};
struct I {
    int32x4_t v[4];
};

// `function` of each quarter; the result is F or I.
template <class Result, class Function, class... Lanes>
PDMESH_INLINE Result by_quarters(Function function, const Lanes&... x) {
    return {{function(x.v[0]...), function(x.v[1]...), function(x.v[2]...), function(x.v[3]...)}};
}

PDMESH_INLINE F f_set(float x) {
    const float32x4_t all = vdupq_n_f32(x);
    return {{all, all, all, all}};
}
PDMESH_INLINE F f_zero() { return f_set(0.0f); }
PDMESH_INLINE F f_load(const float* p) { return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}}; }
PDMESH_INLINE void f_store(float* p, F x) {
    vst1q_f32(p, x.v[0]);
    vst1q_f32(p + 4, x.v[1]);
    vst1q_f32(p + 8, x.v[2]);
    vst1q_f32(p + 12, x.v[3]);
}
PDMESH_INLINE F operator+(F a, F b) {
    return by_quarters<F>([](float32x4_t a, float32x4_t b) { return vaddq_f32(a, b); }, a, b);
}
PDMESH_INLINE F operator-(F a, F b) {
    return by_quarters<F>([](float32x4_t a, float32x4_t b) { return vsubq_f32(a, b); }, a, b);
}
PDMESH_INLINE F operator*(F a, F b) {
    return by_quarters<F>([](float32x4_t a, float32x4_t b) { return vmulq_f32(a, b); }, a, b);
}
PDMESH_INLINE F operator/(F a, F b) {
    return by_quarters<F>([](float32x4_t a, float32x4_t b) { return vdivq_f32(a, b); }, a, b);
}
PDMESH_INLINE F f_fma(F a, F b, F c) {
    return by_quarters<F>([](float32x4_t a, float32x4_t b, float32x4_t c) { return vfmaq_f32(c, a, b); }, a, b, c);
}
// A NaN in `a` gives b, as on x86: the instruction for maxima would keep it.
PDMESH_INLINE float32x4_t larger_of(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
PDMESH_INLINE F f_max(F a, F b) {
    return by_quarters<F>([](float32x4_t a, float32x4_t b) { return larger_of(a, b); }, a, b);
}
PDMESH_INLINE F f_min(F a, F b) {
    return by_quarters<F>([](float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }, a, b);
}
PDMESH_INLINE F f_abs(F a) {
    return by_quarters<F>([](float32x4_t x) { return vabsq_f32(x); }, a);
}
PDMESH_INLINE F f_round(F a) {
    return by_quarters<F>([](float32x4_t x) { return vrndnq_f32(x); }, a);
}

// 2^n for integers n of -126 .. 127, put together from the bits of a float.
PDMESH_INLINE float32x4_t power_of_two(int32x4_t n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}
// A float cannot hold 2^-150, so the power comes in two factors. The one that reaches into the denormals is the last:
// x * 2^(n + 126) is exact unless x is so small that the result is 0 anyhow, hence one rounding. Right for n of -252 .. 254.
PDMESH_INLINE F f_scale2(F x, F n) {
    const auto scale = [](float32x4_t x, float32x4_t exponent) {
        const int32x4_t n = vcvtq_s32_f32(exponent);
        const int32x4_t most = vminq_s32(vmaxq_s32(n, vdupq_n_s32(-126)), vdupq_n_s32(127));
        return vmulq_f32(vmulq_f32(x, power_of_two(vsubq_s32(n, most))), power_of_two(most));
    };
    return by_quarters<F>(scale, x, n);
}

// Halves are folded onto each other: lanes 8 apart, then 4, 2, 1.
PDMESH_INLINE float f_sum(F x) {
    const float32x4_t four = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
PDMESH_INLINE float f_hmax(F x) {
    return vmaxnmvq_f32(larger_of(larger_of(x.v[0], x.v[2]), larger_of(x.v[1], x.v[3])));
}

// The lanes below `count` from `x`, the others from `y`.
PDMESH_INLINE F split_at(int count, F x, F y) {
    static constexpr int32_t kFirst[4] = {0, 1, 2, 3};
    const int32x4_t first = vld1q_s32(kFirst), wanted = vdupq_n_s32(count);
    const I lanes = {{first, vaddq_s32(first, vdupq_n_s32(4)), vaddq_s32(first, vdupq_n_s32(8)), vaddq_s32(first, vdupq_n_s32(12))}};
    const auto split = [=](float32x4_t x, float32x4_t y, int32x4_t lane) { return vbslq_f32(vcltq_s32(lane, wanted), x, y); };
    return by_quarters<F>(split, x, y, lanes);
}
PDMESH_INLINE F f_first(F x, int count, float other) { return split_at(count, x, f_set(other)); }
PDMESH_INLINE F f_from_lane(F x, int first, float other) { return split_at(first, f_set(other), x); }
PDMESH_INLINE void f_store_first(float* p, F x, int count) {
    if (count >= 16) return f_store(p, x);
    float lanes[16];
    f_store(lanes, x);
    for (int i = 0; i < count; i++) p[i] = lanes[i];
}
PDMESH_INLINE F f_from(I x) {
    return by_quarters<F>([](int32x4_t x) { return vcvtq_f32_s32(x); }, x);
}
PDMESH_INLINE F f_bits(I x) {
    return by_quarters<F>([](int32x4_t x) { return vreinterpretq_f32_s32(x); }, x);
}

PDMESH_INLINE F f_load_bf16(const uint16_t* p) {
    const uint16x8_t low = vld1q_u16(p), high = vld1q_u16(p + 8);
    const auto wide = [](uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); };
    return {{wide(vget_low_u16(low)), wide(vget_high_u16(low)), wide(vget_low_u16(high)), wide(vget_high_u16(high))}};
}
PDMESH_INLINE F f_load_f16(const uint16_t* p) {
    const uint16x8_t low = vld1q_u16(p), high = vld1q_u16(p + 8);
    const auto wide = [](uint16x4_t x) { return vcvt_f32_f16(vreinterpret_f16_u16(x)); };
    return {{wide(vget_low_u16(low)), wide(vget_high_u16(low)), wide(vget_low_u16(high)), wide(vget_high_u16(high))}};
}

// Round to nearest, ties to even. NaN is not kept: no caller has one that matters.
PDMESH_INLINE uint32x4_t rounded_to_bf16(float32x4_t x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
}
PDMESH_INLINE void f_store_bf16(uint16_t* p, F x) {
    const auto halves = [](float32x4_t low, float32x4_t high) {
        return vuzp2q_u16(vreinterpretq_u16_u32(rounded_to_bf16(low)), vreinterpretq_u16_u32(rounded_to_bf16(high)));
    };
    vst1q_u16(p, halves(x.v[0], x.v[1]));
    vst1q_u16(p + 8, halves(x.v[2], x.v[3]));
}
// Rounded to integers and stored as int16; callers stay within [-32767, 32767].
PDMESH_INLINE void f_store_i16(int16_t* p, F x) {
    const auto words = [](float32x4_t low, float32x4_t high) {
        return vcombine_s16(vmovn_s32(vcvtnq_s32_f32(low)), vmovn_s32(vcvtnq_s32_f32(high)));
    };
    vst1q_s16(p, words(x.v[0], x.v[1]));
    vst1q_s16(p + 8, words(x.v[2], x.v[3]));
}
// Rounded to integers and stored as int8; callers stay within [-127, 127].
PDMESH_INLINE void f_store_i8(int8_t* p, F x) {
    const auto words = [](float32x4_t low, float32x4_t high) {
        return vcombine_s16(vmovn_s32(vcvtnq_s32_f32(low)), vmovn_s32(vcvtnq_s32_f32(high)));
    };
    vst1q_s8(p, vcombine_s8(vmovn_s16(words(x.v[0], x.v[1])), vmovn_s16(words(x.v[2], x.v[3]))));
}

PDMESH_INLINE int8x16_t bytes_of(int32x4_t x) { return vreinterpretq_s8_s32(x); }
PDMESH_INLINE uint8x16_t unsigned_bytes_of(int32x4_t x) { return vreinterpretq_u8_s32(x); }

PDMESH_INLINE I i_zero() {
    const int32x4_t zero = vdupq_n_s32(0);
    return {{zero, zero, zero, zero}};
}
PDMESH_INLINE I i_load(const void* p) {
    const auto* bytes = static_cast<const uint8_t*>(p);
    const auto quarter = [](const uint8_t* from) { return vreinterpretq_s32_u8(vld1q_u8(from)); };
    return {{quarter(bytes), quarter(bytes + 16), quarter(bytes + 32), quarter(bytes + 48)}};
}
PDMESH_INLINE void i_store(void* p, I x) {
    auto* bytes = static_cast<uint8_t*>(p);
    for (int i = 0; i < 4; i++) vst1q_u8(bytes + 16 * i, unsigned_bytes_of(x.v[i]));
}
PDMESH_INLINE I i_broadcast(const void* p) {
    int32_t bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    const int32x4_t all = vdupq_n_s32(bytes);
    return {{all, all, all, all}};
}
PDMESH_INLINE I i_low_nibbles(I x) {
    return by_quarters<I>([](int32x4_t x) { return vreinterpretq_s32_u8(vandq_u8(unsigned_bytes_of(x), vdupq_n_u8(15))); }, x);
}
PDMESH_INLINE I i_high_nibbles(I x) {
    return by_quarters<I>([](int32x4_t x) { return vreinterpretq_s32_u8(vshrq_n_u8(unsigned_bytes_of(x), 4)); }, x);
}
PDMESH_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
PDMESH_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

PDMESH_INLINE uint32_t f_equal_mask(F a, F b) {
    static constexpr uint32_t kBits[4] = {1, 2, 4, 8};
    const uint32x4_t bits = vld1q_u32(kBits);
    const auto mask = [=](float32x4_t a, float32x4_t b) { return vaddvq_u32(vandq_u32(vceqq_f32(a, b), bits)); };
    return mask(a.v[0], b.v[0]) | mask(a.v[1], b.v[1]) << 4 | mask(a.v[2], b.v[2]) << 8 | mask(a.v[3], b.v[3]) << 12;
}
PDMESH_INLINE F f_maxima_of_4(const float* p) {
    const auto maxima = [](const float* p) {  // of 16 numbers, by pairs
        const auto of_pairs = [](float32x4_t a, float32x4_t b) { return vpmaxq_f32(a, b); };
        const float32x4_t low = of_pairs(vabsq_f32(vld1q_f32(p)), vabsq_f32(vld1q_f32(p + 4)));
        return of_pairs(low, of_pairs(vabsq_f32(vld1q_f32(p + 8)), vabsq_f32(vld1q_f32(p + 12))));
    };
    return {{maxima(p), maxima(p + 16), maxima(p + 32), maxima(p + 48)}};
}

PDMESH_INLINE I i_minus_128_times(I x, I sum) {
    return by_quarters<I>([](int32x4_t x, int32x4_t sum) { return vsubq_s32(x, vshlq_n_s32(sum, 7)); }, x, sum);
}

PDMESH_INLINE I dot_s8s8(I acc, I a, I b) {
    const auto dot = [](int32x4_t acc, int32x4_t a, int32x4_t b) { return vdotq_s32(acc, bytes_of(a), bytes_of(b)); };
    return by_quarters<I>(dot, acc, a, b);
}
#if defined(PDMESH_NEON_BF16)
PDMESH_INLINE I dot_u8s8(I acc, I u, I s) {
    const auto dot = [](int32x4_t acc, int32x4_t u, int32x4_t s) { return vusdotq_s32(acc, unsigned_bytes_of(u), bytes_of(s)); };
    return by_quarters<I>(dot, acc, u, s);
}
#else
// u = w + 128 by its highest bit: w is signed.
PDMESH_INLINE I without_128(I u) {
    return by_quarters<I>([](int32x4_t u) { return vreinterpretq_s32_u8(veorq_u8(unsigned_bytes_of(u), vdupq_n_u8(128))); }, u);
}
// The dot product of bytes with one sign only: 128 times the sum of s, which is missing then, is 64 times it twice.
PDMESH_INLINE I dot_u8s8(I acc, I u, I s) {
    const int32x4_t all_64 = vreinterpretq_s32_s8(vdupq_n_s8(64));
    const I factor = {{all_64, all_64, all_64, all_64}};
    return dot_s8s8(dot_s8s8(dot_s8s8(acc, without_128(u), s), factor, s), factor, s);
}
PDMESH_INLINE I i_weights(const void* p) { return without_128(i_load(p)); }
PDMESH_INLINE I dot_weights(I acc, I w, I s) { return dot_s8s8(acc, w, s); }
PDMESH_INLINE I dot_nibbles(I part, I u, I s) { return dot_s8s8(part, u, s); }
#endif

PDMESH_INLINE F even_bf16(I x) {
    return by_quarters<F>([](int32x4_t x) { return vreinterpretq_f32_s32(vshlq_n_s32(x, 16)); }, x);
}
PDMESH_INLINE F odd_bf16(I x) {
    const auto odd = [](int32x4_t x) { return vreinterpretq_f32_s32(vandq_s32(x, vdupq_n_s32(static_cast<int32_t>(0xffff0000)))); };
    return by_quarters<F>(odd, x);
}
PDMESH_INLINE F dot_bf16(F acc, I a, I b) {
#if defined(PDMESH_NEON_BF16)
    const auto dot = [](float32x4_t acc, int32x4_t a, int32x4_t b) {
        return vbfdotq_f32(acc, vreinterpretq_bf16_s32(a), vreinterpretq_bf16_s32(b));
    };
    return by_quarters<F>(dot, acc, a, b);
#else
    return f_fma(odd_bf16(a), odd_bf16(b), f_fma(even_bf16(a), even_bf16(b), acc));
#endif
}

// 32 int8 -> 32 bf16 in the same order. Integers to 127 are exact in bf16, so the upper half of the float is all of it.
PDMESH_INLINE I bf16_from_i8(const int8_t* p) {
    const auto convert = [](int16x8_t words) {
        const float32x4_t low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(words)));
        const float32x4_t high = vcvtq_f32_s32(vmovl_high_s16(words));
        return vreinterpretq_s32_u16(vuzp2q_u16(vreinterpretq_u16_f32(low), vreinterpretq_u16_f32(high)));
    };
    const int8x16_t first = vld1q_s8(p), second = vld1q_s8(p + 16);
    return {{convert(vmovl_s8(vget_low_s8(first))), convert(vmovl_high_s8(first)), convert(vmovl_s8(vget_low_s8(second))),
             convert(vmovl_high_s8(second))}};
}

// The even and the odd ones of 32 int8 as int16.
struct Words {
    int16x8_t even[2], odd[2];
};
PDMESH_INLINE Words words_from_i8(const int8_t* p) {
    const int8x16x2_t bytes = vld2q_s8(p);
    const int8x16_t even = bytes.val[0], odd = bytes.val[1];
    return {{vmovl_s8(vget_low_s8(even)), vmovl_high_s8(even)}, {vmovl_s8(vget_low_s8(odd)), vmovl_high_s8(odd)}};
}
// All lanes of `b` are equal.
PDMESH_INLINE I dot_words(I acc, const Words& a, I b) {
    const int16x8_t pair = vreinterpretq_s16_s32(b.v[0]);
    const auto low = [=](int32x4_t acc, int16x8_t even, int16x8_t odd) {
        return vmlal_laneq_s16(vmlal_laneq_s16(acc, vget_low_s16(even), pair, 0), vget_low_s16(odd), pair, 1);
    };
    const auto high = [=](int32x4_t acc, int16x8_t even, int16x8_t odd) {
        return vmlal_high_laneq_s16(vmlal_high_laneq_s16(acc, even, pair, 0), odd, pair, 1);
    };
    return {{low(acc.v[0], a.even[0], a.odd[0]), high(acc.v[1], a.even[0], a.odd[0]), low(acc.v[2], a.even[1], a.odd[1]),
             high(acc.v[3], a.even[1], a.odd[1])}};
}

}  // namespace pdmesh
