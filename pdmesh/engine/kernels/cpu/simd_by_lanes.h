// What tiers without instructions for it do lane by lane, for simd_avx2.h and simd_portable.h. See simd.h for what each means.
#pragma once

#include <cstdint>

namespace pdmesh {

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
PDMESH_INLINE F f_reciprocal(F x) { return f_set(1.0f) / x; }
PDMESH_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace pdmesh
