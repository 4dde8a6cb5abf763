// Teams that lend each other cores through one table, with guests that join and leave at any time: every item of every stage is
// computed exactly once, stages do not overlap, and the table is clean at the end. Prints how often guests were there.
#include <cstdio>
#include <cstdlib>
#include <random>

#include "parallel.h"

using namespace pdmesh;

namespace {

constexpr int kLayers = 12, kItems = 24, kRows = 17;

struct Table {
    CoreTableHeader header{};
    CoreSlot slots[256]{};
};

[[noreturn]] void fail(const char* what, int a = 0, int b = 0) {
    std::printf("failed: %s %d %d\n", what, a, b);
    std::fflush(stdout);
    std::_Exit(1);
}

struct Stages {
    std::atomic<int> taken[kLayers][kItems]{}, shared[kLayers][kRows]{}, reached[kLayers]{};
};

// A region as a step is one: pieces that are taken, pieces that are shared out by rank, barriers, boundaries between layers.
void run_region(Team& team, std::mt19937& random, std::atomic<int64_t>& joined, std::atomic<int64_t>& late) {
    Stages stages;
    const int spins = static_cast<int>(random() % 300);
    team.run_with_guests(random() % 5 != 0, [&](int rank, int place) {
        if (rank >= team.capacity()) fail("rank", rank);
        if (rank > 0) joined++;
        if (place > 0) late++;
        for (int layer = std::max(place, 0); layer < kLayers; layer++) {
            if (layer > 0 && layer != place) team.boundary(layer);
            stages.reached[layer]++;
            for (int item; (item = team.take()) < kItems;) {
                stages.taken[layer][item]++;
                for (int i = 0; i < spins; i++) pause_cpu();
            }
            team.barrier();
            for (int item = 0; item < kItems; item++)
                if (stages.taken[layer][item] != 1) fail("an item that was not taken once", layer, stages.taken[layer][item]);
            for (int row = kRows * rank / team.size(); row < kRows * (rank + 1) / team.size(); row++) stages.shared[layer][row]++;
            team.barrier();
            for (int row = 0; row < kRows; row++)
                if (stages.shared[layer][row] != 1) fail("a row that was not shared out once", layer, stages.shared[layer][row]);
        }
    });
    for (int layer = 0; layer < kLayers; layer++)
        if (stages.reached[layer] < 1) fail("layer", layer);
    int sum = 0;
    team.run([&](int rank) { if (rank == 0) sum = team.size(); });
    if (sum < 1 || team.size() != sum) fail("guests in a region that is not for them", sum, team.size());
}

}  // namespace

int main(int argc, char** argv) {
    const int regions = argc > 1 ? std::atoi(argv[1]) : 2000;
    Table table;
    constexpr int kOwn[] = {1, 2, 1};
    int first[4] = {};
    for (int t = 0; t < 3; t++) first[t + 1] = first[t] + kOwn[t];
    table.header.num_used = first[3] + 1;
    table.header.num_shared = first[3] + 2;  // and a core that has no owner
    for (int slot = 0; slot <= first[3]; slot++) table.slots[slot].is_owned = 1, table.slots[slot].core = -1;
    std::atomic<int64_t> joined{0}, late{0};
    std::atomic<bool> is_over{false};
    // An owner that wants its core for moments, and one that died while it did: its mark is over when its time is.
    std::thread owner([&] {
        std::mt19937 random(7);
        while (!is_over) {
            table.slots[first[3]].wanted_until = random() % 2 ? CoreTable::now_ms() + random() % 3 : 0;
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
        }
    });
    {
        std::vector<std::thread> workers;
        for (int t = 0; t < 3; t++)
            workers.emplace_back([&, t] {
                std::mt19937 random(t);
                Team team(kOwn[t], static_cast<int>(random() % 60), CoreTable(&table, first[t], kOwn[t]), 3);
                for (int region = 0; region < regions; region++) {
                    run_region(team, random, joined, late);
                    if (random() % 4) continue;
                    team.rest();
                    std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
                }
            });
        for (auto& worker : workers) worker.join();
    }
    is_over = true;
    owner.join();
    if (!table.slots[first[3] + 1].times_borrowed || table.slots[first[3] + 2].times_borrowed) fail("cores without an owner");
    for (int slot = 0; slot < first[3]; slot++) {
        if (table.slots[slot].wanted_until) fail("a core that is wanted by a team that is gone", slot);
        if (table.slots[slot].borrowed) fail("a core that was not given back", slot);
    }
    for (int slot = first[3]; slot < first[3] + 2; slot++)
        if (table.slots[slot].borrowed) fail("a core that was not given back", slot);
    int64_t lent_ms = 0, borrowed_ms = 0;
    for (const CoreSlot& slot : table.slots) lent_ms += slot.lent_ms, borrowed_ms += slot.borrowed_ms;
    if (lent_ms != borrowed_ms || lent_ms <= 0) fail("what was lent is not what was borrowed", lent_ms, borrowed_ms);
    std::printf("joined %lld late %lld\n", static_cast<long long>(joined), static_cast<long long>(late));
}
