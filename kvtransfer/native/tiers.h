// Ways to sum and to copy, from which one is chosen when the program runs: one library serves every processor of an architecture.
#pragma once
#include <cstdint>

namespace pdmesh {

// Takes num_bytes at `source` into `state` (the checksum with all bits inverted) and returns it. A copying step also writes them to
// `target`: it sums exactly the registers that it stores, so a source that changes meanwhile cannot make the sum of one
// thing and the copy of another. A summing step ignores `target`.
using Step = uint32_t (*)(uint32_t state, uint8_t* target, const uint8_t* source, int64_t num_bytes);

struct Tier {
    const char* name;
    bool (*is_there)();  // has this processor the instructions?
    Step sum;
    Step copy;
    Step stream;  // copies past the caches: for more than they hold
};

// Each ends with a tier without a name.
extern const Tier kArchitectureTiers[];
extern const Tier kPortableTiers[];
// Copies the same way and sums nothing: what the checksum costs is measured against it. Never chosen by itself.
extern const Tier kUnsummedTiers[];

// A value that the compiler can neither forget nor load a second time.
#define PDMESH_PIN(value, registers) asm("" : "+" registers(value))

}  // namespace pdmesh
