// What the machine can do at most, measured with the kernels' own inner loops on what the first cache holds: read bandwidth and
// product peaks.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <algorithm>
#include <vector>

#include "gemm.h"
#include "panels.h"
#include "parallel.h"
#include "simd.h"
#include "tiles.h"

namespace pdmesh {
namespace {

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Rows and panels that stay in a core's first cache, also where two threads share it. They are zeros, which the compiler does not
// know: it would compute equal products once.
constexpr int kUnits = 32, kMostRows = 6, kMostPanels = 4;
struct alignas(64) Resident {
    uint8_t weights[kMostPanels][kUnits * kUnit] = {};
    uint8_t rows[kMostRows][kUnits * 8] = {};
};
Resident resident;
volatile float sink;

[[gnu::always_inline]] inline float total(I acc) { return f_sum(f_from(acc)); }
[[gnu::always_inline]] inline float total(F acc) { return f_sum(acc); }

// The kernels' own inner loop over MR rows and NR panels, and how many operations that is; 0 for a tile that has no room in
// registers. `add` adds all units of the panels to the sums.
template <class Acc, int MR, int NR, class Zero, class Add>
double run_tile(int rounds, double operations, const Zero& zero, const Add& add) {
    Acc acc[MR][NR];
    const uint8_t* w[NR];
    for (auto& row : acc)
        for (auto& each : row) each = zero();
    for (int j = 0; j < NR; j++) w[j] = resident.weights[j];
    for (int round = 0; round < rounds; round++) {
        asm volatile("" ::: "memory");
        add(w, acc);
    }
    float sum = 0;
    for (const auto& row : acc)
        for (const auto& each : row) sum += total(each);
    sink = sum;
    return operations * rounds * kUnits * MR * NR;
}

template <class Dot, int MR, int NR>
double dots(int rounds, double operations) {
    if constexpr (!Dot::kRoom.fits(MR, NR)) return 0;
    else
        return run_tile<typename Dot::Acc, MR, NR>(rounds, operations, [] { return Dot::zero(); }, [](const uint8_t* const(&w)[NR], auto& acc) {
            tile<Dot, MR, NR>(resident.rows[0], sizeof resident.rows[0], w, kUnits, nullptr, acc);
        });
}

// int4 within groups, without what scales add: integers of kNibbleSteps units at a time.
template <int MR, int NR>
double nibbles(int rounds) {
    if constexpr (!kNibbleRoom.fits(MR, NR)) return 0;
    else
        return run_tile<I, MR, NR>(rounds, 256, [] { return i_zero(); }, [](const uint8_t* const(&w)[NR], I(&acc)[MR][NR]) {
            constexpr int at_once = std::min(kUnits, kNibbleSteps);
            for (int first = 0; first < kUnits; first += at_once) {
                I part[MR][NR];
#pragma GCC unroll 8
                for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
                    for (int j = 0; j < NR; j++) part[i][j] = i_zero();
                add_nibbles<MR, NR>(resident.rows[0] + first * 8, sizeof resident.rows[0], w, first, first + at_once, 0, 0, part);
#pragma GCC unroll 8
                for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
                    for (int j = 0; j < NR; j++) acc[i][j] = i_add_nibbles(acc[i][j], part[i][j]);
            }
        });
}

// Every tile that the kernels use for some number of rows; which is the fastest depends on the processor.
constexpr int kShapes = 5;
template <class Dot>
double dots_of(int shape, int rounds, double operations) {
    switch (shape) {
        case 0: return dots<Dot, 6, 4>(rounds, operations);
        case 1: return dots<Dot, 6, 1>(rounds, operations);
        case 2: return dots<Dot, 4, 1>(rounds, operations);
        case 3: return dots<Dot, 2, 2>(rounds, operations);
        default: return dots<Dot, 1, 4>(rounds, operations);
    }
}
double nibbles_of(int shape, int rounds) {
    switch (shape) {
        case 0: return nibbles<6, 4>(rounds);
        case 1: return nibbles<6, 1>(rounds);
        case 2: return nibbles<4, 1>(rounds);
        case 3: return nibbles<2, 2>(rounds);
        default: return nibbles<1, 4>(rounds);
    }
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
double work(int kind, int shape) {
    constexpr int rounds = 20000;
#if defined(PDMESH_ISA_AMX)
    constexpr int tile_rounds = rounds;
    constexpr double tile_operations = 4.0 * kTileHeight * 16 * 64 * 2;  // of bytes
    if (kind == 0 || kind == 3) {
        tile_dots<true>(tile_rounds);
        return tile_rounds * tile_operations;
    }
    if (kind == 1 || kind == 4) {
        tile_dots<false>(tile_rounds);
        return tile_rounds * tile_operations / 2;
    }
#endif
#if defined(PDMESH_WIDENED_INT8)
    if (kind == 0) return dots_of<DotWords>(shape, rounds, 64);  // the faster of two ways
#endif
    if (kind == 0) return dots_of<DotInt8>(shape, rounds, 128);
    if (kind == 1) return dots_of<DotBFloat16>(shape, rounds, 64);
    if (kind == 2) return dots_of<DotFloat32>(shape, rounds, 32);
    if (kind == 4) return dots_of<DotInt8AsWords>(shape, rounds, 64);
    return nibbles_of(shape, rounds);
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

// Operations (a multiplication and an addition are two) per second of all threads; kind 0: int8, 1: bf16, 2: float32, 3: int4,
// 4: int8 keys and values. On matrix tiles where the kernels' products are.
double pdmesh_product_peak(int32_t kind, int32_t num_threads, int32_t repeats) {
    Team team(num_threads, 1000);
    double best = 0;
    for (int32_t i = 0; i < repeats * kShapes; i++) {
        std::atomic<int64_t> operations = 0;
        const double start = seconds();
        team.run([&](int) { operations += static_cast<int64_t>(work(kind, i % kShapes)); });
        best = std::max(best, operations / (seconds() - start));
    }
    return best;
}

}
