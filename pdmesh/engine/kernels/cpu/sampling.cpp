// One row: grammar, bias, penalties and forbidden tokens in a scratch row, then greedy, or candidates and noise, or (without top-k, top-p and
// min-p) one fused pass of noise over the vocabulary. All rows of a step: shared out over the team.
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "sampling_noise.h"
#include "sampling_select.h"

namespace pdmesh::sampling {
namespace {

constexpr int kBlock = 128;  // tokens whose noise is made at once

// A thread's memory. It grows to the largest vocabulary and stays.
struct Scratch {
    std::vector<float> logits, columns, sorted;
    std::vector<int32_t> counts;  // by token, zero between uses
    Candidates candidates;
};

Scratch& scratch() {
    static thread_local Scratch own;
    return own;
}

// The best so far; on ties the lowest id. It begins with some token that can be drawn.
struct Best {
    float score;
    int64_t id;

    void consider(float new_score, int64_t new_id) {
        if (new_score > score || (new_score == score && new_id < id)) *this = {new_score, new_id};
    }
    // No score below it can win, even where it was computed from a bound (gumbel_bound).
    float limit() const { return score - 1e-3f - 1e-5f * std::abs(score); }
};

// ---- penalties -------------------------------------------------------------------------------------------------------------

// Calls visit(token) for each token of `ids` in the vocabulary that `counts` has not yet, and counts it.
template <class Visit>
void count_tokens(const int64_t* ids, int64_t count, int64_t vocab, int32_t* counts, Visit&& visit) {
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] >= 0 && ids[i] < vocab && counts[ids[i]]++ == 0) visit(ids[i]);
    }
}

void forget_tokens(const int64_t* ids, int64_t count, int64_t vocab, int32_t* counts) {
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] >= 0 && ids[i] < vocab) counts[ids[i]] = 0;
    }
}

void penalize_repetition(float* x, int64_t vocab, const PdmeshSampleRow& row, int32_t* counts) {
    const float penalty = static_cast<float>(row.params.repetition_penalty);
    const auto penalize = [&](int64_t id) { x[id] = x[id] < 0 ? x[id] * penalty : x[id] / penalty; };
    count_tokens(row.prompt, row.num_prompt, vocab, counts, penalize);
    count_tokens(row.output, row.num_output, vocab, counts, penalize);
    forget_tokens(row.prompt, row.num_prompt, vocab, counts);
    forget_tokens(row.output, row.num_output, vocab, counts);
}

void penalize_output(float* x, int64_t vocab, const PdmeshSampleRow& row, int32_t* counts) {
    const float presence = static_cast<float>(row.params.presence_penalty);
    const float frequency = static_cast<float>(row.params.frequency_penalty);
    count_tokens(row.output, row.num_output, vocab, counts, [](int64_t) {});
    for (int64_t i = 0; i < row.num_output; i++) {
        const int64_t id = row.output[i];
        if (id < 0 || id >= vocab || counts[id] == 0) continue;
        // By way of double the product is rounded by itself, as in torch: no compiler fuses it with the difference.
        const double penalty = static_cast<double>(frequency) * counts[id];
        x[id] = x[id] - static_cast<float>(penalty) - presence;
        counts[id] = 0;
    }
}

// Most words of a grammar's mask are all zeros or, within a string, all ones.
void keep_allowed(float* x, int64_t vocab, const uint32_t* allowed) {
    for (int64_t start = 0; start < vocab; start += 32) {
        const uint32_t word = allowed[start / 32];
        const int count = static_cast<int>(std::min<int64_t>(32, vocab - start));
        if (word == 0) std::fill_n(x + start, count, kHidden);
        if (word == 0 || word == ~0u) continue;
        for (int i = 0; i < count; i++) x[start + i] = word >> i & 1 ? x[start + i] : kHidden;
    }
}

void add_bias(float* x, int64_t vocab, const PdmeshSampleRow& row) {
    for (int64_t i = 0; i < row.num_biased; i++) {
        if (row.biased[i] >= 0 && row.biased[i] < vocab) x[row.biased[i]] += row.bias[i];
    }
}

// The row itself where nothing changes it.
const float* adjusted(const float* x, int64_t vocab, const PdmeshSampleRow& row, Scratch& own) {
    const bool is_repetition = row.params.repetition_penalty != 1.0;
    const bool is_output = row.num_output > 0 && (row.params.presence_penalty != 0.0 || row.params.frequency_penalty != 0.0);
    if (!is_repetition && !is_output && row.num_forbidden == 0 && row.num_biased == 0 && !row.allowed) return x;
    own.logits.assign(x, x + vocab);
    if (row.allowed) keep_allowed(own.logits.data(), vocab, row.allowed);
    add_bias(own.logits.data(), vocab, row);
    if (is_repetition || is_output) own.counts.resize(std::max(own.counts.size(), static_cast<size_t>(vocab)));
    if (is_repetition) penalize_repetition(own.logits.data(), vocab, row, own.counts.data());
    if (is_output) penalize_output(own.logits.data(), vocab, row, own.counts.data());
    for (int64_t i = 0; i < row.num_forbidden; i++) {
        const int64_t id = row.forbidden[i];
        if (id >= 0 && id < vocab) own.logits[id] = kHidden;
    }
    return own.logits.data();
}

// ---- noise -----------------------------------------------------------------------------------------------------------------

// Considers `count` tokens, at most kBlock: token_at(i) with the scaled logit scaled[i]. What costs is the noise of all; its
// logarithms are for the few that a cheap bound lets through.
template <class TokenAt>
void draw_block(const NoiseKeys& keys, const float* scaled, TokenAt&& token_at, int count, Best& best) {
    float v[kBlock];
    for (int i = 0; i < count; i++) v[i] = uniform(noise_bits(keys, static_cast<uint64_t>(token_at(i))));
    const float limit = best.limit();
    int num_hopeful = 0;
    for (int i = 0; i < count; i++) num_hopeful += scaled[i] + gumbel_bound(v[i]) > limit;
    for (int i = 0; num_hopeful && i < count; i++) {
        if (scaled[i] + gumbel_bound(v[i]) > best.limit()) best.consider(scaled[i] + gumbel(v[i]), token_at(i));
    }
}

int64_t draw_candidates(const Candidates& candidates, const NoiseKeys& keys) {
    const int32_t* ids = candidates.ids.data();
    Best best{kHidden, *std::min_element(ids, ids + candidates.count)};
    for (int64_t i = 0; i < candidates.count; i += kBlock) {
        const int count = static_cast<int>(std::min<int64_t>(kBlock, candidates.count - i));
        draw_block(keys, candidates.scaled.data() + i, [&](int j) { return ids[i + j]; }, count, best);
    }
    return best.id;
}

// All tokens of the row, in one pass. The likeliest goes first: after it most others are out of reach.
int64_t draw_any(const Row& row, float temperature, const NoiseKeys& keys) {
    const auto scale = [&](float x) { return (x - row.max) / temperature; };
    int64_t first = 0;
    while (!(scale(row.x[first]) > kHidden)) first++;
    Best best{kHidden, first};
    const int64_t likeliest = argmax(row);
    best.consider(gumbel(uniform(noise_bits(keys, static_cast<uint64_t>(likeliest)))), likeliest);
    float scaled[kBlock];
    for (int64_t start = 0; start < row.size; start += kBlock) {
        if (start % kGroup == 0 && scale(row.group_max(start / kGroup)) + kMostNoise < best.limit()) {
            start += kGroup - kBlock;
            continue;
        }
        const int count = static_cast<int>(std::min<int64_t>(kBlock, row.size - start));
        for (int i = 0; i < count; i++) scaled[i] = scale(row.x[start + i]);
        draw_block(keys, scaled, [&](int i) { return start + i; }, count, best);
    }
    return best.id;
}

// ---- rows ------------------------------------------------------------------------------------------------------------------

// Whether a token can be drawn: no logit is NaN or infinity, and one is more than -inf. Without a branch: it is vectorized.
bool is_sound(const float* x, int64_t size) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    int32_t is_bad = 0, is_any = 0;
    for (int64_t i = 0; i < size; i++) {
        is_bad |= !(x[i] < kInfinity);
        is_any |= x[i] > kHidden;
    }
    return is_any && !is_bad;
}

int64_t draw(const Row& row, const PdmeshSampleRow& wanted, Scratch& own) {
    const PdmeshSamplingParams& params = wanted.params;
    const float temperature = temperature_of(params);
    if (row.max == std::numeric_limits<float>::infinity()) return kNoToken;  // a penalty made it of a finite logit
    if (!(temperature > 0.0f) || !std::isfinite(row.max)) return argmax(row);
    const NoiseKeys keys = noise_keys(params.seed, wanted.choice, wanted.index);
    if (!is_filtered(params, row.size)) return draw_any(row, temperature, keys);
    select(row, params, own.sorted, own.candidates);
    return own.candidates.count ? draw_candidates(own.candidates, keys) : argmax(row);
}

// The likeliest tokens of the raw logits, as in pdmesh/engine/sampling/sampler.py.
void report_likeliest(const Row& row, float log_sum, int64_t index, int64_t count, const PdmeshSampleOutput& out, Scratch& own) {
    Candidates& found = own.candidates;
    gather(row, count < row.size ? bound_of_highest(row, count, own.sorted) : kHidden, found);
    for (int64_t i = 0; i < found.count; i++) {
        found.scaled[i] = row.x[found.ids[i]] - row.max - log_sum;
        found.keys[i] = static_cast<uint64_t>(i);
    }
    count = std::min(count, found.count);
    const auto is_before = [&](uint64_t a, uint64_t b) {
        return found.scaled[a] != found.scaled[b] ? found.scaled[a] > found.scaled[b] : a < b;
    };
    std::partial_sort(found.keys.begin(), found.keys.begin() + count, found.keys.begin() + found.count, is_before);
    for (int64_t i = 0; i < count; i++) {
        out.top_ids[index * out.stride + i] = found.ids[found.keys[i]];
        out.top_logprobs[index * out.stride + i] = found.scaled[found.keys[i]];
    }
    out.top_counts[index] = static_cast<int32_t>(count);
}

void report_logprobs(const float* x, int64_t vocab, int64_t index, int32_t count, const PdmeshSampleOutput& out, Scratch& own) {
    const Row row = scan(x, vocab, own.columns);
    const float log_sum = static_cast<float>(std::log(sum_weights(x, vocab, row.max, 1.0f)));
    out.chosen[index] = x[out.tokens[index]] - row.max - log_sum;
    out.top_counts[index] = 0;
    const int64_t wanted = std::min({static_cast<int64_t>(count), vocab, out.stride});
    if (wanted > 0 && std::isfinite(row.max)) report_likeliest(row, log_sum, index, wanted, out, own);
}

void sample_row(const float* logits, int64_t vocab, int64_t index, const PdmeshSampleRow& wanted, const PdmeshSampleOutput& out) {
    Scratch& own = scratch();
    const float* x = logits + index * vocab;
    if (!is_sound(x, vocab)) {
        out.tokens[index] = kNoToken;
        if (wanted.wants_logprobs) out.top_counts[index] = 0;
        return;
    }
    out.tokens[index] = draw(scan(adjusted(x, vocab, wanted, own), vocab, own.columns), wanted, own);
    if (wanted.wants_logprobs && out.tokens[index] != kNoToken) report_logprobs(x, vocab, index, wanted.num_logprobs, out, own);
}

// Roughly how long a token takes, in nanoseconds: to look at it, or to give it noise or a weight.
constexpr double kLook = 0.06, kWork = 1.0;
// As long as it takes to wake a thread that sleeps: for less the caller does all by itself.
constexpr double kWorthWaking = 1e5;

double duration(const PdmeshSampleRow& row, int64_t vocab) {
    return (row.params.temperature > 0.0 || row.wants_logprobs ? kWork : kLook) * static_cast<double>(vocab);
}

// body(row) for all rows, which take `nanoseconds` together.
template <class Body>
void for_each_row(Team& team, int64_t num_rows, double nanoseconds, Body&& body) {
    if (num_rows == 1 || nanoseconds < kWorthWaking) {
        for (int64_t row = 0; row < num_rows; row++) body(row);
        return;
    }
    team.run([&](int) {
        for (int64_t row = team.take(); row < num_rows; row = team.take()) body(row);
    });
}

}  // namespace
}  // namespace pdmesh::sampling

namespace pdmesh {

void sample_rows(Team& team, const float* logits, int64_t num_rows, int64_t vocab, const PdmeshSampleRow* rows,
                 const PdmeshSampleOutput& out) {
    double nanoseconds = 0;
    for (int64_t row = 0; row < num_rows; row++) nanoseconds += sampling::duration(rows[row], vocab);
    sampling::for_each_row(team, num_rows, nanoseconds,
                           [&](int64_t row) { sampling::sample_row(logits, vocab, row, rows[row], out); });
}

void argmax_rows(Team& team, const float* logits, int64_t num_rows, int64_t vocab, int64_t* tokens) {
    const double nanoseconds = sampling::kLook * static_cast<double>(num_rows * vocab);
    sampling::for_each_row(team, num_rows, nanoseconds, [&](int64_t row) {
        const float* x = logits + row * vocab;
        tokens[row] = sampling::is_sound(x, vocab) ? sampling::argmax(sampling::scan(x, vocab, sampling::scratch().columns)) : kNoToken;
    });
}

}  // namespace pdmesh

extern "C" {

// Null when the system refuses the threads.
void* pdmesh_team_create(int32_t num_threads, int32_t spin_us) {
    try {
        return new pdmesh::Team(num_threads, spin_us);
    } catch (const std::exception&) {
        return nullptr;
    }
}

void pdmesh_team_destroy(void* team) { delete static_cast<pdmesh::Team*>(team); }

// For the caller to compare: structs are mirrored by hand.
int64_t pdmesh_sample_row_bytes() { return sizeof(PdmeshSampleRow); }

// 0, or 1 without memory.
int32_t pdmesh_sample(void* team, const float* logits, int64_t num_rows, int64_t vocab, const PdmeshSampleRow* rows,
                      const PdmeshSampleOutput* out) {
    try {
        pdmesh::sample_rows(*static_cast<pdmesh::Team*>(team), logits, num_rows, vocab, rows, *out);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

void pdmesh_argmax(void* team, const float* logits, int64_t num_rows, int64_t vocab, int64_t* tokens) {
    pdmesh::argmax_rows(*static_cast<pdmesh::Team*>(team), logits, num_rows, vocab, tokens);
}

// For tests. The random bits of tokens 0 .. count - 1, and their noise.
void pdmesh_sample_noise(uint64_t seed, int64_t choice, int64_t index, int64_t count, uint32_t* bits, float* noise) {
    const auto keys = pdmesh::sampling::noise_keys(seed, choice, index);
    for (int64_t i = 0; i < count; i++) {
        bits[i] = pdmesh::sampling::noise_bits(keys, static_cast<uint64_t>(i));
        noise[i] = pdmesh::sampling::gumbel(pdmesh::sampling::uniform(bits[i]));
    }
}

// For tests. The tokens of one row that can be drawn with a temperature, into tokens [vocab]; how many they are.
int64_t pdmesh_sample_candidates(const float* logits, int64_t vocab, const PdmeshSampleRow* row, int64_t* tokens) {
    using namespace pdmesh::sampling;
    Scratch& own = scratch();
    select(scan(adjusted(logits, vocab, *row, own), vocab, own.columns), row->params, own.sorted, own.candidates);
    return std::copy_n(own.candidates.ids.data(), own.candidates.count, tokens) - tokens;
}

}
