// Made from pdmesh/sampling_params.py by `make stubs`; what the fields mean stands there.
#pragma once

#include <cstdint>

// What a request asks of the sampler. Numbers are double, as in Python: rules round them where torch does.
struct PdmeshSamplingParams {
    double temperature;
    int64_t top_k;
    double top_p;
    double min_p;
    double repetition_penalty;
    double presence_penalty;
    double frequency_penalty;
    uint64_t seed;
};
