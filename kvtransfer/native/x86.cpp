// x86-64: folding with carry-less products of 512 or 256 bits, or three interleaved chains of the crc32 instruction.
#if defined(__x86_64__)
#pragma GCC diagnostic ignored "-Wpragmas"
// GCC 12 holds the undefined operands inside its own AVX-512 header for mistakes (its bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cstring>

#include "polynomial.h"
#include "tiers.h"

#define SSE42 __attribute__((target("sse4.2,pclmul")))
#define AVX2 __attribute__((target("sse4.2,pclmul,avx2,vpclmulqdq")))
#define AVX512 __attribute__((target("sse4.2,pclmul,avx512f,avx512bw,avx512vl,vpclmulqdq")))

namespace pdmesh {
namespace {

enum class Store { none, plain, stream };

// ---- 8 bytes at a time ----

template <bool copies> SSE42 inline uint64_t take_word(uint8_t* target, const uint8_t* source, int64_t at) {
    uint64_t word;
    std::memcpy(&word, source + at, 8);
    PDMESH_PIN(word, "r");
    if constexpr (copies) std::memcpy(target + at, &word, 8);
    return word;
}

// One chain: three cycles for 8 bytes, as the instruction waits for its own result.
template <bool copies> SSE42 inline uint32_t one_chain(uint32_t state, uint8_t* target, const uint8_t* source, int64_t num_bytes) {
    int64_t at = 0;
    for (; at + 8 <= num_bytes; at += 8) state = static_cast<uint32_t>(_mm_crc32_u64(state, take_word<copies>(target, source, at)));
    for (; at < num_bytes; at++) {
        uint32_t byte = source[at];
        PDMESH_PIN(byte, "r");
        if constexpr (copies) target[at] = static_cast<uint8_t>(byte);
        state = _mm_crc32_u8(state, static_cast<uint8_t>(byte));
    }
    return state;
}

// The state times x^(8 * num_bytes): as if so many zero bytes had followed.
template <int num_bytes> SSE42 inline uint64_t shifted(uint64_t state) {
    constexpr uint32_t factor = shift_factor(8 * num_bytes);
    const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(state), _mm_cvtsi64_si128(factor), 0);
    return _mm_crc32_u64(0, _mm_cvtsi128_si64(product));
}

// Three chains hide the instruction's latency: each takes a third of 3 * lane bytes.
template <bool copies, int lane>
SSE42 inline uint32_t three_chains(uint32_t state, uint8_t* target, const uint8_t* source) {
    uint64_t a = state, b = 0, c = 0;
#pragma GCC unroll 8
    for (int64_t at = 0; at < lane; at += 8) {
        a = _mm_crc32_u64(a, take_word<copies>(target, source, at));
        b = _mm_crc32_u64(b, take_word<copies>(target, source, lane + at));
        c = _mm_crc32_u64(c, take_word<copies>(target, source, 2 * lane + at));
    }
    return static_cast<uint32_t>(shifted<2 * lane>(a) ^ shifted<lane>(b) ^ c);
}

template <bool copies> SSE42 uint32_t sse42(uint32_t state, uint8_t* target, const uint8_t* source, int64_t num_bytes) {
    constexpr int long_lane = 4096, short_lane = 256;
    int64_t at = 0;
    for (; at + 3 * long_lane <= num_bytes; at += 3 * long_lane)
        state = three_chains<copies, long_lane>(state, target + at, source + at);
    for (; at + 3 * short_lane <= num_bytes; at += 3 * short_lane)
        state = three_chains<copies, short_lane>(state, target + at, source + at);
    return one_chain<copies>(state, target + at, source + at, num_bytes - at);
}

// ---- 8 * 32 bytes at a time ----

constexpr int64_t kShort = 512;   // below, setting up costs more than it saves
constexpr int64_t kAhead = 2048;  // of prefetching: the processor's own stops at the end of each page
constexpr int kWordsInRound = 8;  // that a chain takes while 256 bytes are folded

inline void prefetch_ahead(const uint8_t* source) {
    for (int line = 0; line < 256; line += 64) _mm_prefetch(reinterpret_cast<const char*>(source + kAhead + line), _MM_HINT_T0);
}

template <Store store> AVX2 inline __m256i take_32(uint8_t* target, const uint8_t* source) {
    __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    PDMESH_PIN(x, "x");
    if constexpr (store == Store::plain) _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), x);
    if constexpr (store == Store::stream) _mm256_stream_si256(reinterpret_cast<__m256i*>(target), x);
    return x;
}

// Both halves of each 128 bits of `x` times x^distance, plus what lies so many bits behind it: congruent modulo P to both of them one
// behind the other. The low half comes first in memory, so it stands 64 powers higher.
template <int distance> AVX2 inline __m256i fold(__m256i x, __m256i behind) {
    constexpr uint64_t low = fold_factor(distance + 64), high = fold_factor(distance);
    const __m256i factors = _mm256_broadcastsi128_si256(_mm_set_epi64x(high, low));
    const __m256i lows = _mm256_clmulepi64_epi128(x, factors, 0x00), highs = _mm256_clmulepi64_epi128(x, factors, 0x11);
    return _mm256_xor_si256(_mm256_xor_si256(lows, highs), behind);
}

// The same for one lane.
template <int distance> SSE42 inline __m128i fold(__m128i x, __m128i behind) {
    constexpr uint64_t low = fold_factor(distance + 64), high = fold_factor(distance);
    const __m128i factors = _mm_set_epi64x(high, low);
    const __m128i lows = _mm_clmulepi64_si128(x, factors, 0x00), highs = _mm_clmulepi64_si128(x, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(lows, highs), behind);
}

// The state after the 16 bytes that `x` is congruent to.
SSE42 inline uint32_t reduce(__m128i x) {
    return static_cast<uint32_t>(_mm_crc32_u64(_mm_crc32_u64(0, _mm_cvtsi128_si64(x)), _mm_extract_epi64(x, 1)));
}

// The state after the 256 bytes that `sum` is congruent to.
AVX2 inline uint32_t reduce(const __m256i (&sum)[8]) {
    __m256i all = sum[7];
    all = fold<256>(sum[6], all);
    all = fold<512>(sum[5], all);
    all = fold<768>(sum[4], all);
    all = fold<1024>(sum[3], all);
    all = fold<1280>(sum[2], all);
    all = fold<1536>(sum[1], all);
    all = fold<1792>(sum[0], all);
    return reduce(fold<128>(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
}

template <Store store, bool sums>
AVX2 uint32_t vpclmul_256(uint32_t state, uint8_t* target, const uint8_t* source, int64_t num_bytes) {
    constexpr bool copies = store != Store::none;
    if (num_bytes < kShort) return one_chain<copies>(state, target, source, num_bytes);
    int64_t at = 0;
    if constexpr (store == Store::stream) {  // such stores must be aligned
        at = -reinterpret_cast<intptr_t>(target) & 31;
        state = one_chain<copies>(state, target, source, at);
    }
    __m256i sum[8];
    for (int k = 0; k < 8; k++) sum[k] = take_32<store>(target + at + 32 * k, source + at + 32 * k);
    sum[0] = _mm256_xor_si256(sum[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128(state)));
    for (at += 256; at + 256 <= num_bytes; at += 256) {
        prefetch_ahead(source + at);
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) {
            const __m256i next = take_32<store>(target + at + 32 * k, source + at + 32 * k);
            if constexpr (sums) sum[k] = fold<8 * 256>(sum[k], next);
        }
    }
    return one_chain<copies>(reduce(sum), target + at, source + at, num_bytes - at);
}

// Sums alone, and faster than memory: folding and chains use units of their own, so each loop does both. A block is one stretch
// that is folded, then three that the chains take.
template <int rounds> AVX2 inline uint32_t mixed_block(uint32_t state, const uint8_t* source) {
    constexpr int folded = 256 * (rounds + 1), lane = kWordsInRound * 8 * rounds;
    const uint8_t* const chains = source + folded;
    __m256i sum[8];
    for (int k = 0; k < 8; k++) sum[k] = take_32<Store::none>(nullptr, source + 32 * k);
    sum[0] = _mm256_xor_si256(sum[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128(state)));
    uint64_t a = 0, b = 0, c = 0;
    for (int round = 0; round < rounds; round++) {
        const uint8_t* const next = source + 256 * (round + 1);
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) {
            sum[k] = fold<8 * 256>(sum[k], take_32<Store::none>(nullptr, next + 32 * k));
            const int64_t at = 8 * (kWordsInRound * round + k);
            a = _mm_crc32_u64(a, take_word<false>(nullptr, chains, at));
            b = _mm_crc32_u64(b, take_word<false>(nullptr, chains, lane + at));
            c = _mm_crc32_u64(c, take_word<false>(nullptr, chains, 2 * lane + at));
        }
    }
    return static_cast<uint32_t>(shifted<3 * lane>(reduce(sum)) ^ shifted<2 * lane>(a) ^ shifted<lane>(b) ^ c);
}

template <int rounds> constexpr int64_t kBlock = 256 * (rounds + 1) + 3 * kWordsInRound * 8 * rounds;

AVX2 uint32_t mixed(uint32_t state, uint8_t*, const uint8_t* source, int64_t num_bytes) {
    constexpr int many = 64, few = 8;
    int64_t at = 0;
    for (; at + kBlock<many> <= num_bytes; at += kBlock<many>) state = mixed_block<many>(state, source + at);
    for (; at + kBlock<few> <= num_bytes; at += kBlock<few>) state = mixed_block<few>(state, source + at);
    return vpclmul_256<Store::none, true>(state, nullptr, source + at, num_bytes - at);
}

// ---- 4 * 64 bytes at a time ----

template <Store store> AVX512 inline __m512i take(uint8_t* target, const uint8_t* source) {
    __m512i x = _mm512_loadu_si512(source);
    PDMESH_PIN(x, "v");
    if constexpr (store == Store::plain) _mm512_storeu_si512(target, x);
    if constexpr (store == Store::stream) _mm512_stream_si512(reinterpret_cast<__m512i*>(target), x);
    return x;
}

// As for 256 bits.
template <int distance> AVX512 inline __m512i fold(__m512i x, __m512i behind) {
    constexpr uint64_t low = fold_factor(distance + 64), high = fold_factor(distance);
    const __m512i factors = _mm512_broadcast_i32x4(_mm_set_epi64x(high, low));
    const __m512i lows = _mm512_clmulepi64_epi128(x, factors, 0x00), highs = _mm512_clmulepi64_epi128(x, factors, 0x11);
    return _mm512_ternarylogic_epi64(lows, highs, behind, 0x96);  // the sum of all three
}

// The state after the 64 bytes that `x` is congruent to.
AVX512 inline uint32_t reduce(__m512i x) {
    __m128i sum = _mm512_extracti32x4_epi32(x, 3);
    sum = fold<128>(_mm512_extracti32x4_epi32(x, 2), sum);
    sum = fold<256>(_mm512_extracti32x4_epi32(x, 1), sum);
    sum = fold<384>(_mm512_castsi512_si128(x), sum);
    return reduce(sum);
}

template <Store store, bool sums>
AVX512 uint32_t vpclmul(uint32_t state, uint8_t* target, const uint8_t* source, int64_t num_bytes) {
    constexpr bool copies = store != Store::none;
    if (num_bytes < kShort) return one_chain<copies>(state, target, source, num_bytes);
    int64_t at = 0;
    if constexpr (store == Store::stream) {  // such stores must be aligned
        at = -reinterpret_cast<intptr_t>(target) & 63;
        state = one_chain<copies>(state, target, source, at);
    }
    __m512i a = _mm512_xor_si512(take<store>(target + at, source + at), _mm512_zextsi128_si512(_mm_cvtsi32_si128(state)));
    __m512i b = take<store>(target + at + 64, source + at + 64);
    __m512i c = take<store>(target + at + 128, source + at + 128);
    __m512i d = take<store>(target + at + 192, source + at + 192);
    for (at += 256; at + 256 <= num_bytes; at += 256) {
        prefetch_ahead(source + at);
        const __m512i next_a = take<store>(target + at, source + at);
        const __m512i next_b = take<store>(target + at + 64, source + at + 64);
        const __m512i next_c = take<store>(target + at + 128, source + at + 128);
        const __m512i next_d = take<store>(target + at + 192, source + at + 192);
        if constexpr (sums) {
            a = fold<4 * 512>(a, next_a);
            b = fold<4 * 512>(b, next_b);
            c = fold<4 * 512>(c, next_c);
            d = fold<4 * 512>(d, next_d);
        }
    }
    d = fold<3 * 512>(a, fold<2 * 512>(b, fold<512>(c, d)));
    return one_chain<copies>(reduce(d), target + at, source + at, num_bytes - at);
}

uint32_t ignored(uint32_t state, uint8_t*, const uint8_t*, int64_t) { return state; }

template <Store store> uint32_t unsummed(uint32_t state, uint8_t* target, const uint8_t* source, int64_t num_bytes) {
    vpclmul<store, false>(state, target, source, num_bytes);
    return state;
}

template <Store store> uint32_t unsummed_256(uint32_t state, uint8_t* target, const uint8_t* source, int64_t num_bytes) {
    vpclmul_256<store, false>(state, target, source, num_bytes);
    return state;
}

bool has_sse42() { return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul"); }

bool has_avx2() { return has_sse42() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq"); }

bool has_avx512() {
    return has_sse42() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("vpclmulqdq");
}

bool has_avx2_only() { return has_avx2() && !has_avx512(); }

}  // namespace

const Tier kArchitectureTiers[] = {
    {"vpclmul", has_avx512, vpclmul<Store::none, true>, vpclmul<Store::plain, true>, vpclmul<Store::stream, true>},
    {"vpclmul256", has_avx2, mixed, vpclmul_256<Store::plain, true>, vpclmul_256<Store::stream, true>},
    {"sse42", has_sse42, sse42<false>, sse42<true>, sse42<true>},
    {},
};
// The copy that the best tier makes, without its sum.
const Tier kUnsummedTiers[] = {
    {"unsummed", has_avx512, ignored, unsummed<Store::plain>, unsummed<Store::stream>},
    {"unsummed", has_avx2_only, ignored, unsummed_256<Store::plain>, unsummed_256<Store::stream>},
    {},
};

}  // namespace pdmesh
#endif
