// Sixteen lanes on AVX2, FMA and F16C: two registers of eight, `lo` with lanes 0-7. With PDMESH_ISA_AVX_VNNI also the dot product
// of bytes (AVX-VNNI). See simd.h for what each function means.
//
// Always inlined: the calling convention passes these structs in memory, which would cost more than the functions themselves.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define PDMESH_INLINE [[gnu::always_inline]] inline
#if !defined(PDMESH_ISA_AVX_VNNI)
#define PDMESH_SIGNED_WEIGHTS 1
#define PDMESH_NARROW_NIBBLES 1
#endif

namespace pdmesh {

constexpr int kMostRows = 6, kMostPanels = 2;  // of a tile
// A vector is two of the 16 registers; what is broadcast takes one or two more. Pairs of nibbles and of bf16 lie apart.
constexpr TileRoom kFloatRoom{1, 7}, kBFloat16Room{2, 7, true}, kWordsRoom{1, 7};
#if defined(PDMESH_ISA_AVX_VNNI)
constexpr TileRoom kInt8Room{1, 7}, kNibbleRoom{2, 7};
#else
constexpr TileRoom kInt8Room{2, 6}, kNibbleRoom{2, 6};
#endif

struct F {
    __m256 lo, hi;
};
struct I {
    __m256i lo, hi;
};
PDMESH_INLINE F f_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
PDMESH_INLINE F f_set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
PDMESH_INLINE F f_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PDMESH_INLINE void f_store(float* p, F x) {
    _mm256_storeu_ps(p, x.lo);
    _mm256_storeu_ps(p + 8, x.hi);
}
PDMESH_INLINE F operator+(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
PDMESH_INLINE F operator-(F a, F b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
PDMESH_INLINE F operator*(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
PDMESH_INLINE F operator/(F a, F b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
PDMESH_INLINE F f_fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
PDMESH_INLINE F f_max(F a, F b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
PDMESH_INLINE F f_min(F a, F b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
PDMESH_INLINE F f_abs(F a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
PDMESH_INLINE F f_round(F a) {
    constexpr int kNearestEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, kNearestEven), _mm256_round_ps(a.hi, kNearestEven)};
}

// 2^n for integers n of -126 .. 127, put together from the bits of a float.
PDMESH_INLINE __m256 power_of_two(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

// A float cannot hold 2^-150, so the power comes in two factors. The one that reaches into the denormals is the last:
// x * 2^(n + 126) is exact unless x is so small that the result is 0 anyhow, hence one rounding. Right for n of -252 .. 254.
PDMESH_INLINE __m256 scale2_half(__m256 x, __m256 exponent) {
    const __m256i n = _mm256_cvtps_epi32(exponent);
    const __m256i most = _mm256_min_epi32(_mm256_max_epi32(n, _mm256_set1_epi32(-126)), _mm256_set1_epi32(127));
    return _mm256_mul_ps(_mm256_mul_ps(x, power_of_two(_mm256_sub_epi32(n, most))), power_of_two(most));
}
PDMESH_INLINE F f_scale2(F x, F n) { return {scale2_half(x.lo, n.lo), scale2_half(x.hi, n.hi)}; }

// Halves are folded onto each other: lanes 8 apart, then 4, 2, 1.
PDMESH_INLINE float f_sum(F x) {
    const __m256 eight = _mm256_add_ps(x.lo, x.hi);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
PDMESH_INLINE float f_hmax(F x) {
    const __m256 eight = _mm256_max_ps(x.lo, x.hi);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// The lanes below `count` from `x`, the others from `y`.
PDMESH_INLINE F split_at(int count, F x, F y) {
    const __m256i wanted = _mm256_set1_epi32(count);
    const __m256i low = _mm256_cmpgt_epi32(wanted, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    const __m256i high = _mm256_cmpgt_epi32(wanted, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15));
    return {_mm256_blendv_ps(y.lo, x.lo, _mm256_castsi256_ps(low)), _mm256_blendv_ps(y.hi, x.hi, _mm256_castsi256_ps(high))};
}
PDMESH_INLINE F f_first(F x, int count, float other) { return split_at(count, x, f_set(other)); }
PDMESH_INLINE F f_from_lane(F x, int first, float other) { return split_at(first, f_set(other), x); }
PDMESH_INLINE F f_from(I x) { return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }
PDMESH_INLINE F f_bits(I x) { return {_mm256_castsi256_ps(x.lo), _mm256_castsi256_ps(x.hi)}; }

PDMESH_INLINE __m128i load_half(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

PDMESH_INLINE F f_load_bf16(const uint16_t* p) {
    const __m256i low = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(p)), 16);
    const __m256i high = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(p + 8)), 16);
    return {_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)};
}
PDMESH_INLINE F f_load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(load_half(p)), _mm256_cvtph_ps(load_half(p + 8))}; }

// Round to nearest, ties to even; the result is in the low 16 bits of each lane. NaN is not kept: no caller has one that matters.
PDMESH_INLINE __m256i bf16_bits(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    return _mm256_srli_epi32(rounded, 16);
}
// AVX2 packs within 128-bit halves: quarters come out as 0 2 1 3.
PDMESH_INLINE __m256i in_order(__m256i packed) { return _mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0)); }

PDMESH_INLINE void f_store_bf16(uint16_t* p, F x) {
    const __m256i packed = _mm256_packus_epi32(bf16_bits(x.lo), bf16_bits(x.hi));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), in_order(packed));
}
// Rounded to integers and stored as int16; callers stay within [-32767, 32767].
PDMESH_INLINE void f_store_i16(int16_t* p, F x) {
    const __m256i words = in_order(_mm256_packs_epi32(_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
}
// Rounded to integers and stored as int8; callers stay within [-127, 127].
PDMESH_INLINE void f_store_i8(int8_t* p, F x) {
    const __m256i words = in_order(_mm256_packs_epi32(_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi)));
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

PDMESH_INLINE I i_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
PDMESH_INLINE I i_load(const void* p) {
    const auto* halves = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
PDMESH_INLINE void i_store(void* p, I x) {
    auto* halves = static_cast<__m256i*>(p);
    _mm256_storeu_si256(halves, x.lo);
    _mm256_storeu_si256(halves + 1, x.hi);
}
PDMESH_INLINE I i_broadcast(const void* p) {
    int32_t bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return {_mm256_set1_epi32(bytes), _mm256_set1_epi32(bytes)};
}
PDMESH_INLINE I i_low_nibbles(I x) {
    const __m256i low = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.lo, low), _mm256_and_si256(x.hi, low)};
}
PDMESH_INLINE I i_high_nibbles(I x) { return i_low_nibbles({_mm256_srli_epi16(x.lo, 4), _mm256_srli_epi16(x.hi, 4)}); }
PDMESH_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

PDMESH_INLINE I i_minus_128_times(I x, I sum) {
    return {_mm256_sub_epi32(x.lo, _mm256_slli_epi32(sum.lo, 7)), _mm256_sub_epi32(x.hi, _mm256_slli_epi32(sum.hi, 7))};
}

#if defined(PDMESH_ISA_AVX_VNNI)
// In assembly for the reason that simd_avx512.h names; the encoding is said because AVX-512 has another of the same name.
PDMESH_INLINE I dot_u8s8(I acc, I u, I s) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc.lo) : "x"(u.lo), "x"(s.lo));
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc.hi) : "x"(u.hi), "x"(s.hi));
    return acc;
}
#else
// Even and odd bytes are widened to 16 bits and multiplied apart: `maddubs` on the bytes would saturate (2 * 255 * 127 > 32767).
// Widened before the products, not after, because the widening of a shared `u` or `s` then leaves the inner loop.
PDMESH_INLINE __m256i dot_u8s8_half(__m256i acc, __m256i u, __m256i s) {
    const __m256i even_u = _mm256_and_si256(u, _mm256_set1_epi16(255));
    const __m256i even_s = _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8);
    const __m256i even = _mm256_madd_epi16(even_u, even_s);
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
    return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
PDMESH_INLINE I dot_u8s8(I acc, I u, I s) { return {dot_u8s8_half(acc.lo, u.lo, s.lo), dot_u8s8_half(acc.hi, u.hi, s.hi)}; }

// Signed weights and their magnitudes.
struct SignedWeights {
    I w, size;
};
PDMESH_INLINE SignedWeights i_weights(const void* p) {
    const I u = i_load(p);
    const __m256i half = _mm256_set1_epi8(-128);
    const I w = {_mm256_xor_si256(u.lo, half), _mm256_xor_si256(u.hi, half)};
    return {w, {_mm256_abs_epi8(w.lo), _mm256_abs_epi8(w.hi)}};
}
PDMESH_INLINE __m256i sums_of_pairs(__m256i words) { return _mm256_madd_epi16(words, _mm256_set1_epi16(1)); }
// |w| times s with the sign of w does not saturate: 2 * 128 * 127 < 32768.
PDMESH_INLINE __m256i dot_weights_half(__m256i acc, __m256i w, __m256i size, __m256i s) {
    return _mm256_add_epi32(acc, sums_of_pairs(_mm256_maddubs_epi16(size, _mm256_sign_epi8(s, w))));
}
PDMESH_INLINE I dot_weights(I acc, const SignedWeights& w, I s) {
    return {dot_weights_half(acc.lo, w.w.lo, w.size.lo, s.lo), dot_weights_half(acc.hi, w.w.hi, w.size.hi, s.hi)};
}

// Sums of nibbles' products have room in 16 bits: 2 * 4 * 2 * 15 * 127 < 32768.
constexpr int kNibbleSteps = 4;
PDMESH_INLINE I dot_nibbles(I part, I u, I s) {
    return {_mm256_add_epi16(part.lo, _mm256_maddubs_epi16(u.lo, s.lo)), _mm256_add_epi16(part.hi, _mm256_maddubs_epi16(u.hi, s.hi))};
}
PDMESH_INLINE I i_add_nibbles(I acc, I part) {
    return {_mm256_add_epi32(acc.lo, sums_of_pairs(part.lo)), _mm256_add_epi32(acc.hi, sums_of_pairs(part.hi))};
}
#endif

PDMESH_INLINE __m256 even_bf16(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
PDMESH_INLINE __m256 odd_bf16(__m256i x) {
    return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
PDMESH_INLINE __m256 dot_bf16_half(__m256 acc, __m256i a, __m256i b) {
    return _mm256_fmadd_ps(odd_bf16(a), odd_bf16(b), _mm256_fmadd_ps(even_bf16(a), even_bf16(b), acc));
}
PDMESH_INLINE F dot_bf16(F acc, I a, I b) { return {dot_bf16_half(acc.lo, a.lo, b.lo), dot_bf16_half(acc.hi, a.hi, b.hi)}; }

// Integers to 127 are exact in bf16, so the upper half of the float is all of it.
PDMESH_INLINE __m256i bf16_from_words(__m256i words) {
    const __m256 even = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 16), 16));
    const __m256 odd = _mm256_cvtepi32_ps(_mm256_srai_epi32(words, 16));
    return _mm256_blend_epi16(_mm256_srli_epi32(_mm256_castps_si256(even), 16), _mm256_castps_si256(odd), 0xaa);
}
// 32 int8 -> 32 bf16 in the same order.
PDMESH_INLINE I bf16_from_i8(const int8_t* p) {
    const __m256i low = _mm256_cvtepi8_epi16(load_half(p));
    const __m256i high = _mm256_cvtepi8_epi16(load_half(p + 16));
    return {bf16_from_words(low), bf16_from_words(high)};
}

// 32 int8 as 32 int16 in the same order.
PDMESH_INLINE I words_from_i8(const int8_t* p) { return {_mm256_cvtepi8_epi16(load_half(p)), _mm256_cvtepi8_epi16(load_half(p + 16))}; }
#if defined(PDMESH_ISA_AVX_VNNI)
PDMESH_INLINE I dot_words(I acc, I a, I b) {
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(acc.lo) : "x"(a.lo), "x"(b.lo));
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(acc.hi) : "x"(a.hi), "x"(b.hi));
    return acc;
}
#else
// In assembly: GCC 12 keeps all of a tile's products until it adds them, and spills the sums, which halves the speed.
PDMESH_INLINE I dot_words(I acc, I a, I b) {
    __m256i product;
    asm("vpmaddwd %3, %2, %0\n\tvpaddd %0, %1, %1" : "=&x"(product), "+x"(acc.lo) : "x"(a.lo), "x"(b.lo));
    asm("vpmaddwd %3, %2, %0\n\tvpaddd %0, %1, %1" : "=&x"(product), "+x"(acc.hi) : "x"(a.hi), "x"(b.hi));
    return acc;
}
#endif

#if !defined(PDMESH_ISA_AVX_VNNI)
#define PDMESH_WIDENED_INT8 1
// 64 bytes w + 128, 4 of each of 16 lanes, to two units of 64 bytes: the first and the last two of each lane as int16.
PDMESH_INLINE void widen_unit(const uint8_t* unit, uint8_t* out) {
    const __m256i first = _mm256_broadcastsi128_si256(_mm_setr_epi8(-1, 0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13));
    const __m256i last = _mm256_broadcastsi128_si256(_mm_setr_epi8(-1, 2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15));
    const auto words = [](__m256i bytes, __m256i order) { return _mm256_srai_epi16(_mm256_shuffle_epi8(bytes, order), 8); };
    const I u = i_load(unit);
    const __m256i half = _mm256_set1_epi8(-128), low = _mm256_xor_si256(u.lo, half), high = _mm256_xor_si256(u.hi, half);
    i_store(out, {words(low, first), words(high, first)});
    i_store(out + 64, {words(low, last), words(high, last)});
}
#endif

PDMESH_INLINE void f_store_first(float* p, F x, int count) {
    const __m256i wanted = _mm256_set1_epi32(count);
    _mm256_maskstore_ps(p, _mm256_cmpgt_epi32(wanted, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)), x.lo);
    _mm256_maskstore_ps(p + 8, _mm256_cmpgt_epi32(wanted, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)), x.hi);
}
PDMESH_INLINE uint32_t f_equal_mask(F a, F b) {
    const auto mask = [](__m256 a, __m256 b) { return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ))); };
    return mask(a.lo, b.lo) | mask(a.hi, b.hi) << 8;
}
// Pairs of neighbours, twice; AVX2 shuffles within 128-bit halves, so that even groups come out before odd ones.
PDMESH_INLINE __m256 maxima_of_4_half(const float* p) {
    const auto of_pairs = [](__m256 a, __m256 b) { return _mm256_max_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd)); };
    const F low = f_abs(f_load(p)), high = f_abs(f_load(p + 16));
    const __m256 maxima = of_pairs(of_pairs(low.lo, low.hi), of_pairs(high.lo, high.hi));
    return _mm256_permutevar8x32_ps(maxima, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
PDMESH_INLINE F f_maxima_of_4(const float* p) { return {maxima_of_4_half(p), maxima_of_4_half(p + 32)}; }
PDMESH_INLINE void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace pdmesh
