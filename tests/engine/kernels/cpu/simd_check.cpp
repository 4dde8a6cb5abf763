// Every function of simd.h by name, on arrays, for test_simd.py. No part of the library. A program has main().
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "simd.h"

using namespace pdmesh;

namespace {

// Where one block of each operand and of the result lies.
struct Block {
    const uint8_t *a, *b, *c;
    uint8_t* out;
};

F floats(const uint8_t* p) { return f_load(reinterpret_cast<const float*>(p)); }
const uint16_t* words(const uint8_t* p) { return reinterpret_cast<const uint16_t*>(p); }
const int8_t* bytes(const uint8_t* p) { return reinterpret_cast<const int8_t*>(p); }
template <class Number>
Number number(const uint8_t* p) {
    Number x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
void put(const Block& x, F result) { f_store(reinterpret_cast<float*>(x.out), result); }
void put(const Block& x, I result) { i_store(x.out, result); }
template <class Number>
void put(const Block& x, Number result) {
    std::memcpy(x.out, &result, sizeof result);
}
// Lane i: the sum of p[4i .. 4i+3].
I sums_of_4(const uint8_t* p) {
    int32_t sums[16] = {};
    for (int i = 0; i < 64; i++) sums[i / 4] += bytes(p)[i];
    return i_load(sums);
}

struct Operation {
    const char* name;
    void (*run)(const Block& x);
};

const Operation kOperations[] = {
    {"f_zero", [](const Block& x) { put(x, f_zero()); }},
    {"f_set", [](const Block& x) { put(x, f_set(number<float>(x.a))); }},
    {"f_load", [](const Block& x) { put(x, floats(x.a)); }},
    {"add", [](const Block& x) { put(x, floats(x.a) + floats(x.b)); }},
    {"subtract", [](const Block& x) { put(x, floats(x.a) - floats(x.b)); }},
    {"multiply", [](const Block& x) { put(x, floats(x.a) * floats(x.b)); }},
    {"divide", [](const Block& x) { put(x, floats(x.a) / floats(x.b)); }},
    {"f_fma", [](const Block& x) { put(x, f_fma(floats(x.a), floats(x.b), floats(x.c))); }},
    {"f_max", [](const Block& x) { put(x, f_max(floats(x.a), floats(x.b))); }},
    {"f_min", [](const Block& x) { put(x, f_min(floats(x.a), floats(x.b))); }},
    {"f_abs", [](const Block& x) { put(x, f_abs(floats(x.a))); }},
    {"f_round", [](const Block& x) { put(x, f_round(floats(x.a))); }},
    {"f_scale2", [](const Block& x) { put(x, f_scale2(floats(x.a), floats(x.b))); }},
    {"f_exp2", [](const Block& x) { put(x, f_exp2(floats(x.a))); }},
    {"f_sum", [](const Block& x) { put(x, f_sum(floats(x.a))); }},
    {"f_hmax", [](const Block& x) { put(x, f_hmax(floats(x.a))); }},
    {"f_first", [](const Block& x) { put(x, f_first(floats(x.a), number<int>(x.b), number<float>(x.c))); }},
    {"f_from_lane", [](const Block& x) { put(x, f_from_lane(floats(x.a), number<int>(x.b), number<float>(x.c))); }},
    {"f_from", [](const Block& x) { put(x, f_from(i_load(x.a))); }},
    {"f_bits", [](const Block& x) { put(x, f_bits(i_load(x.a))); }},
    {"f_load_bf16", [](const Block& x) { put(x, f_load_bf16(words(x.a))); }},
    {"f_load_f16", [](const Block& x) { put(x, f_load_f16(words(x.a))); }},
    {"f_store_bf16", [](const Block& x) { f_store_bf16(reinterpret_cast<uint16_t*>(x.out), floats(x.a)); }},
    {"f_store_i8", [](const Block& x) { f_store_i8(reinterpret_cast<int8_t*>(x.out), floats(x.a)); }},
    {"f_store_i16", [](const Block& x) { f_store_i16(reinterpret_cast<int16_t*>(x.out), floats(x.a)); }},
    {"i_zero", [](const Block& x) { put(x, i_zero()); }},
    {"i_load", [](const Block& x) { put(x, i_load(x.a)); }},
    {"i_broadcast", [](const Block& x) { put(x, i_broadcast(x.a)); }},
    {"i_low_nibbles", [](const Block& x) { put(x, i_low_nibbles(i_load(x.a))); }},
    {"i_high_nibbles", [](const Block& x) { put(x, i_high_nibbles(i_load(x.a))); }},
    {"i_minus_128_times", [](const Block& x) { put(x, i_minus_128_times(i_load(x.a), i_load(x.b))); }},
    {"dot_u8s8", [](const Block& x) { put(x, dot_u8s8(i_load(x.a), i_load(x.b), i_load(x.c))); }},
    {"dot_bf16", [](const Block& x) { put(x, dot_bf16(floats(x.a), i_load(x.b), i_load(x.c))); }},
    {"bf16_from_i8", [](const Block& x) { put(x, bf16_from_i8(bytes(x.a))); }},
    {"dot_words", [](const Block& x) { put(x, dot_words(i_load(x.a), words_from_i8(bytes(x.b)), i_broadcast(x.c))); }},
    {"dot_weights", [](const Block& x) { put(x, i_products(dot_weights(i_load(x.a), i_weights(x.b), i_load(x.c)), sums_of_4(x.c))); }},
    {"dot_nibbles", [](const Block& x) {  // as many as may go to one part, but no more than 4 units
         const int count = 2 * (kNibbleSteps < 4 ? kNibbleSteps : 4);
         I part = i_zero();
         for (int i = 0; i < count; i++) part = dot_nibbles(part, i_load(x.b), i_load(x.c));
         put(x, i_add_nibbles(i_load(x.a), part));
     }},
    {"f_equal_mask", [](const Block& x) { put(x, f_equal_mask(floats(x.a), floats(x.b))); }},
    {"f_maxima_of_4", [](const Block& x) { put(x, f_maxima_of_4(reinterpret_cast<const float*>(x.a))); }},
    {"f_store_first", [](const Block& x) { f_store_first(reinterpret_cast<float*>(x.out), floats(x.a), number<int>(x.b)); }},
};

}  // namespace

// Applies the function `name` to `num_blocks` blocks. strides: bytes from one block to the next of a, b, c and out.
// Returns 0, or 1 when there is no such function.
extern "C" int simd_check(const char* name, const uint8_t* a, const uint8_t* b, const uint8_t* c, uint8_t* out,
                          const int64_t* strides, int64_t num_blocks) {
    for (const Operation& operation : kOperations) {
        if (std::strcmp(operation.name, name)) continue;
        for (int64_t i = 0; i < num_blocks; i++) {
            operation.run({a + i * strides[0], b + i * strides[1], c + i * strides[2], out + i * strides[3]});
        }
        prefetch(out);
        return 0;
    }
    return 1;
}

// For an emulator: simd_check NAME BLOCKS STRIDE STRIDE STRIDE STRIDE, the operands one after the other on stdin, the result on stdout.
int main(int count, char** arguments) {
    if (count != 7) return 2;
    const int64_t num_blocks = std::atoll(arguments[2]);
    int64_t strides[4];
    std::vector<uint8_t> memory[4];
    uint8_t* at[4];
    for (int i = 0; i < 4; i++) {
        strides[i] = std::atoll(arguments[3 + i]);
        const size_t size = static_cast<size_t>(strides[i] * num_blocks);
        memory[i].resize(size + 4);
        at[i] = memory[i].data() + 4;  // callers promise no alignment beyond that of one number
        if (i < 3 && std::fread(at[i], 1, size, stdin) != size) return 2;
    }
    const int result = simd_check(arguments[1], at[0], at[1], at[2], at[3], strides, num_blocks);
    std::fwrite(at[3], 1, static_cast<size_t>(strides[3] * num_blocks), stdout);
    return result;
}
