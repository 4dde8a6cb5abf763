// Sixteen lanes on AVX-512 (F, BW, DQ, VL). See simd.h for what each function means.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace pdmesh {

constexpr int kMostRows = 6, kMostPanels = 4;  // of a tile: 24 accumulators of 32 registers
constexpr TileRoom kFloatRoom{1, 31}, kBFloat16Room{1, 31}, kInt8Room{1, 31}, kNibbleRoom{2, 31}, kWordsRoom{1, 31};

struct F {
    __m512 v;
};
struct I {
    __m512i v;
};

inline F f_zero() { return {_mm512_setzero_ps()}; }
inline F f_set(float x) { return {_mm512_set1_ps(x)}; }
inline F f_load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void f_store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
inline void f_store_first(float* p, F x, int count) { _mm512_mask_storeu_ps(p, count >= 16 ? 0xffff : (1u << count) - 1, x.v); }
inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F f_reciprocal(F x) {  // the processor's estimate (14 bits) and one step of Newton: a fifth of a division's time
    const __m512 estimate = _mm512_rcp14_ps(x.v);
    return {_mm512_fmadd_ps(estimate, _mm512_fnmadd_ps(x.v, estimate, _mm512_set1_ps(1.0f)), estimate)};
}
inline F f_fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F f_max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F f_min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F f_abs(F a) { return {_mm512_abs_ps(a.v)}; }
inline F f_round(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F f_scale2(F x, F n) { return {_mm512_scalef_ps(x.v, n.v)}; }
// 2^x for x <= 0 (and somewhat above) by the processor's own parts: x less its floor, 2^(floor of x). 2^f on [0, 1) by a polynomial
// of degree 6, within 2 ulp after all roundings and exact at 0. -inf gives 0.
#define PDMESH_OWN_EXP2 1
inline F f_exp2(F x) {
    const __m512 f = _mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(2.1612912e-4f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.2467845e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6754516e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5485282e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022933e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314706e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return {_mm512_scalef_ps(p, x.v)};
}
inline float f_sum(F x) { return _mm512_reduce_add_ps(x.v); }
inline float f_hmax(F x) { return _mm512_reduce_max_ps(x.v); }
inline F f_first(F x, int count, float other) {
    return {_mm512_mask_blend_ps(count >= 16 ? 0xffff : (1u << count) - 1, _mm512_set1_ps(other), x.v)};
}
inline F f_from_lane(F x, int first, float other) {
    return {_mm512_mask_blend_ps(first >= 16 ? 0 : 0xffffu << first & 0xffff, _mm512_set1_ps(other), x.v)};
}
inline F f_from(I x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline F f_bits(I x) { return {_mm512_castsi512_ps(x.v)}; }

inline F f_load_bf16(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline F f_load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }

// Round to nearest, ties to even. NaN is not kept: no caller has one that matters.
inline __m256i bf16_bits(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
inline void f_store_bf16(uint16_t* p, F x) {
#if defined(__AVX512BF16__)
    const __m256i bits = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v));
#else
    const __m256i bits = bf16_bits(x.v);
#endif
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bits);
}
// Rounded to integers and stored as int16; callers stay within [-32767, 32767].
inline void f_store_i16(int16_t* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x.v)));
}
// Rounded to integers and stored as int8; callers stay within [-127, 127].
inline void f_store_i8(int8_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}

inline I i_zero() { return {_mm512_setzero_si512()}; }
inline I i_load(const void* p) { return {_mm512_loadu_si512(p)}; }
inline void i_store(void* p, I x) { _mm512_storeu_si512(p, x.v); }
inline I i_broadcast(const void* p) { return {_mm512_set1_epi32(*static_cast<const int32_t*>(p))}; }
inline I i_low_nibbles(I x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
inline I i_high_nibbles(I x) { return {_mm512_and_si512(_mm512_srli_epi16(x.v, 4), _mm512_set1_epi8(15))}; }
// Always inline: GCC 12 finds that such a function has no effect, and drops the calls.
[[gnu::always_inline]] inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
[[gnu::always_inline]] inline void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

inline uint32_t f_equal_mask(F a, F b) { return _mm512_cmpeq_ps_mask(a.v, b.v); }
inline F f_maxima_of_4(const float* p) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    const auto pairs = [&](__m512 a, __m512 b) {
        return _mm512_max_ps(_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b));
    };
    const auto magnitudes = [&](int i) { return _mm512_abs_ps(_mm512_loadu_ps(p + 16 * i)); };
    return {pairs(pairs(magnitudes(0), magnitudes(1)), pairs(magnitudes(2), magnitudes(3)))};
}

inline I i_minus_128_times(I x, I sum) { return {_mm512_sub_epi32(x.v, _mm512_slli_epi32(sum.v, 7))}; }

// In assembly: GCC 12 copies and spills the accumulators around the intrinsic (it changes its vector type), which halves the
// speed of a product.
inline I dot_u8s8(I acc, I u, I s) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(u.v), "v"(s.v));
    return acc;
}

// 32 int8 as 32 int16 in the same order.
inline I words_from_i8(const int8_t* p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline I dot_words(I acc, I a, I b) {
    asm("vpdpwssd %2, %1, %0" : "+v"(acc.v) : "v"(a.v), "v"(b.v));
    return acc;
}

inline F dot_bf16(F acc, I a, I b) {
#if defined(__AVX512BF16__)
    asm("vdpbf16ps %2, %1, %0" : "+v"(acc.v) : "v"(a.v), "v"(b.v));
    return acc;
#else
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    const auto even = [](__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); };
    const auto odd = [&](__m512i x) { return _mm512_castsi512_ps(_mm512_and_si512(x, high)); };
    return {_mm512_fmadd_ps(odd(a.v), odd(b.v), _mm512_fmadd_ps(even(a.v), even(b.v), acc.v))};
#endif
}

// 32 int8 -> 32 bf16 in the same order (integers to 127 are exact in bf16).
inline I bf16_from_i8(const int8_t* p) {
    const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const __m512 even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 16), 16));
    const __m512 odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(words, 16));
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
    return {_mm512_or_si512(low, _mm512_and_si512(_mm512_castps_si512(odd), _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
}

}  // namespace pdmesh
