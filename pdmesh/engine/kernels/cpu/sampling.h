// Drawing the tokens of one step, all rows in one call. The meaning of every rule is that of pdmesh/engine/sampling/sampler.py;
// pdmesh/engine/kernels/cpu/sampling.py mirrors the structs.
#pragma once

#include <cstdint>

#include "parallel.h"
#include "sampling_params.h"

extern "C" {

// What one row of logits is for. All memory stays the caller's and is only read.
struct PdmeshSampleRow {
    PdmeshSamplingParams params;
    int64_t choice, index;
    const int64_t* prompt;     // [num_prompt], for the repetition penalty; ids outside the vocabulary are ignored
    const int64_t* output;     // [num_output], for all penalties
    const int64_t* forbidden;  // [num_forbidden]: tokens that cannot be drawn now
    const uint32_t* allowed;   // [ceil(V / 32)], a bit for each token: no other can be drawn; null: all can
    const int64_t* biased;     // [num_biased]: different tokens
    const float* bias;         // [num_biased]: what is added to their logits
    int64_t num_prompt, num_output, num_forbidden, num_biased;
    int32_t num_logprobs;  // how many of the likeliest tokens are reported beside the chosen one
    int32_t wants_logprobs;
};

// `stride` numbers of top_ids and top_logprobs belong to each row; the first top_counts[row] of them are written, the likeliest
// first, lowest id first among equals. Where no row wants log-probabilities all but `tokens` may be null.
struct PdmeshSampleOutput {
    int64_t* tokens;    // [R]
    float* chosen;      // [R]: log-probability of the token
    int64_t* top_ids;   // [R][stride]
    float* top_logprobs;
    int32_t* top_counts;  // [R]
    int64_t stride;
};

}

namespace pdmesh {

constexpr int64_t kNoToken = -1;  // NO_TOKEN of pdmesh/engine/sampling/sampler.py

// logits [R][V], not changed. A row's token depends on its logits and its PdmeshSampleRow alone: neither on the other rows nor on
// the size of the team. Logits with NaN or infinity, or with -inf alone, give kNoToken; where no token is allowed, some id.
// Called outside of the team's regions; memory is kept for the next call by each of its threads.
void sample_rows(Team& team, const float* logits, int64_t num_rows, int64_t vocab, const PdmeshSampleRow* rows,
                 const PdmeshSampleOutput& out);

// Greedy, from the logits as they are: the lowest id among the highest.
void argmax_rows(Team& team, const float* logits, int64_t num_rows, int64_t vocab, int64_t* tokens);

}  // namespace pdmesh
