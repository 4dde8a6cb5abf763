// Tokens' keys and values from slot to slot of a pool, in all layers.
#include <vector>

#include "kv_copy.h"

namespace pdmesh {
namespace {

struct Moves {
    const int64_t *sources, *targets;
    int count;
    // Is a source read after a move has written it?
    bool is_in_order() const {
        for (int i = 0; i < count; i++)
            for (int later = i + 1; later < count; later++)
                if (sources[later] == targets[i]) return false;
        return true;
    }
};

// One head of one layer. `between`: room for the tokens on their way, or null where the moves are in order.
void move(const KVGeometry& kv, int layer, int head, const Moves& moves, uint8_t* between) {
    const auto place = [&](int64_t slot) { return TokenPlace::in_pool(kv, layer, head, slot); };
    if (!between) {
        for (int i = 0; i < moves.count; i++) copy_token(kv, place(moves.sources[i]), place(moves.targets[i]));
        return;
    }
    const auto waiting = [&](int i) { return TokenPlace::in_group_of(kv, LooseGroup(kv, between, i / kGroup), i % kGroup); };
    for (int i = 0; i < moves.count; i++) copy_token(kv, place(moves.sources[i]), waiting(i));
    for (int i = 0; i < moves.count; i++) copy_token(kv, waiting(i), place(moves.targets[i]));
}

}  // namespace
}  // namespace pdmesh

extern "C" {

// As if all sources were read before any target is written; no target stands twice. 0, or 1 without memory.
int32_t pdmesh_move_slots(const PdmeshPool* pool, const int64_t* sources, const int64_t* targets, int32_t count) {
    using namespace pdmesh;
    const KVGeometry kv{pool->num_kv_heads, pool->head_dim, pool->block_size, pool->format, pool->num_blocks, pool->kv};
    const Moves moves{sources, targets, count};
    try {
        std::vector<uint8_t> between(moves.is_in_order() ? 0 : round_up(count, kGroup) / kGroup * kv.loose_group_bytes());
        for (int layer = 0; layer < pool->num_layers; layer++)
            for (int head = 0; head < kv.num_kv_heads; head++) move(kv, layer, head, moves, between.empty() ? nullptr : between.data());
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}
