// Which cores of the host compute, in a file that its workers map: core_table.py makes it and gives out its slots.
//
// A slot stands for a core. Its owner says that it computes; while it does not, one other worker may borrow the slot. Nobody waits for
// anybody: an owner computes whenever it wants to, and a borrower looks, leaves, and is in nobody's way for longer than one piece of
// work takes. What a process that is stopped or killed leaves behind ends by itself: every mark is a time until which it holds.
// Where fewer slots have an owner than the host has cores for its workers, others stand for the rest, and may be borrowed too.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace pdmesh {

// As core_table.py writes them; 64 bytes each, so that owners do not share a line of a cache.
struct alignas(64) CoreSlot {
    std::atomic<uint64_t> is_owned;      // 0: it has no owner
    std::atomic<int64_t> wanted_until;   // its owner computes; milliseconds of the monotonic clock; 0: it does not
    std::atomic<uint64_t> borrowed;      // milliseconds << kTagBits | borrower; 0: by none
    std::atomic<uint64_t> times_borrowed;
    std::atomic<int64_t> core;           // its number to the system; -1: any, the owner's threads are bound to none
    std::atomic<uint64_t> lent_ms;       // how long others have borrowed it
    std::atomic<uint64_t> borrowed_ms;   // of the first slot of an owner: how long it has borrowed cores of others
    uint64_t unused;
};
static_assert(sizeof(CoreSlot) == 64);
static_assert(std::atomic<int64_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

struct alignas(64) CoreTableHeader {
    char magic[8];
    uint32_t version;
    std::atomic<uint32_t> num_used;    // slots behind these have never had an owner
    std::atomic<uint32_t> num_shared;  // cores that the workers have together, whether they have an owner or not; 0: only those with one
};
static_assert(sizeof(CoreTableHeader) == 64);

// One worker's view. Slots [first, first + count) are its own. Without a table there is nothing to lend or to borrow.
class CoreTable {
  public:
    CoreTable() = default;
    CoreTable(void* table, int first, int count)
        : header_(static_cast<CoreTableHeader*>(table)), slots_(reinterpret_cast<CoreSlot*>(header_ + 1)), first_(first), count_(table ? count : 0) {}

    bool is_there() const { return header_ != nullptr; }

    // Milliseconds of the clock that all processes of a host share.
    static int64_t now_ms() {
        return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }

    // The owner computes, for now. Costs two stores where the mark is old.
    void want(int64_t now) {
        if (now < renew_at_) return;
        renew_at_ = now + kLeaseMs / 4;
        for (int slot = first_; slot < first_ + count_; slot++) slots_[slot].wanted_until.store(now + kLeaseMs, std::memory_order_relaxed);
    }

    // The owner computes nothing until it wants again.
    void rest() {
        renew_at_ = 0;
        for (int slot = first_; slot < first_ + count_; slot++) slots_[slot].wanted_until.store(0, std::memory_order_relaxed);
    }

    // A slot that is free, now borrowed; -1: there is none. A slot without an owner is a core only while fewer have one than there are
    // cores; where a worker has just come, a core may be one too many until the borrower's step ends.
    int borrow(int64_t now) {
        const uint32_t num_shared = header_->num_shared.load(std::memory_order_relaxed);
        const int num_slots = std::min(std::max(header_->num_used.load(std::memory_order_relaxed), num_shared), kMostSlots);
        int spare = static_cast<int>(std::min(num_shared, kMostSlots));
        for (int slot = 0; slot < num_slots && spare > 0; slot++) spare -= is_owned(slot);
        for (int slot = 0; slot < num_slots; slot++) {
            if (slot >= first_ && slot < first_ + count_) continue;
            if (is_owned(slot) ? is_wanted(slot, now) : spare-- <= 0) continue;
            CoreSlot& at = slots_[slot];
            uint64_t before = at.borrowed.load(std::memory_order_relaxed);
            if (static_cast<int64_t>(before >> kTagBits) > now) continue;
            if (!at.borrowed.compare_exchange_strong(before, mark(now), std::memory_order_relaxed)) continue;
            at.times_borrowed.fetch_add(1, std::memory_order_relaxed);
            return slot;
        }
        return -1;
    }

    // It goes on to be borrowed. One that took too long may have lost it to another, and goes on all the same until it looks next.
    void keep(int slot, int64_t now) {
        uint64_t before = slots_[slot].borrowed.load(std::memory_order_relaxed);
        if (is_mine(before)) slots_[slot].borrowed.compare_exchange_strong(before, mark(now), std::memory_order_relaxed);
    }

    // It was borrowed for `held_ms`.
    void give_back(int slot, int64_t held_ms) {
        slots_[slot].lent_ms.fetch_add(held_ms, std::memory_order_relaxed);
        slots_[first_].borrowed_ms.fetch_add(held_ms, std::memory_order_relaxed);
        uint64_t before = slots_[slot].borrowed.load(std::memory_order_relaxed);
        if (is_mine(before)) slots_[slot].borrowed.compare_exchange_strong(before, 0, std::memory_order_relaxed);
    }

    // -1: any.
    int core_of(int slot) const { return is_owned(slot) ? static_cast<int>(slots_[slot].core.load(std::memory_order_relaxed)) : -1; }

    bool is_wanted(int slot, int64_t now) const { return slots_[slot].wanted_until.load(std::memory_order_relaxed) > now; }

    // Without asking the clock where it is free.
    bool is_wanted(int slot) const {
        const int64_t until = slots_[slot].wanted_until.load(std::memory_order_relaxed);
        return until && until > now_ms();
    }

  private:
    bool is_owned(int slot) const { return slots_[slot].is_owned.load(std::memory_order_relaxed) != 0; }

    static constexpr uint32_t kMostSlots = 4096;
    static constexpr int kTagBits = 16;
    static constexpr int64_t kLeaseMs = 2000;  // longer than a step goes on between two looks
    uint64_t tag() const { return static_cast<uint64_t>(first_) + 1; }
    uint64_t mark(int64_t now) const { return static_cast<uint64_t>(now + kLeaseMs) << kTagBits | tag(); }
    bool is_mine(uint64_t borrowed) const { return (borrowed & ((1u << kTagBits) - 1)) == tag(); }

    CoreTableHeader* header_ = nullptr;
    CoreSlot* slots_ = nullptr;
    int first_ = 0, count_ = 0;
    int64_t renew_at_ = 0;
};

}  // namespace pdmesh
