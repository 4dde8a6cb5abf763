// Which tokens of a row can be drawn: top-k, top-p and min-p without sorting or copying the row.
//
// One pass over the row leaves the maxima of its columns:
//
//     group 0                              group 1
//     ┌ token   0   1   2 ...  15 ┐        ┌ token 512 513 ... 527 ┐
//     │        16  17  18 ...  31 │        │       528  ...        │
//     │        ...                │        │                       │
//     └       496 497 498 ... 511 ┘        └                       ┘
//     columns  0   1   2 ...  15            16  17  ...   31            columns[c]: the highest of 32 tokens
//
// The k-th highest column is a bound that k tokens or more reach and few others do. Bounds for top-p and min-p follow from the
// sum of the exponentials and from the highest logit. Then the tokens that reach the bound are gathered (most groups have none)
// and the rules are applied to them alone.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "sampling.h"
#include "simd.h"

namespace pdmesh::sampling {

constexpr int kLanes = 16;
constexpr int kGroup = 512;  // tokens
constexpr float kHidden = -std::numeric_limits<float>::infinity();

inline float temperature_of(const PdmeshSamplingParams& params) { return static_cast<float>(params.temperature); }

inline bool has_top_k(const PdmeshSamplingParams& params, int64_t vocab) { return params.top_k > 0 && params.top_k < vocab; }

// One row of logits and the maxima of its columns. NaN is lower than everything.
struct Row {
    const float* x;
    int64_t size;
    const float* columns;
    float max;

    int64_t num_groups() const { return (size + kGroup - 1) / kGroup; }
    int64_t num_columns() const { return num_groups() * kLanes; }
    int64_t group_end(int64_t group) const { return std::min(size, (group + 1) * kGroup); }
    float group_max(int64_t group) const { return f_hmax(f_load(columns + group * kLanes)); }
};

// Tokens that may be drawn, in no particular order, and their logits: less the highest, over the temperature.
struct Candidates {
    std::vector<int32_t> ids;
    std::vector<float> scaled, weights;  // weights: e^scaled, once they are needed
    std::vector<uint64_t> keys;
    int64_t count = 0;

    // `capacity` tokens fit, rounded up to whole vectors and one token more for the gathering.
    void reserve(int64_t capacity) {
        const size_t size = static_cast<size_t>(capacity / kLanes + 2) * kLanes;
        if (ids.size() >= size) return;
        ids.resize(size);
        scaled.resize(size);
        weights.resize(size);
        keys.resize(size);
    }

    // Keeps those for which is_kept(position), in their order. Without a branch: it could not be predicted.
    template <class Predicate>
    void keep(Predicate&& is_kept) {
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i++) {
            const bool stays = is_kept(i);
            ids[kept] = ids[i];
            scaled[kept] = scaled[i];
            weights[kept] = weights[i];
            kept += stays;
        }
        count = kept;
    }
};

// Fills `columns` [num_columns]; the highest of all.
inline Row scan(const float* x, int64_t size, std::vector<float>& columns) {
    Row row{x, size, nullptr, kHidden};
    columns.resize(row.num_columns());
    row.columns = columns.data();
    F most = f_set(kHidden);
    for (int64_t group = 0; group < row.num_groups(); group++) {
        const int64_t end = row.group_end(group);
        int64_t i = group * kGroup;
        F even = f_set(kHidden), odd = even;
        for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
            even = f_max(f_load(x + i), even);
            odd = f_max(f_load(x + i + kLanes), odd);
        }
        float* column = columns.data() + group * kLanes;
        f_store(column, f_max(even, odd));
        for (; i < end; i++) column[i % kLanes] = x[i] > column[i % kLanes] ? x[i] : column[i % kLanes];
        most = f_max(f_load(column), most);
    }
    row.max = f_hmax(most);
    return row;
}

// The lowest id among the highest.
inline int64_t argmax(const Row& row) {
    int64_t group = 0;
    while (group + 1 < row.num_groups() && row.group_max(group) != row.max) group++;
    const int64_t end = row.group_end(group);
    for (int64_t i = group * kGroup; i < end; i++) {
        if (row.x[i] == row.max) return i;
    }
    return 0;
}

// e^x for x <= 0, to about an ulp: the integral part of x log2(e) is taken off exactly. What is below e^-87 gives e^-87.
inline F f_exp(F x) {
    x = f_max(x, f_set(-87.0f));
    const F n = f_round(x * f_set(1.44269502f));
    const F fraction = f_fma(x, f_set(1.92596303e-8f), f_fma(x, f_set(1.44269502f), f_zero() - n));
    return f_scale2(f_exp2(fraction), n);
}

// e^((x - max) / temperature) of 16 logits.
inline F weight(const float* x, F max, F temperature) { return f_exp((f_load(x) - max) / temperature); }

// The sum of the weights of x [size], in an order that depends on `size` alone.
inline double sum_weights(const float* x, int64_t size, float max, float temperature) {
    const F most = f_set(max), divisor = f_set(temperature);
    double total = 0;
    int64_t i = 0;
    for (; i + kGroup <= size; i += kGroup) {
        F sum = f_zero();
        for (int j = 0; j < kGroup; j += kLanes) sum = sum + weight(x + i + j, most, divisor);
        total += static_cast<double>(f_sum(sum));
    }
    F sum = f_zero();
    for (; i < size; i += kLanes) {
        float rest[kLanes];
        const int count = static_cast<int>(std::min<int64_t>(kLanes, size - i));
        std::fill(std::copy(x + i, x + i + count, rest), rest + kLanes, kHidden);
        sum = sum + f_first(weight(rest, most, divisor), count, 0.0f);
    }
    return total + static_cast<double>(f_sum(sum));
}

// Some of the tokens may have been rounded to equals of what is just above them, so a bound on logits gives way by a little.
inline float lowered(double bound, float max) {
    return static_cast<float>(bound - (std::abs(bound) + std::abs(static_cast<double>(max))) * 0x1p-18);
}

// A logit that `count` tokens or more reach.
inline float bound_of_highest(const Row& row, int64_t count, std::vector<float>& scratch) {
    if (count > row.num_columns()) return kHidden;
    scratch.assign(row.columns, row.columns + row.num_columns());
    std::nth_element(scratch.begin(), scratch.begin() + (count - 1), scratch.end(), std::greater<float>());
    return lowered(scratch[count - 1], row.max);
}

// Tokens whose logit is `bound` or more, by ascending id. NaN never is.
inline void gather(const Row& row, float bound, Candidates& out) {
    out.reserve(row.size);
    int32_t* ids = out.ids.data();
    int64_t count = 0;
    for (int64_t group = 0; group < row.num_groups(); group++) {
        if (!(row.group_max(group) >= bound)) continue;
        const int64_t end = row.group_end(group);
        for (int64_t i = group * kGroup; i < end; i++) {  // without a branch: which of them reach it cannot be foreseen
            ids[count] = static_cast<int32_t>(i);
            count += row.x[i] >= bound;
        }
    }
    out.count = count;
}

inline void scale(const Row& row, float temperature, Candidates& out) {
    int64_t num_hidden = 0;
    for (int64_t i = 0; i < out.count; i++) {
        out.scaled[i] = (row.x[out.ids[i]] - row.max) / temperature;
        num_hidden += out.scaled[i] == kHidden;
    }
    if (num_hidden) out.keep([&](int64_t i) { return out.scaled[i] > kHidden; });  // by a tiny temperature
}

inline void keep_top_k(Candidates& candidates, int64_t top_k) {
    if (candidates.count <= top_k) return;
    float* sorted = candidates.weights.data();  // not in use yet
    std::copy_n(candidates.scaled.data(), candidates.count, sorted);
    std::nth_element(sorted, sorted + (top_k - 1), sorted + candidates.count, std::greater<float>());
    const float threshold = sorted[top_k - 1];
    candidates.keep([&](int64_t i) { return candidates.scaled[i] >= threshold; });
}

inline void weigh(Candidates& candidates) {
    for (int64_t i = 0; i < candidates.count; i += kLanes) {  // the last vector may reach beyond what is read
        f_store(candidates.weights.data() + i, weight(candidates.scaled.data() + i, f_zero(), f_set(1.0f)));
    }
}

// Compilers make vectors of an inner loop over so many, and of a shorter one worse things.
constexpr int kWide = 4 * kLanes;

// The sum of the weights that are `least` or more, and their number.
struct Mass {
    double sum = 0;
    int32_t count = 0;
};

inline Mass mass_from(const float* weights, int64_t size, float least) {
    Mass mass;
    for (int64_t start = 0; start < size; start += kGroup) {
        const int64_t end = std::min(size, start + kGroup);
        float sums[kWide] = {};
        int64_t i = start;
        for (; i + kWide <= end; i += kWide) {
            for (int lane = 0; lane < kWide; lane++) sums[lane] += weights[i + lane] >= least ? weights[i + lane] : 0.0f;
        }
        for (; i < end; i++) sums[i % kWide] += weights[i] >= least ? weights[i] : 0.0f;
        for (int lane = 0; lane < kWide; lane += kLanes) mass.sum += static_cast<double>(f_sum(f_load(sums + lane)));
    }
    for (int64_t i = 0; i < size; i++) mass.count += weights[i] >= least;
    return mass;
}

// The sum of the probabilities weight / sum, each rounded to float32, over the weights that are `least` or more.
inline double probability_from(const float* weights, int64_t size, float least, float sum) {
    double sums[kWide] = {};
    int64_t i = 0;
    for (; i + kWide <= size; i += kWide) {
        for (int lane = 0; lane < kWide; lane++) {
            const float probability = weights[i + lane] / sum;
            sums[lane] += weights[i + lane] >= least ? static_cast<double>(probability) : 0.0;
        }
    }
    for (; i < size; i++) sums[i % kWide] += weights[i] >= least ? static_cast<double>(weights[i] / sum) : 0.0;
    return std::accumulate(sums, sums + kWide, 0.0);
}

// The smallest set of probability p is all weights from `sure` on, some of those in [possible, sure), and none below.
struct TopPBounds {
    float possible, sure;
};

// By bisection over the bits of the weights (which have the order of the weights), until few are in question. The sums here are
// rounded otherwise than the exact ones that decide later, hence the margin.
inline TopPBounds bracket_top_p(const float* weights, int64_t size, float possible, double wanted) {
    constexpr double kMargin = 1e-5;
    constexpr int64_t kFew = 48;
    TopPBounds bounds{possible, std::nextafter(1.0f, 2.0f)};
    int64_t above = 0, in_all = size;
    while (in_all - above > kFew) {
        const uint32_t low = std::bit_cast<uint32_t>(bounds.possible), high = std::bit_cast<uint32_t>(bounds.sure);
        if (high - low < 2) break;
        const float middle = std::bit_cast<float>(low + (high - low) / 2);
        const Mass mass = mass_from(weights, size, middle);
        if (mass.sum >= wanted * (1 + kMargin)) {
            bounds.possible = middle;
            in_all = mass.count;
        } else if (mass.sum < wanted * (1 - kMargin)) {
            bounds.sure = middle;
            above = mass.count;
        } else {
            break;
        }
    }
    return bounds;
}

inline float probability_of_key(uint64_t key) { return std::bit_cast<float>(~static_cast<uint32_t>(key >> 32)); }

// How many of the keys, which ascend with falling probability, belong to the smallest set of `top_p` after tokens that have
// `before` together. They come first in the array, in no order: only the part around the end of the set is sorted. Sums are in
// double, as torch's cumsum has them on a CPU.
inline int64_t count_top_p(uint64_t* keys, int64_t count, double before, float top_p) {
    int64_t start = 0, end = count;
    while (end - start > 64) {
        const int64_t middle = start + (end - start) / 2;
        std::nth_element(keys + start, keys + middle, keys + end);
        double half = before;
        for (int64_t i = start; i < middle; i++) half += static_cast<double>(probability_of_key(keys[i]));
        if (half >= static_cast<double>(top_p)) {
            end = middle;
        } else {
            before = half;
            start = middle;
        }
    }
    std::sort(keys + start, keys + end);
    for (; start < end; start++) {
        const float own = probability_of_key(keys[start]);
        const bool is_likeliest = before == 0;
        before += static_cast<double>(own);
        if (!is_likeliest && !(static_cast<float>(before) - own < top_p)) break;
    }
    return start;
}

// `total`: the sum of the weights of all tokens that top-p is about, of which some may have been left out as too unlikely.
// All tokens below (1 - p) / V together have less than 1 - p, so none of them is in the set.
inline void keep_top_p(Candidates& candidates, double top_p, double total, int64_t vocab) {
    const float sum = static_cast<float>(total);
    const float least = std::min(static_cast<float>((1.0 - top_p) / static_cast<double>(vocab)), 1.0f / sum);
    float* weights = candidates.weights.data();
    uint64_t* keys = candidates.keys.data();
    const int64_t size = candidates.count;
    const TopPBounds bounds = bracket_top_p(weights, size, least * sum * 0.999f, top_p * total);
    int64_t num_open = 0, count = 0;
    for (int64_t i = 0; i < size; i++) {
        keys[num_open] = static_cast<uint64_t>(i);
        num_open += (weights[i] >= bounds.possible) & (weights[i] < bounds.sure);
    }
    for (int64_t i = 0; i < num_open; i++) {
        const uint64_t position = keys[i];
        const float probability = weights[position] / sum;
        const uint64_t order = ~std::bit_cast<uint32_t>(probability);
        if (probability < least) weights[position] = kHidden;
        keys[count] = order << 32 | position;
        count += probability >= least;
    }
    const double before = probability_from(weights, size, bounds.sure, sum);
    const int64_t num_kept = count_top_p(keys, count, before, static_cast<float>(top_p));
    for (int64_t i = num_kept; i < count; i++) weights[keys[i] & 0xffffffff] = kHidden;
    candidates.keep([&](int64_t i) { return weights[i] >= bounds.possible; });
}

// Whether any rule hides tokens.
inline bool is_filtered(const PdmeshSamplingParams& params, int64_t vocab) {
    return has_top_k(params, vocab) || params.top_p < 1.0 || params.min_p > 0.0;
}

// No token below it can pass the rules of a row with a finite maximum. `total`: the sum of all weights, where top-p needs it.
inline float bound_of(const Row& row, const PdmeshSamplingParams& params, double& total, std::vector<float>& scratch) {
    if (has_top_k(params, row.size)) return bound_of_highest(row, params.top_k, scratch);
    double least = std::max(params.min_p, 0.0);
    if (params.top_p < 1.0) {
        total = sum_weights(row.x, row.size, row.max, temperature_of(params));
        least = std::max(least, std::min(total * (1.0 - params.top_p) / static_cast<double>(row.size), 1.0));
    }
    if (!(least > 0.0)) return kHidden;
    // The extra 1e-3: the weights are rounded, and so are their logarithms.
    const double distance = static_cast<double>(temperature_of(params)) * (std::log(least) - 1e-3);
    return lowered(static_cast<double>(row.max) + distance, row.max);
}

// What can be drawn from a row with a finite maximum.
inline void select(const Row& row, const PdmeshSamplingParams& params, std::vector<float>& scratch, Candidates& out) {
    const bool has_top_p = params.top_p < 1.0, has_min_p = params.min_p > 0.0;
    double total = 0;
    gather(row, std::max(bound_of(row, params, total, scratch), std::numeric_limits<float>::lowest()), out);
    scale(row, temperature_of(params), out);
    if (has_top_k(params, row.size)) keep_top_k(out, params.top_k);
    if (has_top_p || has_min_p) weigh(out);
    if (has_top_p) {
        if (has_top_k(params, row.size)) total = sum_weights(out.scaled.data(), out.count, 0.0f, 1.0f);
        keep_top_p(out, params.top_p, total, row.size);
    }
    if (has_min_p) {
        const float least = static_cast<float>(params.min_p);
        out.keep([&](int64_t i) { return !(out.weights[i] < least); });
    }
}

}  // namespace pdmesh::sampling
