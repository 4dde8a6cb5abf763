// Matrix tiles of the processor (AMX): eight registers of 16 rows x 64 bytes, and products of whole tiles.
//
//     tile 0 to 3: results, 16 x 16 int32 or float32      4, 5: 16 rows of activations, 64 bytes each      6, 7: weights
//
// A weights' tile is 16 units of a panel (gemm.h) as they lie in memory: 64 bytes of input for 16 outputs. In assembly: the
// compiler's intrinsics do not say that they read and write memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pdmesh {

constexpr int kTileHeight = 16;       // of a tile

#if defined(PDMESH_ISA_AMX)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

#if defined(PDMESH_ISA_AMX)
// All tiles at their full size. A thread holds one while it multiplies (gemm_tiles.h, attention_tiles.h). While one lives, its thread's tiles are in use: saved at every switch of threads.
class TileSession {
  public:
    TileSession() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        static_assert(sizeof(config) == 64);
        asm volatile("ldtilecfg %0" ::"m"(config));
    }
    ~TileSession() { asm volatile("tilerelease"); }
    TileSession(const TileSession&) = delete;
    TileSession& operator=(const TileSession&) = delete;
};

template <int T>
[[gnu::always_inline]] inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
[[gnu::always_inline]] inline void tile_load(const void* p, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T>
[[gnu::always_inline]] inline void tile_store(void* p, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
// Result C += A (signed bytes) x B (unsigned), exact in int32.
template <int C, int A, int B>
[[gnu::always_inline]] inline void tile_dot_s8u8() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// Result C += A x B of bf16 pairs, in float32. The order of a row's additions is the instruction's own, whatever rows are beside.
template <int C, int A, int B>
[[gnu::always_inline]] inline void tile_dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
#else
struct TileSession {};
#endif

}  // namespace pdmesh
