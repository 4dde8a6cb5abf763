// The kernels on seeded inputs, for test_kernels_tiers.py: a program, since Python does not run in the emulator. It prints lines
//
//     check NAME ERROR BOUND     the largest error against a computation in double precision (exact, where BOUND is 0), and what it may be
//     exact NAME BITS            a hash of results that all tiers share
//     bits NAME BITS             of results that depend on whether the tier fuses multiplications and additions
//     bf16 NAME BITS             the same with products of bf16 pairs, for which some processors have instructions that round otherwise
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "adapters.h"
#include "attention_stage.h"
#include "gemm.h"
#include "rows.h"
#include "sampling.h"

using namespace pdmesh;

namespace {

struct Random {
    uint64_t state;
    uint64_t next() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return (state ^ state >> 31) >> 16;
    }
    int integer(int low, int high) { return low + static_cast<int>(next() % (high - low + 1)); }
    float number() { return static_cast<float>(integer(-10000, 10000)) / 4096.0f; }
};

void check(const std::string& name, double error, double bound) { std::printf("check %s %.9g %.9g\n", name.c_str(), error, bound); }
template <class Number>
void bits(const char* kind, const std::string& name, const std::vector<Number>& x) {
    uint64_t hash = 14695981039346656037u;
    const auto* bytes = reinterpret_cast<const uint8_t*>(x.data());
    for (size_t i = 0; i < x.size() * sizeof(Number); i++) hash = (hash ^ bytes[i]) * 1099511628211u;
    std::printf("%s %s %016" PRIx64 "\n", kind, name.c_str(), hash);
}
template <class Number>
bool is_same(const Number* a, const Number* b, size_t count) {
    return !std::memcmp(a, b, count * sizeof(Number));
}
float from_bf16(uint16_t x) {
    const uint32_t wide = static_cast<uint32_t>(x) << 16;
    float result;
    std::memcpy(&result, &wide, 4);
    return result;
}
float rounded(float x) { return from_bf16(to_bf16(x)); }

// Zeros that end where the process may not read: what reads beyond them ends it.
struct Guarded {
    uint8_t* begin = nullptr;
    uint8_t* reserve(size_t bytes) {
        const size_t page = sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
        void* memory = mmap(nullptr, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED || mprotect(static_cast<uint8_t*>(memory) + whole, page, PROT_NONE) != 0) std::abort();
        return begin = static_cast<uint8_t*>(memory) + whole - bytes;  // for as long as the program runs
    }
    uint8_t* get() const { return begin; }
};

// ---- products --------------------------------------------------------------------------------------------------------------

constexpr int kInputs = 320,  // more than a block of what gemm_words.h widens
              kOutputs = 7 * kPanel, kRows = 41;

// Weights and rows of one format, and what each output is: an exact number, and the sum of the magnitudes of what it adds up.
struct Product {
    Guarded weights, data;
    std::vector<float> scales, row_scales;
    std::vector<int32_t> sums;
    std::vector<Outliers> outliers;
    PdmeshLinear linear;
    Rows rows;
    std::vector<double> expected, size;

    // `group`: inputs of an int4 group.
    Product(int32_t format, int group, Random random)
        : scales(kOutputs, 1.0f), row_scales(kRows * kInputs / group, 1.0f), sums(row_scales.size()), outliers(kRows),
          expected(kRows * kOutputs), size(expected.size()) {
        linear = {format, kOutputs, kInputs, format == kInt4 ? group : 0, weights.reserve(weight_bytes(format, group)), scales.data(), nullptr};
        const int units = format == kWideBFloat16 ? kInputs : row_units(linear);
        rows = {data.reserve((kRows + kSpareRows) * static_cast<size_t>(units) * 4), static_cast<size_t>(units) * 4, units, row_scales.data(), sums.data(), num_groups(linear), outliers.data()};
        if (format == kInt8) fill_int8(random);
        else if (format == kInt4) fill_int4(random);
        else fill_floats(random, format);
    }

    static size_t weight_bytes(int32_t format, int group) {
        if (format == kInt4) return static_cast<size_t>(kOutputs / kPanel) * kInputs / group * (group / 8 * kUnit + kUnit);
        return static_cast<size_t>(kOutputs) * kInputs * (format == kFloat32 ? 4 : format == kInt8 ? 1 : 2);
    }

    void add(int row, int output, double w, double a) {
        expected[row * kOutputs + output] += w * a;
        size[row * kOutputs + output] += std::abs(w * a);
    }

    void fill_floats(Random& random, int32_t format) {
        const bool is_wide = format != kFloat32, is_wide_row = format != kBFloat16;
        std::vector<float> w(kOutputs * kInputs), a(kRows * kInputs);
        for (float& x : w) x = is_wide ? rounded(random.number()) : random.number();
        for (float& x : a) x = is_wide_row ? random.number() : rounded(random.number());
        const int pair = format == kBFloat16 ? 2 : 1;
        for (int n = 0; n < kOutputs; n++)
            for (int k = 0; k < kInputs; k++) {
                const size_t at = (static_cast<size_t>(n / kPanel) * kInputs / pair + k / pair) * kPanel * pair + n % kPanel * pair + k % pair;
                if (is_wide) reinterpret_cast<uint16_t*>(weights.get())[at] = to_bf16(w[n * kInputs + k]);
                else reinterpret_cast<float*>(weights.get())[at] = w[n * kInputs + k];
            }
        for (int i = 0; i < kRows * kInputs; i++) {
            if (is_wide_row) reinterpret_cast<float*>(data.get())[i] = a[i];
            else reinterpret_cast<uint16_t*>(data.get())[i] = to_bf16(a[i]);
        }
        for (int r = 0; r < kRows; r++)
            for (int n = 0; n < kOutputs; n++)
                for (int k = 0; k < kInputs; k++) add(r, n, w[n * kInputs + k], a[r * kInputs + k]);
    }

    // Numbers of int8 rows: the first two have the largest sums.
    static int8_t activation(Random& random, int row) {
        return static_cast<int8_t>(row < 2 ? 127 - 254 * row : random.integer(0, 9) ? random.integer(-127, 127) : 127);
    }

    // Scales that are powers of two leave all sums exact. The first two panels have the smallest and the largest weights.
    void fill_int8(Random& random) {
        for (int i = 0; i < kOutputs * kInputs; i++) weights.get()[i] = static_cast<uint8_t>(i < 2 * kPanel * kInputs ? i / (kPanel * kInputs) * 255 : random.integer(0, 255));
        auto* bytes = reinterpret_cast<int8_t*>(data.get());
        for (int r = 0; r < kRows; r++) {
            sums[r] = 0;
            for (int k = 0; k < kInputs; k++) sums[r] += bytes[r * kInputs + k] = activation(random, r);
            outliers[r].scale = 16.0f;
            outliers[r].sum = 0;
            auto* excess = reinterpret_cast<int8_t*>(outliers[r].excess);
            for (int i = 0; i < kOutliers * 4; i++) outliers[r].sum += excess[i] = static_cast<int8_t>(random.integer(-127, 127));
            for (int t = 0; t < kOutliers; t++) outliers[r].unit[t] = random.integer(0, kInputs / 4 - 1);
            for (int n = 0; n < kOutputs; n++) {
                const auto weight = [&](int k) { return weights.get()[(n / kPanel * kInputs / 4 + k / 4) * kUnit + n % kPanel * 4 + k % 4] - 128; };
                for (int k = 0; k < kInputs; k++) add(r, n, weight(k), bytes[r * kInputs + k]);
                for (int i = 0; i < kOutliers * 4; i++) add(r, n, weight(outliers[r].unit[i / 4] * 4 + i % 4), excess[i] * 16.0);
            }
        }
    }

    void fill_int4(Random& random) {
        static constexpr uint16_t kScales[] = {0x3c00, 0x4000, 0x3800}, kMinimums[] = {0xc800, 0xbc00, 0x4200};
        static constexpr double kScaleOf[] = {1, 2, 0.5}, kMinimumOf[] = {-8, -1, 3};
        const int size = linear.group, groups = kInputs / size, value_bytes = size / 8 * kUnit, group_bytes = value_bytes + kUnit;
        auto* bytes = reinterpret_cast<int8_t*>(data.get());
        for (int r = 0; r < kRows; r++)
            for (int k = 0; k < kInputs; k++) sums[r * groups + k / size] += bytes[r * kInputs + k] = activation(random, r);
        for (int panel = 0; panel < kOutputs / kPanel; panel++)
            for (int g = 0; g < groups; g++) {
                uint8_t* group = weights.get() + (panel * groups + g) * group_bytes;
                auto* halves = reinterpret_cast<uint16_t*>(group + value_bytes);
                for (int i = 0; i < value_bytes; i++) group[i] = static_cast<uint8_t>(panel ? random.integer(0, 255) : 255);
                for (int i = 0; i < kPanel; i++) {
                    const int s = random.integer(0, 2), m = random.integer(0, 2), n = panel * kPanel + i;
                    halves[i] = kScales[s];
                    halves[kPanel + i] = kMinimums[m];
                    for (int k = 0; k < size; k++) {
                        const int nibble = group[k / 8 * kUnit + i * 4 + k % 4] >> (k % 8 / 4 * 4) & 15;
                        for (int r = 0; r < kRows; r++) add(r, n, nibble * kScaleOf[s] + kMinimumOf[m], bytes[r * kInputs + g * size + k]);
                    }
                }
            }
    }

    // Rows [begin, end), the others untouched.
    void compute(int begin, int end, std::vector<float>& out) const {
        if (linear.format == kWideBFloat16) {
            std::vector<int32_t> order(kRows);
            for (int r = 0; r < kRows; r++) order[r] = r;
            thin_panels<DotWideBFloat16>({&linear, rows, begin, end, 0, kOutputs / kPanel, 0, 1}, nullptr, AddedAt{out.data(), kOutputs, order.data(), 0, 1});
        } else {
            emit_panels(linear, rows, begin, end, 0, kOutputs / kPanel, Emitted{out.data(), kOutputs, kOutputs});
        }
    }
};

void check_products(const std::string& name, int32_t format, const char* kind, double bound, int group = kInputs) {
    [[maybe_unused]] const TileSession tiles;
    const Product product(format, group, Random{static_cast<uint64_t>(format) + 1});
    std::vector<float> all(kRows * kOutputs);
    product.compute(0, kRows, all);
    double error = 0;
    for (size_t i = 0; i < all.size(); i++) error = std::max(error, std::abs(all[i] - product.expected[i]) / std::max(product.size[i], 1e-30));
    check("product_" + name, error, bound);
    bits(kind, "product_" + name, all);
    int differences = 0;
    for (int count = 1; count <= 13; count++)
        for (int first = 0; first + count <= kRows; first += count) {
            std::vector<float> some(all.size());
            product.compute(first, first + count, some);
            differences += !is_same(&some[first * kOutputs], &all[first * kOutputs], static_cast<size_t>(count) * kOutputs);
        }
    check("company_" + name, differences, 0);
}

// ---- rows ------------------------------------------------------------------------------------------------------------------

void check_rows() {
    constexpr int width = 100, padded = 112;
    Random random{77};
    std::vector<float> x(padded), weight(padded), scratch(2 * padded + 16), out(padded);
    for (int i = 0; i < width; i++) x[i] = random.number(), weight[i] = random.number();
    x[17] = 90.0f, x[63] = -50.0f;  // outliers
    for (const auto& [name, kind] : {std::pair("rms", kRootMeanSquare), std::pair("layer", kLayerNorm)}) {
        const PdmeshNorm norm{weight.data(), kind == kLayerNorm ? weight.data() : nullptr, 1e-5f, kind};
        norm_row(norm, x.data(), width, out.data());
        double mean = 0, squares = 0, error = 0;
        for (int i = 0; i < width; i++) mean += kind == kLayerNorm ? static_cast<double>(x[i]) / width : 0;
        for (int i = 0; i < width; i++) squares += (x[i] - mean) * (x[i] - mean) / width;
        for (int i = 0; i < width; i++)
            error = std::max(error, std::abs(out[i] - ((x[i] - mean) / std::sqrt(squares + 1e-5) * weight[i] + (norm.bias ? weight[i] : 0))));
        check(std::string("norm_") + name, error, 2e-5);
        bits("bits", std::string("norm_") + name, out);
    }
    for (const auto& [name, format] : {std::pair("bfloat16", kBFloat16), std::pair("int8", kInt8), std::pair("int4", kInt4)}) {
        const int k = format == kInt4 ? 96 : width;
        const PdmeshLinear linear{format, 16, k, format == kInt4 ? 32 : 0, nullptr, nullptr, nullptr};
        RowBuffer buffer;
        buffer.reserve(linear, 1);
        Rows rows = buffer.view(linear);
        prepare_row(linear, x.data(), {}, scratch.data(), rows, 0);
        std::vector<uint8_t> data(rows.data, rows.data + rows.units * 4);
        bits("exact", std::string("rows_") + name, data);
        if (format == kBFloat16) continue;
        std::vector<double> back(padded);
        const auto* bytes = reinterpret_cast<const int8_t*>(rows.data);
        int sum = 0, told = 0;
        for (int i = 0; i < k; i++) back[i] = bytes[i] * static_cast<double>(rows.scales[format == kInt4 ? i / 32 : 0]), sum += bytes[i];
        for (int g = 0; g < rows.num_groups; g++) told += rows.sums[g];
        check(std::string("rows_sum_") + name, std::abs(sum - told), 0);
        for (int i = 0; format == kInt8 && i < kOutliers * 4; i++)
            back[rows.outliers->unit[i / 4] * 4 + i % 4] += rows.outliers->scale * static_cast<double>(reinterpret_cast<const int8_t*>(rows.outliers->excess)[i]);
        double error = 0;  // in steps of the coarsest scale
        const double step = format == kInt8 ? std::max(rows.scales[0], rows.outliers->scale) : *std::max_element(rows.scales, rows.scales + rows.num_groups);
        for (int i = 0; i < k; i++) error = std::max(error, std::abs(back[i] - x[i]) / step);
        check(std::string("rows_back_") + name, error, format == kInt8 ? 1.001 : 0.501);
    }
    const std::pair<const char*, double (*)(double)> functions[] = {
        {"silu", [](double v) { return v / (1 + std::exp(-v)); }},
        {"gelu", [](double v) { return v * 0.5 * (1 + std::erf(v / std::sqrt(2.0))); }},
        {"gelu_tanh", [](double v) { return v * 0.5 * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v))); }},
    };
    for (int kind = 0; kind < 3; kind++) {
        std::vector<float> y(4096);
        double error = 0;
        for (int i = 0; i < 4096; i += 16) {
            float lanes[16];
            for (int j = 0; j < 16; j++) lanes[j] = random.number() * (i % 5 + 1);
            f_store(&y[i], activate(kind, f_load(lanes)));
            for (int j = 0; j < 16; j++) error = std::max(error, std::abs(y[i + j] - functions[kind].second(lanes[j])) / (1 + std::abs(lanes[j])));
        }
        check(functions[kind].first, error, 1e-6);
        bits("bits", functions[kind].first, y);
    }
}

// ---- attention -------------------------------------------------------------------------------------------------------------

constexpr int kHeads = 2, kGroups = 3, kDim = 48, kBlock = 32, kBlocks = 64;
struct Sequence {
    int context, queries;
};
const std::vector<Sequence> kSequences = {{5, 1}, {129, 3}, {300, 40}, {260, 1}, {17, 17}};

// Keys, values and queries of a sequence follow from its number. Queries hold exponents of 2 already.
struct Attention {
    int32_t format;
    std::vector<int> chosen;
    std::vector<float> keys, values, queries;  // of the sequence at hand, as stored: [head][position][dim]; [token][head][group][dim]

    float stored(float x) const { return format == kFloat32 ? x : rounded(x); }
    void make(int number) {
        Random random{static_cast<uint64_t>(number) * 1000 + 5};
        const auto [context, count] = kSequences[number];
        keys.resize(kHeads * context * kDim), values.resize(keys.size()), queries.resize(count * kHeads * kGroups * kDim);
        for (float& x : keys) x = stored(random.number());
        for (float& x : values) x = stored(random.number());
        for (float& x : queries) x = stored(random.number() / 8);
    }

    // [token][query head][dim] of all chosen sequences.
    std::vector<float> compute(Team& team) {
        PdmeshLayer layer{};
        AttentionStage stage(team, {kHeads, kDim, kBlock, format, 0, nullptr}, kGroups, false, {kDim, kDim, 0, false});
        std::vector<int32_t> starts{0}, contexts, blocks, block_starts;
        std::vector<int64_t> slots, positions;
        for (const int number : chosen) {
            const auto [context, count] = kSequences[number];
            block_starts.push_back(static_cast<int32_t>(blocks.size()));
            for (int b = 0; b * kBlock < context; b++) blocks.push_back((static_cast<int>(blocks.size()) * 5 + 3) % kBlocks);
            for (int p = context - count; p < context; p++) {
                positions.push_back(p);
                slots.push_back(static_cast<int64_t>(blocks[block_starts.back() + p / kBlock]) * kBlock + p % kBlock);
            }
            starts.push_back(static_cast<int32_t>(positions.size()));
            contexts.push_back(context);
        }
        Buffer<uint8_t> pool;
        KVGeometry kv{kHeads, kDim, kBlock, format, kBlocks, nullptr};
        kv.base = pool.reserve(2 * kBlocks * kv.block_bytes());
        PdmeshStep step{};
        step.num_tokens = starts.back(), step.num_seqs = static_cast<int32_t>(chosen.size());
        step.positions = positions.data(), step.slots = slots.data(), step.query_starts = starts.data(), step.context_lens = contexts.data();
        step.blocks = blocks.data(), step.block_starts = block_starts.data(), step.kv = kv.base, step.num_blocks = kBlocks;
        stage.begin(step);
        for (size_t s = 0; s < chosen.size(); s++) {
            make(chosen[s]);
            const auto [context, count] = kSequences[chosen[s]];
            for (int head = 0; head < kHeads; head++) {
                for (int p = 0; p < context; p++) {
                    const int64_t slot = static_cast<int64_t>(blocks[block_starts[s] + p / kBlock]) * kBlock + p % kBlock;
                    const size_t at = (static_cast<size_t>(head) * context + p) * kDim;
                    write_token(kv, 0, head, slot, p + 1 == context ? kGroup : 0, &keys[at], &values[at]);
                }
                for (int t = 0; t < count; t++)
                    for (int g = 0; g < kGroups; g++)
                        stage.write_query(starts[s] + t, head, g, &queries[static_cast<size_t>((t * kHeads + head) * kGroups + g) * kDim], 1.0f);
            }
        }
        team.run([&](int rank) {
            [[maybe_unused]] const TileSession tiles;
            stage.attend(rank, 0, layer);
        });
        return {stage.attended(), stage.attended() + static_cast<size_t>(step.num_tokens) * stage.attended_stride()};
    }

    // What int8 leaves of numbers [kDim].
    void quantize_like_the_pool(float* x) const {
        if (format != kInt8) return;
        float peak = 0;
        for (int d = 0; d < kDim; d++) peak = std::max(peak, std::abs(x[d]));
        for (int d = 0; d < kDim; d++) x[d] = static_cast<float>(std::rint(static_cast<double>(x[d]) * 127.0f / peak) * (peak / 127.0f));
    }

    double error(int number, const float* actual) {
        make(number);
        const auto [context, count] = kSequences[number];
        for (size_t at = 0; at < keys.size(); at += kDim) quantize_like_the_pool(&keys[at]), quantize_like_the_pool(&values[at]);
        double worst = 0;
        std::vector<double> p(context);
        for (int t = 0; t < count; t++)
            for (int h = 0; h < kHeads * kGroups; h++) {
                const float *q = &queries[(t * kHeads * kGroups + h) * kDim], *k = &keys[static_cast<size_t>(h / kGroups) * context * kDim];
                const float* v = &values[static_cast<size_t>(h / kGroups) * context * kDim];
                const int visible = context - count + t + 1;
                double total = 0;
                for (int i = 0; i < visible; i++) {
                    double score = 0;
                    for (int d = 0; d < kDim; d++) score += static_cast<double>(q[d]) * k[i * kDim + d];
                    total += p[i] = std::exp2(score);
                }
                for (int d = 0; d < kDim; d++) {
                    double sum = 0;
                    for (int i = 0; i < visible; i++) sum += p[i] / total * v[i * kDim + d];
                    worst = std::max(worst, std::abs(sum - actual[(t * kHeads * kGroups + h) * kDim + d]));
                }
            }
        return worst;
    }
};

void check_attention(const std::string& name, int32_t format, const char* kind, double bound) {
    Team one(1, 0), two(2, 0);
    Attention together{format, {0, 1, 2, 3, 4}, {}, {}, {}};
    const std::vector<float> all = together.compute(one);
    bits(kind, "attention_" + name, all);
    check("attention_threads_" + name, together.compute(two) != all, 0);
    double error = 0;
    int differences = 0;
    for (size_t s = 0, at = 0; s < kSequences.size(); at += static_cast<size_t>(kSequences[s++].queries) * kHeads * kGroups * kDim) {
        Attention alone{format, {static_cast<int>(s)}, {}, {}, {}};
        const std::vector<float> own = alone.compute(one);
        differences += !is_same(own.data(), &all[at], own.size());
        error = std::max(error, alone.error(static_cast<int>(s), &all[at]));
    }
    check("attention_" + name, error, bound);
    check("attention_company_" + name, differences, 0);
}

// ---- sampling --------------------------------------------------------------------------------------------------------------

void check_sampling() {
    constexpr int vocab = 1003, rows = 48;
    Random random{11};
    std::vector<float> logits(rows * vocab);
    for (float& x : logits) x = random.number() * 2;
    std::vector<PdmeshSampleRow> asked(rows);
    for (int r = 0; r < rows; r++) {
        asked[r].params = {r % 3 ? 0.5 + r % 4 : 0.0, r % 5 ? 0 : 20, r % 4 ? 1.0 : 0.8, r % 7 ? 0.0 : 0.05, 1.0, 0.0, 0.0, static_cast<uint64_t>(r) * 17};
        asked[r].index = r;
    }
    Team one(1, 0), two(2, 0);
    std::vector<int64_t> all(rows), again(rows), greedy(rows);
    sample_rows(one, logits.data(), rows, vocab, asked.data(), {all.data(), nullptr, nullptr, nullptr, nullptr, 0});
    for (int r = 0; r < rows; r++) sample_rows(two, &logits[r * vocab], 1, vocab, &asked[r], {&again[r], nullptr, nullptr, nullptr, nullptr, 0});
    argmax_rows(two, logits.data(), rows, vocab, greedy.data());
    int wrong = 0;
    for (int r = 0; r < rows; r++) {
        const float* row = &logits[r * vocab];
        const int64_t best = std::max_element(row, row + vocab) - row;
        wrong += greedy[r] != best || (r % 3 == 0 && all[r] != best) || all[r] < 0 || all[r] >= vocab;
        if (r % 5 == 0) wrong += std::count_if(row, row + vocab, [&](float x) { return x > row[all[r]]; }) >= 20;
    }
    check("sampled", wrong, 0);
    check("sampled_company", all != again, 0);
    bits("exact", "sampled", all);
}

}  // namespace

int main() {
#if defined(PDMESH_ISA_AMX)
    if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) return 1;  // as isa.py asks for the tiles
#endif
    check_products("float32", kFloat32, "bits", 3e-7);
    check_products("bfloat16", kBFloat16, "bf16", 3e-7);
    check_products("wide_bfloat16", kWideBFloat16, "bits", 3e-7);
    check_products("int8", kInt8, "exact", 0);
    check_products("int4", kInt4, "exact", 0, 64);
    check_products("int4_of_32", kInt4, "exact", 0, 32);
    check_rows();
    check_attention("float32", kFloat32, "bits", 1e-5);
    check_attention("bfloat16", kBFloat16, "bf16", 0.01);  // probabilities are bfloat16
    check_attention("int8", kInt8, "bits", 0.005);
    check_sampling();
}
