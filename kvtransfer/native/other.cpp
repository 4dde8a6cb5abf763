// Every other processor: ARM's own instruction where it is there. And the table, which serves everywhere.
#include <cstring>

#include "polynomial.h"
#include "tiers.h"

#if defined(__aarch64__)
#include <arm_acle.h>
#if defined(__ARM_FEATURE_CRC32)
#define ARM_CRC
#elif defined(__linux__)
#include <sys/auxv.h>
#define ARM_CRC __attribute__((target("+crc")))
#endif
#endif

namespace pdmesh {
namespace {

// The instruction, or the table, for 8 bytes and for one.
struct Table {
    static uint32_t word(uint32_t state, uint64_t word) {
        static constexpr auto tables = make_tables();
        word ^= state;
        uint32_t result = 0;
        for (int k = 0; k < 8; k++) result ^= tables[7 - k][word >> (8 * k) & 0xFF];
        return result;
    }

    static uint32_t byte(uint32_t state, uint8_t byte) {
        static constexpr auto tables = make_tables();
        return (state >> 8) ^ tables[0][(state ^ byte) & 0xFF];
    }
};

// `word` reads as the processor stores it, and the table wants the first byte lowest.
uint64_t little_endian(uint64_t word) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return __builtin_bswap64(word);
#else
    return word;
#endif
}

template <bool copies> uint32_t portable(uint32_t state, uint8_t* target, const uint8_t* source, int64_t num_bytes) {
    int64_t at = 0;
    for (; at + 8 <= num_bytes; at += 8) {
        uint64_t word;
        std::memcpy(&word, source + at, 8);
        PDMESH_PIN(word, "r");
        if constexpr (copies) std::memcpy(target + at, &word, 8);
        state = Table::word(state, little_endian(word));
    }
    for (; at < num_bytes; at++) {
        uint32_t byte = source[at];
        PDMESH_PIN(byte, "r");
        if constexpr (copies) target[at] = static_cast<uint8_t>(byte);
        state = Table::byte(state, static_cast<uint8_t>(byte));
    }
    return state;
}

bool always() { return true; }

#if defined(ARM_CRC)
template <bool copies> ARM_CRC uint32_t arm(uint32_t state, uint8_t* target, const uint8_t* source, int64_t num_bytes) {
    int64_t at = 0;
    for (; at + 8 <= num_bytes; at += 8) {
        uint64_t word;
        std::memcpy(&word, source + at, 8);
        PDMESH_PIN(word, "r");
        if constexpr (copies) std::memcpy(target + at, &word, 8);
        state = __crc32cd(state, word);
    }
    return portable<copies>(state, target + at, source + at, num_bytes - at);
}

bool has_crc() {
#if defined(__ARM_FEATURE_CRC32)
    return true;
#else
    return getauxval(AT_HWCAP) & (1 << 7);  // HWCAP_CRC32
#endif
}
#endif

}  // namespace

const Tier kPortableTiers[] = {{"portable", always, portable<false>, portable<true>, portable<true>}, {}};

#if defined(ARM_CRC)
const Tier kArchitectureTiers[] = {{"arm", has_crc, arm<false>, arm<true>, arm<true>}, {}};
#elif !defined(__x86_64__)
const Tier kArchitectureTiers[] = {{}};
#endif
#if !defined(__x86_64__)
const Tier kUnsummedTiers[] = {{}};
#endif

}  // namespace pdmesh
