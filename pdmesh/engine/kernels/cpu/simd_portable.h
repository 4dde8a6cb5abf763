// Sixteen lanes on any processor: four vectors of 16 bytes in the vector types of GCC and Clang, which become NEON, SSE2, VSX or
// plain scalars. No intrinsics; little-endian. See simd.h for what each function means.
//
// Four small vectors and not one of 64 bytes: compilers keep the former in registers and spill the latter. Multiply-adds are not
// fused here (the build says -ffp-contract=off), since not all of these processors can.
#pragma once

#include <cstdint>
#include <cstring>

#define PDMESH_INLINE [[gnu::always_inline]] inline

namespace pdmesh {

constexpr int kMostRows = 4, kMostPanels = 2;  // of a tile
constexpr TileRoom kFloatRoom{1, 7}, kBFloat16Room{2, 7}, kInt8Room{2, 7}, kNibbleRoom{2, 7}, kWordsRoom{1, 7};  // see simd_neon.h

typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef uint32_t Uint4 __attribute__((vector_size(16)));
typedef int16_t Short8 __attribute__((vector_size(16)));
typedef uint16_t Ushort8 __attribute__((vector_size(16)));
typedef uint8_t Byte16 __attribute__((vector_size(16)));

struct F {
    Float4 v[4];
};
struct I {
    Int4 v[4];
};

// The same 16 bytes as another vector type.
template <class To, class From>
PDMESH_INLINE To bits_as(From x) {
    return reinterpret_cast<To>(x);
}
template <class Vector>
PDMESH_INLINE Vector load_vector(const void* p) {
    Vector x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
template <class Vector>
PDMESH_INLINE void store_vector(void* p, Vector x) {
    std::memcpy(p, &x, sizeof x);
}
// `function` of each quarter; the result is F or I.
template <class Result, class Function, class... Lanes>
PDMESH_INLINE Result by_quarters(Function function, const Lanes&... x) {
    return {{function(x.v[0]...), function(x.v[1]...), function(x.v[2]...), function(x.v[3]...)}};
}

PDMESH_INLINE Float4 all_four(float x) { return Float4{x, x, x, x}; }
PDMESH_INLINE Int4 all_four(int32_t x) { return Int4{x, x, x, x}; }
PDMESH_INLINE Float4 larger_of(Float4 a, Float4 b) { return a > b ? a : b; }

PDMESH_INLINE F f_set(float x) { return {{all_four(x), all_four(x), all_four(x), all_four(x)}}; }
PDMESH_INLINE F f_zero() { return f_set(0.0f); }
PDMESH_INLINE F f_load(const float* p) {
    return {{load_vector<Float4>(p), load_vector<Float4>(p + 4), load_vector<Float4>(p + 8), load_vector<Float4>(p + 12)}};
}
PDMESH_INLINE void f_store(float* p, F x) {
    store_vector(p, x.v[0]);
    store_vector(p + 4, x.v[1]);
    store_vector(p + 8, x.v[2]);
    store_vector(p + 12, x.v[3]);
}
PDMESH_INLINE F operator+(F a, F b) {
    return by_quarters<F>([](Float4 a, Float4 b) { return a + b; }, a, b);
}
PDMESH_INLINE F operator-(F a, F b) {
    return by_quarters<F>([](Float4 a, Float4 b) { return a - b; }, a, b);
}
PDMESH_INLINE F operator*(F a, F b) {
    return by_quarters<F>([](Float4 a, Float4 b) { return a * b; }, a, b);
}
PDMESH_INLINE F operator/(F a, F b) {
    return by_quarters<F>([](Float4 a, Float4 b) { return a / b; }, a, b);
}
PDMESH_INLINE F f_fma(F a, F b, F c) { return a * b + c; }
// A NaN in `a` gives b, as on x86.
PDMESH_INLINE F f_max(F a, F b) {
    return by_quarters<F>([](Float4 a, Float4 b) { return larger_of(a, b); }, a, b);
}
PDMESH_INLINE F f_min(F a, F b) {
    return by_quarters<F>([](Float4 a, Float4 b) { return a < b ? a : b; }, a, b);
}

constexpr int32_t kSign = INT32_MIN;
constexpr int32_t kUpperHalf = static_cast<int32_t>(0xffff0000);

PDMESH_INLINE Float4 magnitude(Float4 x) { return bits_as<Float4>(bits_as<Int4>(x) & ~kSign); }
PDMESH_INLINE F f_abs(F a) {
    return by_quarters<F>([](Float4 x) { return magnitude(x); }, a);
}

// From 2^23 on all floats are integers: adding it rounds to nearest even, as the processor does.
PDMESH_INLINE Float4 round_quarter(Float4 x) {
    const Float4 limit = all_four(8388608.0f);
    const Float4 size = magnitude(x);
    const Float4 whole = size < limit ? (size + limit) - limit : size;
    return bits_as<Float4>(bits_as<Int4>(whole) | (bits_as<Int4>(x) & kSign));
}
PDMESH_INLINE F f_round(F a) {
    return by_quarters<F>([](Float4 x) __attribute__((always_inline)) { return round_quarter(x); }, a);
}

// 2^n for integers n of -126 .. 127, put together from the bits of a float.
PDMESH_INLINE Float4 power_of_two(Int4 n) { return bits_as<Float4>((n + 127) << 23); }

// A float cannot hold 2^-150, so the power comes in two factors. The one that reaches into the denormals is the last:
// x * 2^(n + 126) is exact unless x is so small that the result is 0 anyhow, hence one rounding. Right for n of -252 .. 254.
PDMESH_INLINE Float4 scale2_quarter(Float4 x, Float4 exponent) {
    const Int4 n = __builtin_convertvector(exponent, Int4);
    const Int4 floored = n > -126 ? n : all_four(-126);
    const Int4 most = floored < 127 ? floored : all_four(127);
    return x * power_of_two(n - most) * power_of_two(most);
}
PDMESH_INLINE F f_scale2(F x, F n) {
    return by_quarters<F>([](Float4 x, Float4 n) __attribute__((always_inline)) { return scale2_quarter(x, n); }, x, n);
}

// Halves are folded onto each other: lanes 8 apart, then 4, 2, 1.
PDMESH_INLINE float f_sum(F x) {
    const Float4 sum = (x.v[0] + x.v[2]) + (x.v[1] + x.v[3]);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}
PDMESH_INLINE float f_hmax(F x) {
    const Float4 most = larger_of(larger_of(x.v[0], x.v[2]), larger_of(x.v[1], x.v[3]));
    const float even = most[0] > most[2] ? most[0] : most[2];
    const float odd = most[1] > most[3] ? most[1] : most[3];
    return even > odd ? even : odd;
}

// The lanes below `count` from `x`, the others from `y`.
PDMESH_INLINE F split_at(int count, F x, F y) {
    const I lanes = {{Int4{0, 1, 2, 3}, Int4{4, 5, 6, 7}, Int4{8, 9, 10, 11}, Int4{12, 13, 14, 15}}};
    const Int4 wanted = all_four(count);
    return by_quarters<F>([=](Float4 x, Float4 y, Int4 lane) { return lane < wanted ? x : y; }, x, y, lanes);
}
PDMESH_INLINE F f_first(F x, int count, float other) { return split_at(count, x, f_set(other)); }
PDMESH_INLINE F f_from_lane(F x, int first, float other) { return split_at(first, f_set(other), x); }
PDMESH_INLINE F f_from(I x) {
    return by_quarters<F>([](Int4 x) { return __builtin_convertvector(x, Float4); }, x);
}
PDMESH_INLINE F f_bits(I x) {
    return by_quarters<F>([](Int4 x) { return bits_as<Float4>(x); }, x);
}

PDMESH_INLINE I i_load(const void* p) {
    const auto* p0 = static_cast<const uint8_t*>(p);
    return {{load_vector<Int4>(p0), load_vector<Int4>(p0 + 16), load_vector<Int4>(p0 + 32), load_vector<Int4>(p0 + 48)}};
}
PDMESH_INLINE void i_store(void* p, I x) {
    auto* bytes = static_cast<uint8_t*>(p);
    store_vector(bytes, x.v[0]);
    store_vector(bytes + 16, x.v[1]);
    store_vector(bytes + 32, x.v[2]);
    store_vector(bytes + 48, x.v[3]);
}

// 16 numbers of 16 bits, each in the low half of a lane. A loop, for compilers know it as a widening; GCC takes conversions
// between vectors of different widths apart into scalars. So below.
PDMESH_INLINE I lanes_from_words(const void* p) {
    const auto* bytes = static_cast<const uint8_t*>(p);
    int32_t lanes[16];
    for (int i = 0; i < 16; i++) lanes[i] = load_vector<uint16_t>(bytes + 2 * i);
    return i_load(lanes);
}
// The low bits of each lane.
template <class Number>
PDMESH_INLINE void store_low_bits(Number* p, I x) {
    int32_t lanes[16];
    i_store(lanes, x);
    for (int i = 0; i < 16; i++) p[i] = static_cast<Number>(lanes[i]);
}

PDMESH_INLINE F f_load_bf16(const uint16_t* p) {
    return by_quarters<F>([](Int4 bits) { return bits_as<Float4>(bits << 16); }, lanes_from_words(p));
}

// The exponent moves from bias 15 to 127. Infinity and NaN have to move on to 255. A denormal lacks the leading 1 that a float
// with its exponent would have: one is given to it and subtracted again.
PDMESH_INLINE Float4 floats_from_f16(Int4 half) {
    const Int4 shifted = (half & 0x7fff) << 13;
    const Int4 normal = shifted + (112 << 23);
    const Int4 special = normal + (112 << 23);
    const Float4 denormal = bits_as<Float4>(normal + (1 << 23)) - 0x1p-14f;
    const Int4 finite = shifted < all_four(1 << 23) ? bits_as<Int4>(denormal) : normal;
    const Int4 bits = shifted < all_four(31 << 23) ? finite : special;
    return bits_as<Float4>(bits | ((half & 0x8000) << 16));
}
PDMESH_INLINE F f_load_f16(const uint16_t* p) {
    return by_quarters<F>([](Int4 half) __attribute__((always_inline)) { return floats_from_f16(half); }, lanes_from_words(p));
}

// Round to nearest, ties to even. NaN is not kept: no caller has one that matters.
PDMESH_INLINE void f_store_bf16(uint16_t* p, F x) {
    const auto rounded = [](Float4 x) {
        const Uint4 bits = bits_as<Uint4>(x);
        return bits_as<Int4>((bits + ((bits >> 16) & 1) + 0x7fff) >> 16);
    };
    store_low_bits(p, by_quarters<I>(rounded, x));
}
// Rounded to integers and stored as int8; callers stay within [-127, 127]. Beside 1.5 * 2^23 a float's low bits count ones: the
// addition rounds to nearest even and leaves the integer in the low byte.
PDMESH_INLINE void f_store_i8(int8_t* p, F x) {
    store_low_bits(p, by_quarters<I>([](Float4 x) { return bits_as<Int4>(x + 12582912.0f); }, x));
}
// The same as int16; callers stay within [-32767, 32767].
PDMESH_INLINE void f_store_i16(int16_t* p, F x) {
    store_low_bits(p, by_quarters<I>([](Float4 x) { return bits_as<Int4>(x + 12582912.0f); }, x));
}

PDMESH_INLINE I i_zero() { return {{all_four(0), all_four(0), all_four(0), all_four(0)}}; }
PDMESH_INLINE I i_broadcast(const void* p) {
    const Int4 bytes = all_four(load_vector<int32_t>(p));
    return {{bytes, bytes, bytes, bytes}};
}
PDMESH_INLINE I i_low_nibbles(I x) {
    return by_quarters<I>([](Int4 x) { return bits_as<Int4>(bits_as<Byte16>(x) & 15); }, x);
}
PDMESH_INLINE I i_high_nibbles(I x) {
    return by_quarters<I>([](Int4 x) { return bits_as<Int4>(bits_as<Byte16>(x) >> 4); }, x);
}
PDMESH_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

PDMESH_INLINE I i_minus_128_times(I x, I sum) {
    return by_quarters<I>([](Int4 x, Int4 sum) { return x - (sum << 7); }, x, sum);
}

PDMESH_INLINE Int4 low_words(Int4 x) { return (x << 16) >> 16; }
PDMESH_INLINE Int4 high_words(Int4 x) { return x >> 16; }

// Products of even and of odd bytes fit into 16 bits (255 * 127 < 2^15); their sums need 32.
PDMESH_INLINE I dot_u8s8(I acc, I u, I s) {
    const auto dot = [](Int4 acc, Int4 u, Int4 s) __attribute__((always_inline)) {
        const Ushort8 inputs = bits_as<Ushort8>(u);
        const Short8 weights = bits_as<Short8>(s);
        const Int4 even = bits_as<Int4>(bits_as<Short8>(inputs & 255) * ((weights << 8) >> 8));
        const Int4 odd = bits_as<Int4>(bits_as<Short8>(inputs >> 8) * (weights >> 8));
        return acc + low_words(even) + high_words(even) + low_words(odd) + high_words(odd);
    };
    return by_quarters<I>(dot, acc, u, s);
}

// 32 int8 as 32 int16 in the same order, two to a lane.
PDMESH_INLINE I words_from_i8(const int8_t* p) {
    const auto convert = [](Int4 pair) { return (((pair << 24) >> 24) & 0xffff) | (((pair << 16) >> 24) << 16); };
    return by_quarters<I>(convert, lanes_from_words(p));
}
PDMESH_INLINE I dot_words(I acc, I a, I b) {
    const auto dot = [](Int4 acc, Int4 a, Int4 b) { return acc + low_words(a) * low_words(b) + high_words(a) * high_words(b); };
    return by_quarters<I>(dot, acc, a, b);
}

PDMESH_INLINE Float4 even_bf16(Int4 x) { return bits_as<Float4>(x << 16); }
PDMESH_INLINE Float4 odd_bf16(Int4 x) { return bits_as<Float4>(x & kUpperHalf); }

// Products of bf16 are exact in a float, so that this equals the fused form.
PDMESH_INLINE F dot_bf16(F acc, I a, I b) {
    const auto dot = [](Float4 acc, Int4 a, Int4 b) __attribute__((always_inline)) {
        return odd_bf16(a) * odd_bf16(b) + (even_bf16(a) * even_bf16(b) + acc);
    };
    return by_quarters<F>(dot, acc, a, b);
}

// 32 int8 -> 32 bf16 in the same order, two to a lane. bf16 holds integers to 127, so the upper half of a float is all of it.
PDMESH_INLINE I bf16_from_i8(const int8_t* p) {
    const auto convert = [](Int4 pair) __attribute__((always_inline)) {
        const Float4 even = __builtin_convertvector((pair << 24) >> 24, Float4);
        const Float4 odd = __builtin_convertvector((pair << 16) >> 24, Float4);
        return bits_as<Int4>(bits_as<Uint4>(even) >> 16) | (bits_as<Int4>(odd) & kUpperHalf);
    };
    return by_quarters<I>(convert, lanes_from_words(p));
}

PDMESH_INLINE void f_store_first(float* p, F x, int count) {
    if (count >= 16) return f_store(p, x);
    float lanes[16];
    f_store(lanes, x);
    for (int i = 0; i < count; i++) p[i] = lanes[i];
}
PDMESH_INLINE uint32_t f_equal_mask(F a, F b) {
    float x[16], y[16];
    f_store(x, a);
    f_store(y, b);
    uint32_t mask = 0;
    for (int i = 0; i < 16; i++) mask |= static_cast<uint32_t>(x[i] == y[i]) << i;
    return mask;
}
PDMESH_INLINE F f_maxima_of_4(const float* p) {
    float maxima[16];
    for (int i = 0; i < 16; i++) {
        const float a = __builtin_fabsf(p[4 * i]), b = __builtin_fabsf(p[4 * i + 1]);
        const float c = __builtin_fabsf(p[4 * i + 2]), d = __builtin_fabsf(p[4 * i + 3]);
        const float ab = a > b ? a : b, cd = c > d ? c : d;
        maxima[i] = ab > cd ? ab : cd;
    }
    return f_load(maxima);
}
PDMESH_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace pdmesh
