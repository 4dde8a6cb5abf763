// What the machine can do at most, measured with the same instructions as the kernels: read bandwidth and product peaks.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <algorithm>
#include <vector>

#include "parallel.h"
#include "simd.h"
#include "tiles.h"

namespace pdmesh {
namespace {

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Adds products of registers, with what a kernel must do beside (a broadcast for four of them), `rounds` times.
template <class Acc, class Load, class Dot>
void dots(int rounds, Acc zero, Load load, Dot dot, volatile float* sink) {
    alignas(64) static int32_t numbers[64] = {};
    Acc acc[24];
    for (auto& a : acc) a = zero;
    const auto weights = load(numbers);
    for (int round = 0; round < rounds; round++) {
#pragma GCC unroll 6
        for (int i = 0; i < 6; i++) {
            const I x = i_broadcast(numbers + (i + round) % 32);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) acc[i * 4 + j] = dot(acc[i * 4 + j], weights, x);
        }
    }
    float total = 0;
    for (const auto& a : acc) {
        if constexpr (std::is_same_v<Acc, I>) total += f_sum(f_from(a));
        else total += f_sum(a);
    }
    *sink = total;
}

#if defined(PDMESH_ISA_AMX)
// The same on matrix tiles: four products of two tiles of activations and two of weights, loaded each time.
template <bool kInts>
void tile_dots(int rounds) {
    alignas(64) static uint8_t numbers[4][kTileHeight * 64] = {};
    const TileSession tiles;
    for (int round = 0; round < rounds; round++) {
        tile_load<4>(numbers[0], 64);
        tile_load<5>(numbers[1], 64);
        tile_load<6>(numbers[2], 64);
        tile_load<7>(numbers[3], 64);
        if constexpr (kInts) {
            tile_dot_s8u8<0, 4, 6>();
            tile_dot_s8u8<1, 4, 7>();
            tile_dot_s8u8<2, 5, 6>();
            tile_dot_s8u8<3, 5, 7>();
        } else {
            tile_dot_bf16<0, 4, 6>();
            tile_dot_bf16<1, 4, 7>();
            tile_dot_bf16<2, 5, 6>();
            tile_dot_bf16<3, 5, 7>();
        }
    }
}
#endif

// One thread's products, and how many operations those are.
double work(int kind) {
    constexpr int rounds = 100000, vectors = 24;
    volatile float sink;
#if defined(PDMESH_ISA_AMX)
    constexpr int tile_rounds = rounds / 4;
    constexpr double tile_operations = 4.0 * kTileHeight * 16 * 64 * 2;  // of bytes
    if (kind == 0) {
        tile_dots<true>(tile_rounds);
        return tile_rounds * tile_operations;
    }
    if (kind == 1) {
        tile_dots<false>(tile_rounds);
        return tile_rounds * tile_operations / 2;
    }
#endif
    const auto load = [](const void* p) { return i_load(p); };
    if (kind == 0) dots(rounds, i_zero(), [](const void* p) { return i_weights(p); }, [](I acc, const auto& w, I a) { return dot_weights(acc, w, a); }, &sink);
    else if (kind == 1) dots(rounds, f_zero(), load, [](F acc, I w, I a) { return dot_bf16(acc, w, a); }, &sink);
    else dots(rounds, f_zero(), load, [](F acc, I w, I a) { return f_fma(f_bits(w), f_bits(a), acc); }, &sink);
    return static_cast<double>(rounds) * vectors * (kind == 0 ? 128 : kind == 1 ? 64 : 32);
}

}  // namespace
}  // namespace pdmesh

using namespace pdmesh;

extern "C" {

// Bytes per second of all threads streaming once over `num_bytes` at `data`; the best of `repeats`.
double pdmesh_read_bandwidth(const uint8_t* data, int64_t num_bytes, int32_t num_threads, int32_t repeats) {
    Team team(num_threads, 1000);
    double best = 0;
    for (int32_t i = 0; i < repeats; i++) {
        const double start = seconds();
        team.run([&](int rank) {
            const int64_t part = num_bytes / team.size() / 512 * 512;
            const uint8_t* p = data + part * rank;
            I sums[8];
            for (auto& sum : sums) sum = i_zero();
            for (int64_t at = 0; at < part; at += 512) {
#pragma GCC unroll 8
                for (int j = 0; j < 8; j++) {
                    prefetch(p + at + j * 64 + 4096);
                    sums[j] = i_minus_128_times(sums[j], i_load(p + at + j * 64));
                }
            }
            volatile float sink = 0;
            for (const auto& sum : sums) sink = sink + f_sum(f_from(sum));
        });
        best = std::max(best, num_bytes / (seconds() - start));
    }
    return best;
}

// Operations (a multiplication and an addition are two) per second of all threads; kind 0: int8, 1: bf16, 2: float32. On matrix tiles
// where the kernels' products are.
double pdmesh_product_peak(int32_t kind, int32_t num_threads, int32_t repeats) {
    Team team(num_threads, 1000);
    double best = 0;
    for (int32_t i = 0; i < repeats; i++) {
        std::atomic<int64_t> operations = 0;
        const double start = seconds();
        team.run([&](int) { operations += static_cast<int64_t>(work(kind)); });
        best = std::max(best, operations / (seconds() - start));
    }
    return best;
}

}
