// Sixteen float lanes (F) and 64 bytes of integers (I), on whatever the compiler was told the processor has.
//
// One kernel source serves all processors; only this layer differs. Sums over lanes (`f_sum`) keep one order per build, and a
// fused multiply-add is either always fused or never, so that a result's bits depend on the build alone.
//
//   f_zero f_set f_load f_store + - * / f_fma f_max f_min f_abs f_round   lane by lane
//   f_scale2(x, n)          x * 2^n, n integral
//   f_reciprocal(x)         1 / x within an ulp, 1 <= x < 2^127
//   f_sum, f_hmax           over the lanes
//   f_first(x, count, o)    the first `count` lanes of x, o in the others
//   f_store_first(p, x, count)    stores the first `count` lanes only
//   f_from_lane(x, first, o)   lanes from `first` on of x, o before
//   f_equal_mask(a, b)      bit i: are the lanes i equal?
//   f_maxima_of_4(p)        lane i: the largest magnitude of p[4i .. 4i+3] (64 floats)
//   f_from(I)               int32 -> float;  f_bits(I): the same bits
//   f_load_bf16 f_store_bf16 f_load_f16 f_store_i8      16 numbers of another type in memory
//   i_load i_store i_zero   64 bytes;  i_broadcast: 4 bytes to all lanes
//   i_minus_128_times(x, sum)     x - 128 sum, in int32
//   dot_u8s8(acc, u, s)     acc[i] += sum of 4 products, bytes 4i .. 4i+3 of u (unsigned) and s (signed); exact in int32
//   dot_bf16(acc, a, b)     acc[i] += a[2i] b[2i] + a[2i+1] b[2i+1] of bf16 pairs
//   bf16_from_i8(p)         32 int8 as 32 bf16
//   i_low_nibbles i_high_nibbles     of each byte
#pragma once

#if defined(PDMESH_ISA_AMX) || defined(PDMESH_ISA_AVX512_BF16) || defined(PDMESH_ISA_AVX512_VNNI)
#include "simd_avx512.h"
#elif defined(PDMESH_ISA_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace pdmesh {

#if !defined(PDMESH_HAS_EXP2)
// 2^x for x <= 0 (and somewhat above): 2^x = 2^n * 2^f, f in [-1/2, 1/2], by a minimax polynomial of degree 6, within 1.3 ulp.
// -inf gives 0.
inline F f_exp2(F x) {
    x = f_max(x, f_set(-150.0f));
    const F n = f_round(x);
    const F f = x - n;
    F p = f_set(1.55946778e-4f);
    p = f_fma(p, f, f_set(1.34066434e-3f));
    p = f_fma(p, f, f_set(9.61769279e-3f));
    p = f_fma(p, f, f_set(5.55031039e-2f));
    p = f_fma(p, f, f_set(2.40226522e-1f));
    p = f_fma(p, f, f_set(6.93147242e-1f));
    p = f_fma(p, f, f_set(1.0f));
    return f_scale2(p, n);
}
#endif

}  // namespace pdmesh
