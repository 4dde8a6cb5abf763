// From float32 rows to the rows that a product takes: norm, then rounding to the weights' partner format.
// Float rows lie `round_up(width, 16)` floats apart and are zero beyond their width.
#pragma once

#include <cstring>

#include "gemm.h"

namespace pdmesh {

// Units of 4 bytes of one prepared row: as many as a panel of the weights has.
inline int row_units(const PdmeshLinear& linear) {
    switch (linear.format) {
        case kFloat32: return linear.k;
        case kBFloat16: return (linear.k + 1) / 2;
        default: return (linear.k + 3) / 4;
    }
}

// 1 / rms of a row (Zhang and Sennrich, 2019); zeros beyond the width change nothing.
inline float inverse_rms(const float* x, int padded, int width, float eps) {
    F even = f_zero(), odd = f_zero();  // two chains of additions: each waits for itself only
    int i = 0;
    for (; i + 32 <= padded; i += 32) {
        const F a = f_load(x + i), b = f_load(x + i + 16);
        even = f_fma(a, a, even);
        odd = f_fma(b, b, odd);
    }
    if (i < padded) even = f_fma(f_load(x + i), f_load(x + i), even);
    return 1.0f / __builtin_sqrtf(f_sum(even + odd) / static_cast<float>(width) + eps);
}

// The sum of `count` int8.
inline int32_t sum_of(const int8_t* x, int count) {
    static constexpr uint32_t kOnes = 0x01010101;
    I sums = i_zero();
    int i = 0;
    for (; i + kUnit <= count; i += kUnit) sums = dot_u8s8(sums, i_broadcast(&kOnes), i_load(x + i));
    int32_t lanes[kPanel], sum = 0;
    i_store(lanes, sums);
    for (const int32_t lane : lanes) sum += lane;
    for (; i < count; i++) sum += x[i];
    return sum;
}

// out = x / limit * 127 rounded, cut to [-limit, limit], in units of `scale`; returns the sum of what it wrote.
inline int32_t quantize(const float* x, int count, float limit, int8_t* out, float* scale) {
    F finite = f_zero();  // stays 0, but NaN where a number is NaN or infinite: integers would hide it
    const F factor = f_set(limit > 0 ? 127.0f / limit : 0.0f), high = f_set(limit), low = f_set(-limit);
    for (int i = 0; i < count; i += 16) {
        const F numbers = f_load(x + i);
        finite = f_fma(numbers, f_zero(), finite);
        f_store_i8(out + i, f_max(f_min(numbers, high), low) * factor);
    }
    *scale = limit / 127.0f + f_sum(finite);
    return sum_of(out, count);
}

inline float largest(const float* x, int count) {
    F most = f_zero();
    for (int i = 0; i < count; i += 16) most = f_max(most, f_abs(f_load(x + i)));
    return f_hmax(most);
}

// Symmetric int8 for each group of a row: its largest magnitude becomes 127. A group is a multiple of 16 numbers.
inline void quantize_groups(const float* x, const PdmeshLinear& linear, int8_t* out, float* scales, int32_t* sums) {
    for (int g = 0; g * linear.group < linear.k; g++) {
        const int first = g * linear.group;
        const float limit = largest(x + first, linear.group);
        sums[g] = quantize(x + first, linear.group, limit, out + first, scales + g);
    }
}

inline float largest_of(const float* maxima, int count) {
    F most = f_zero(), other = f_zero();  // two chains: each waits for itself only
    int i = 0;
    for (; i + 32 <= count; i += 32) {
        most = f_max(most, f_load(maxima + i));
        other = f_max(other, f_load(maxima + i + 16));
    }
    return f_hmax(f_max(other, i < count ? f_max(most, f_load(maxima + i)) : most));
}

// The unit with the largest number, by the maxima of all units (-1: taken already); the lowest among equals, 0 where all are
// taken. `count` is a multiple of 16.
inline int largest_unit(const float* maxima, int count) {
    const F peak = f_set(largest_of(maxima, count));
    for (int i = 0; i < count; i += 16)
        if (const uint32_t mask = f_equal_mask(f_load(maxima + i), peak)) return i + __builtin_ctz(mask);
    return 0;
}

// Symmetric int8 for a whole row whose largest units are cut to the range of the others; what is cut off goes to `outliers`.
// `maxima` holds round_up(padded / 4, 16) floats.
inline void quantize_row(const float* x, int padded, int num_units, float* maxima, int8_t* out, float* scale, int32_t* sum, Outliers* outliers) {
    const int units = padded / 4, padded_units = round_up(units, 16), whole = units / 16 * 16;
    for (int u = 0; u < whole; u += 16) f_store(maxima + u, f_maxima_of_4(x + u * 4));
    if (whole < units) {
        float rest[64] = {};
        std::memcpy(rest, x + whole * 4, sizeof(float) * (padded - whole * 4));
        f_store(maxima + whole, f_maxima_of_4(rest));
    }
    for (int t = 0; t < kOutliers; t++) {
        outliers->unit[t] = largest_unit(maxima, padded_units);
        maxima[outliers->unit[t]] = -1.0f;  // out of the race; units beyond the row are 0 and never lead before it
    }
    const float limit = largest_of(maxima, padded_units);
    *sum = quantize(x, padded, limit, out, scale);
    // The outliers' numbers fill one vector.
    static_assert(kOutliers * 4 == kPanel);
    alignas(64) float cut[kPanel];
    for (int t = 0; t < kOutliers; t++) {
        int32_t& unit = outliers->unit[t];
        if (unit < units) std::memcpy(cut + t * 4, x + unit * 4, sizeof(float) * 4);
        else std::memset(cut + t * 4, 0, sizeof(float) * 4);
        if (unit >= num_units) unit = 0;  // padding: nothing exceeds there, and the weights have no such unit
    }
    const F numbers = f_load(cut), excess = numbers - f_max(f_min(numbers, f_set(limit)), f_set(-limit));
    const float most = f_hmax(f_abs(excess));
    auto* bytes = reinterpret_cast<int8_t*>(outliers->excess);
    f_store_i8(bytes, excess * f_set(most > 0 ? 127.0f / most : 0.0f));
    outliers->scale = most / 127.0f;
    outliers->sum = 0;
    for (int i = 0; i < kOutliers * 4; i++) outliers->sum += bytes[i];
}

inline void layer_norm(const PdmeshNorm& norm, const float* x, int padded, int width, float* out) {
    F sum = f_zero(), squares = f_zero();
    for (int i = 0; i < padded; i += 16) sum = sum + f_load(x + i);
    const F mean = f_set(f_sum(sum) / static_cast<float>(width));
    for (int i = 0; i < padded; i += 16) {
        const F distance = f_first(f_load(x + i) - mean, width - i, 0.0f);
        squares = f_fma(distance, distance, squares);
    }
    const F factor = f_set(1.0f / __builtin_sqrtf(f_sum(squares) / static_cast<float>(width) + norm.eps));
    for (int i = 0; i < padded; i += 16) {
        const F normed = (f_load(x + i) - mean) * factor * f_load(norm.weight + i);
        f_store(out + i, norm.bias ? normed + f_load(norm.bias + i) : normed);
    }
}

// out [padded] = x [width], padded with zeros, normalized. They may be the same.
inline void norm_row(const PdmeshNorm& norm, const float* x, int width, float* out) {
    const int padded = round_up(width, 16);
    if (norm.kind == kLayerNorm) return layer_norm(norm, x, padded, width, out);
    const F factor = f_set(inverse_rms(x, padded, width, norm.eps));
    for (int i = 0; i < padded; i += 16) f_store(out + i, f_load(x + i) * factor * f_load(norm.weight + i));
}

// Row `row` of `rows` from x [width], normalized where the norm has a weight, times `factor`. `scratch` holds a padded row and
// its units' maxima (scratch_floats).
inline void prepare_row(const PdmeshLinear& linear, const float* x, const PdmeshNorm& norm, float* scratch, Rows& rows, int row, float factor = 1.0f) {
    const int padded = round_up(linear.k, 16);
    if (norm.weight) {
        norm_row(norm, x, linear.k, scratch);
        x = scratch;
    }
    if (factor != 1.0f) {
        for (int i = 0; i < padded; i += 16) f_store(scratch + i, f_load(x + i) * f_set(factor));
        x = scratch;
    }
    uint8_t* out = rows.data + row * rows.stride;
    if (linear.format == kFloat32) {
        std::memcpy(out, x, static_cast<size_t>(linear.k) * 4);
    } else if (linear.format == kBFloat16) {
        for (int i = 0; i < padded; i += 16) f_store_bf16(reinterpret_cast<uint16_t*>(out) + i, f_load(x + i));
    } else {
        const size_t at = static_cast<size_t>(row) * rows.num_groups;
        auto* bytes = reinterpret_cast<int8_t*>(out);
        if (linear.format == kInt4) quantize_groups(x, linear, bytes, rows.scales + at, rows.sums + at);
        else quantize_row(x, padded, row_units(linear), scratch + padded, bytes, rows.scales + at, rows.sums + at, rows.outliers + row);
    }
}

inline int scratch_floats(const PdmeshLinear& linear) { return 2 * round_up(linear.k, 16) + 16; }

inline int num_groups(const PdmeshLinear& linear) { return linear.format == kInt4 ? linear.k / linear.group : 1; }

}  // namespace pdmesh
