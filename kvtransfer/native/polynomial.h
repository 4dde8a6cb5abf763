// CRC-32C as arithmetic with polynomials over GF(2) modulo P = x^32 + x^28 + x^27 + … (Castagnoli; RFC 3720, section 12.1).
//
// Everything is reflected, as the checksum demands: in a register of n bits, bit i stands for x^(n-1-i). A state S that takes in a
// message M of m bits becomes (S * x^m + M * x^32) mod P, so all that a fast way needs are powers of x modulo P.
#pragma once
#include <array>
#include <cstdint>

namespace pdmesh {

constexpr uint32_t kPolynomial = 0x82F63B78;  // P without x^32
constexpr uint32_t kOne = 0x80000000;         // x^0

constexpr uint32_t times_x(uint32_t a) { return (a >> 1) ^ (a & 1 ? kPolynomial : 0); }

// x^n mod P.
constexpr uint32_t power(int n) {
    uint32_t result = kOne;
    for (int i = 0; i < n; i++) result = times_x(result);
    return result;
}

// What to multiply a 64-bit half of a register with, so that the 128-bit product is the half times x^n. The product of two
// reflected numbers of 64 bits has 127 bits, one less than the register: that is one factor x by itself.
constexpr uint64_t fold_factor(int n) { return static_cast<uint64_t>(power(n - 1)) << 32; }

// What to multiply a state of 32 bits with, so that taking in the 64-bit product from state 0 gives the state times x^n mod P: the
// product lies one bit too low in its register (a factor x), and taking in multiplies by x^32.
constexpr uint32_t shift_factor(int n) { return power(n - 33); }

// kTables[k][b]: what a byte b does to the state when k bytes follow it.
constexpr std::array<std::array<uint32_t, 256>, 8> make_tables() {
    std::array<std::array<uint32_t, 256>, 8> tables{};
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t state = b;
        for (int i = 0; i < 8; i++) state = times_x(state);
        tables[0][b] = state;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t b = 0; b < 256; b++) tables[k][b] = (tables[k - 1][b] >> 8) ^ tables[0][tables[k - 1][b] & 0xFF];
    return tables;
}

}  // namespace pdmesh
