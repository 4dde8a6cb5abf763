// A mixture of experts: which experts a token takes and what they count (pdmesh/engine/models/experts.py, `route`), and rows of tokens
// grouped by expert, so that an expert's rows are one product.
#pragma once

#include <algorithm>
#include <vector>

#include "abi.h"
#include "activations.h"
#include "gemm.h"

namespace pdmesh {

// Scores of all experts by their logits, padded with -infinity to whole vectors.
inline void softmax(float* x, int padded) {
    F most = f_load(x);
    for (int i = kPanel; i < padded; i += kPanel) most = f_max(most, f_load(x + i));
    const F peak = f_set(f_hmax(most));
    F total = f_zero();
    for (int i = 0; i < padded; i += kPanel) {
        const F share = f_exp(f_load(x + i) - peak);
        total = total + share;
        f_store(x + i, share);
    }
    const F sum = f_set(f_sum(total));
    for (int i = 0; i < padded; i += kPanel) f_store(x + i, f_load(x + i) / sum);
}

// The index of the largest, the lowest among equals.
inline int best_of(const float* x, int count) {
    int best = 0;
    for (int i = 1; i < count; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

class Router {
  public:
    void reserve(const PdmeshExperts& experts) {
        for (auto* numbers : {&own_, &ranked_, &near_}) numbers->reserve(round_up(std::max(experts.num_experts, experts.top_k), kPanel));
        groups_.reserve(experts.num_groups);
        eligible_.reserve(experts.num_groups);
    }

    // Numbers and scores of the experts that one token takes, best first: logits [num_experts] -> [top_k] each.
    void route(const PdmeshExperts& experts, const float* logits, int32_t* chosen, float* scores) {
        const int padded = round_up(experts.num_experts, kPanel);
        own_.assign(padded, kLowest);
        std::copy_n(logits, experts.num_experts, own_.begin());
        if (experts.scoring == kSparseMixer) return mix(experts, chosen, scores);
        if (experts.scoring == kSoftmax) softmax(own_.data(), padded);
        if (experts.scoring == kSigmoid)
            for (int i = 0; i < padded; i += kPanel) f_store(&own_[i], sigmoid(f_load(&own_[i])));
        ranked_.assign(own_.begin(), own_.begin() + experts.num_experts);
        if (experts.correction)
            for (int i = 0; i < experts.num_experts; i++) ranked_[i] += experts.correction[i];
        if (experts.num_groups > 1) drop_groups(experts);
        for (int k = 0; k < experts.top_k; k++) {
            chosen[k] = best_of(ranked_.data(), experts.num_experts);
            scores[k] = own_[chosen[k]];
            ranked_[chosen[k]] = kLowest;
        }
        weigh(experts, scores);
    }

  private:
    void weigh(const PdmeshExperts& experts, float* scores) {
        if (experts.scoring == kSoftmaxOfBest) {
            own_.assign(round_up(experts.top_k, kPanel), kLowest);
            std::copy_n(scores, experts.top_k, own_.begin());
            softmax(own_.data(), static_cast<int>(own_.size()));
            std::copy_n(own_.begin(), experts.top_k, scores);
        } else if (experts.scoring == kSigmoidOfBest) {
            own_.assign(round_up(experts.top_k, kPanel), 0.0f);
            std::copy_n(scores, experts.top_k, own_.begin());
            for (size_t i = 0; i < own_.size(); i += kPanel) f_store(&own_[i], sigmoid(f_load(&own_[i])));
            std::copy_n(own_.begin(), experts.top_k, scores);
        } else if (experts.normalizes) {
            float sum = 0;
            for (int k = 0; k < experts.top_k; k++) sum += scores[k];
            if (experts.scoring == kSigmoid) sum += 1e-20f;
            for (int k = 0; k < experts.top_k; k++) scores[k] /= sum;
        }
        for (int k = 0; k < experts.top_k; k++) scores[k] *= experts.scale;
    }

    // Only experts of the best groups stay eligible (DeepSeek-V2, 2024, section 2.1).
    void drop_groups(const PdmeshExperts& experts) {
        const int width = experts.num_experts / experts.num_groups;
        groups_.resize(experts.num_groups);
        for (int g = 0; g < experts.num_groups; g++) groups_[g] = rank_of(&ranked_[g * width], width, experts.ranks_by_two);
        eligible_.assign(experts.num_groups, 0);
        for (int k = 0; k < experts.top_groups; k++) {
            const int best = best_of(groups_.data(), experts.num_groups);
            eligible_[best] = 1;
            groups_[best] = kLowest;
        }
        for (int g = 0; g < experts.num_groups; g++)
            if (!eligible_[g]) std::fill_n(&ranked_[g * width], width, kLowest);
    }

    static float rank_of(const float* x, int count, bool by_two) {
        const int best = best_of(x, count);
        if (!by_two || count < 2) return x[best];
        float second = kLowest;
        for (int i = 0; i < count; i++)
            if (i != best) second = std::max(second, x[i]);
        return x[best] + second;
    }

    // Two experts one after the other, each weighed against those near it (Liu et al., GRIN, 2024). `own_` holds logits.
    void mix(const PdmeshExperts& experts, int32_t* chosen, float* scores) {
        ranked_ = own_;
        for (int k = 0; k < 2; k++) {
            chosen[k] = best_of(ranked_.data(), experts.num_experts);
            const float best = ranked_[chosen[k]];
            near_.assign(own_.size(), kLowest);
            for (int i = 0; i < experts.num_experts; i++)
                if ((best - own_[i]) / std::max(__builtin_fabsf(own_[i]), best) <= 2 * experts.jitter) near_[i] = ranked_[i];
            softmax(near_.data(), static_cast<int>(near_.size()));
            scores[k] = near_[chosen[k]];
            ranked_[chosen[k]] = kLowest;
        }
    }

    static constexpr float kLowest = -__builtin_inff();
    std::vector<float> own_, ranked_, groups_, near_;
    std::vector<uint8_t> eligible_;
};

// Tokens and their experts. A pair is one token with one of its experts; pairs in the order of the experts' numbers are the rows of
// the experts' products.
class ExpertPairs {
  public:
    void reserve(const PdmeshExperts& experts, int num_rows) {
        gate_up.reserve(experts.num_experts);
        down.reserve(experts.num_experts);
        starts_.reserve(experts.num_experts + 1);
        const size_t count = static_cast<size_t>(num_rows) * experts.top_k;
        if (count <= chosen.size()) return;
        chosen.resize(count);
        scores.resize(count);
        row_scores.resize(count);
        places.resize(count);
        tokens.resize(count);
    }

    // After `chosen` and `scores` of [num_rows][top_k] are written.
    void group(const PdmeshExperts& experts, int num_rows) {
        const int top_k = experts.top_k;
        starts_.assign(experts.num_experts + 1, 0);
        num_pairs = num_rows * top_k;
        for (int p = 0; p < num_pairs; p++) starts_[chosen[p] + 1]++;
        gate_up.clear();
        down.clear();
        for (int e = 0; e < experts.num_experts; e++) {
            const int count = starts_[e + 1];
            experts.counts[e] += count;
            if (count) gate_up.push_back({&experts.experts[e].gate_up, starts_[e], count});
            if (count) down.push_back({&experts.experts[e].down, starts_[e], count});
            starts_[e + 1] += starts_[e];
        }
        for (int p = 0; p < num_pairs; p++) {
            places[p] = starts_[chosen[p]]++;
            tokens[places[p]] = p / top_k;
            row_scores[places[p]] = scores[p];
        }
        for (int r = 0; r < num_rows; r++) sort_by_expert(r * top_k, top_k);
    }

    std::vector<int32_t> chosen, places, tokens;  // places: of pair [row][k] among the products' rows; tokens: of those
    std::vector<float> scores, row_scores;  // the latter: of the products' rows
    std::vector<RowGroup> gate_up, down;
    int num_pairs = 0;

  private:
    // A token's contributions are added in the order of its experts' numbers.
    void sort_by_expert(int first, int count) {
        for (int i = first + 1; i < first + count; i++)
            for (int j = i; j > first && chosen[j] < chosen[j - 1]; j--) {
                std::swap(chosen[j], chosen[j - 1]);
                std::swap(places[j], places[j - 1]);
                std::swap(scores[j], scores[j - 1]);
            }
    }
    std::vector<int32_t> starts_;
};

}  // namespace pdmesh
