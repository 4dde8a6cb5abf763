// A team of threads that runs one region at a time: the caller is rank 0, the others wait for the next region.
//
// Waiting is spinning, then sleeping in the kernel (std::atomic::wait, a futex on Linux): workers of two processes that share
// cores must not spin against each other for long. Between regions the spinning is short. Within one it lasts about as long as a
// scheduler's tick: on a core that other processes use too, a thread that slept runs again only at the next tick, by when the
// others sleep in their turn, and so on at every barrier.
//
// Behind its own threads a team may have guests: threads that compute on cores that other workers lend (core_table.h). They join a
// region that is for them (`run_with_guests`) when it starts or at one of its boundaries, and leave at any barrier. A guest whose core
// is wanted takes no further piece of work, so that its core is free when the piece at hand is done; the next barrier sends it away.
// On a host where other programs use the cores that the table calls free, waiting for a guest may cost more than it brings: when the
// others have waited for one for longer than a scheduler's turn, there are none for four times as long, so that a fifth of the time
// is the most that can be lost.
// Ranks are always 0 to size() - 1, and size() changes only while all of them stand at a barrier.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#include <unistd.h>
#endif

#include "core_table.h"

namespace pdmesh {

inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Where the system can: this thread runs on that core alone; -1: on all that the process's main thread may run on.
inline void bind_to_core([[maybe_unused]] int core) {
#if defined(__linux__)
    cpu_set_t cores;
    CPU_ZERO(&cores);
    if (core >= 0 && core < CPU_SETSIZE) {
        CPU_SET(core, &cores);
        if (sched_setaffinity(0, sizeof(cores), &cores) == 0) return;
    }
    if (sched_getaffinity(getpid(), sizeof(cores), &cores) == 0) sched_setaffinity(0, sizeof(cores), &cores);
#endif
}

class Team {
  public:
    // `spin_us`: how long a thread that waits for the next region spins before it sleeps. Up to `max_guests` threads on cores of `cores`.
    Team(int num_threads, int spin_us, const CoreTable& cores = {}, int max_guests = 0)
        : own_(num_threads < 1 ? 1 : num_threads), spin_(spin_us), cores_(cores), guests_(max_guests < 0 ? 0 : max_guests), size_(own_) {
        try {
            for (int rank = 1; rank < own_; rank++) threads_.emplace_back([this, rank] { serve(rank); });
            for (int rank = own_; rank < capacity(); rank++) threads_.emplace_back([this, rank] { serve_as_guest(rank); });
        } catch (...) {  // the system refuses a thread: the others must end first
            end();
            throw;
        }
    }

    ~Team() { end(); }

    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    // Ranks of the present region, guests included; between regions its own threads.
    int size() const { return size_.load(std::memory_order_relaxed); }
    // Its own threads: the least that size() can be.
    int own_size() const { return own_; }
    // The most that size() can be: what belongs to a rank is made so often.
    int capacity() const { return own_ + static_cast<int>(guests_.size()); }

    // Runs body(rank) on every rank; returns when all have returned. Callers take turns. Throws bad_alloc when a rank ran out of
    // memory: only a body without barriers may.
    template <class Body>
    void run(Body&& body) {
        std::lock_guard turn(turn_);
        auto call = [&](int rank, int) { body(rank); };
        run_region(call);
    }

    // The same with guests, if `asks`; returns whether there was one. body(rank, place), where place is kStart, or that of the boundary
    // at which a guest joined. A guest may be sent away at any barrier, by an exception that body lets pass.
    template <class Body>
    bool run_with_guests(bool asks, Body&& body) {
        std::lock_guard turn(turn_);
        had_guests_ = false;
        if (!cores_.is_there()) {
            run_region(body);
            return false;
        }
        is_lending_ = true;
        asks_ = asks && !guests_.empty();
        struct Farewell {
            Team& team;
            ~Farewell() { team.end_with_guests(); }
        } farewell{*this};
        const int64_t now = CoreTable::now_ms();
        cores_.want(now);
        admit(kStart, now);
        run_region(body);
        return had_guests_;
    }

    // The owner has nothing to compute: others may use its cores. Wait for no region.
    void rest() {
        std::lock_guard turn(turn_);
        cores_.rest();
    }

    // How many ranks the next region with guests will have, more or less.
    int expected_size() const { return std::max(own_, expected_.load(std::memory_order_relaxed)); }

    // Within a region: all ranks wait for each other. What any rank wrote before is seen by all after.
    void barrier() {
        meet([this] {
            if (!is_lending_) return;
            const int64_t now = CoreTable::now_ms();
            cores_.want(now);
            send_away(now);
        });
    }

    // Within a region with guests: a barrier at which guests may join. `place`: from where they have to go on.
    void boundary(int place) {
        if (!is_lending_ || guests_.empty()) return;
        meet([this, place] {
            const int64_t now = CoreTable::now_ms();
            cores_.want(now);
            send_away(now);
            admit(place, now);
        });
    }

    // Within a region: the next item of the current stage (0, 1, 2, ...), each given to one rank. A barrier starts over at 0. Nothing
    // for a guest whose core is wanted: as much as to say that there is no item left.
    int take() {
        if (const int slot = own_slot(); slot >= 0 && cores_.is_wanted(slot)) return kNothing;
        return next_.fetch_add(1, std::memory_order_relaxed);
    }

    // Within a region: a barrier in two halves, with work between them, once between two barriers. What a rank wrote before it
    // arrives is seen by all behind `await_all`.
    void arrive() {
        early_.fetch_add(1, std::memory_order_seq_cst);  // as in meet()
        early_.notify_all();
    }
    void await_all() {
        for (uint32_t seen; (seen = early_.load(std::memory_order_acquire)) < static_cast<uint32_t>(size());)
            wait_while(early_, seen, kBarrierSpin);
    }

    static constexpr int kStart = -1;

  private:
    struct SentAway {};

    // Written by the rank that is last at a barrier, or by the caller while no region runs; read by the guest behind that barrier.
    struct alignas(64) Guest {
        std::atomic<uint32_t> calls{0};  // how often it was told to join
        std::atomic<bool> is_sent_away{false};
        std::atomic<int> slot{-1};
        int place = kStart;
        int64_t since_ms = 0;
    };

    // What the present thread is, where it is a guest.
    struct Here {
        const Team* team = nullptr;
        int guest = 0;
    };
    static thread_local Here here;

    template <class Body>
    void run_region(Body& body) {
        start_over();
        if (capacity() == 1) {
            body(0, kStart);
            return;
        }
        context_ = &body;
        call_ = [](void* context, int rank, int place) { (*static_cast<std::remove_reference_t<Body>*>(context))(rank, place); };
        const auto [first, last] = uncalled();
        region_.fetch_add(1, std::memory_order_seq_cst);  // as in meet()
        if (own_ > 1) region_.notify_all();
        call_guests(first, last);
        attempt(0, kStart);
        meet([] {});  // none is sent away here: there is nothing behind it
        if (failed_.exchange(false)) throw std::bad_alloc();
    }

    // All ranks wait for each other; the last one calls `between`, which may change which they are.
    template <class Between>
    void meet(const Between& between) {
        const int size = this->size();
        if (size == 1) {
            start_over();
            between();
            const auto [first, last] = uncalled();
            return call_guests(first, last);
        }
        const uint32_t round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            arrived_.store(0, std::memory_order_relaxed);
            start_over();
            between();
            const auto [first, last] = uncalled();
            // Sequentially consistent: notify_all looks for sleepers by a load, which must not overtake this store, or one that is
            // falling asleep just then is never woken.
            round_.store(round + 1, std::memory_order_seq_cst);
            round_.notify_all();
            call_guests(first, last);
        } else {
            const int64_t slept_ms = wait_while(round_, round, kBarrierSpin);
            if (slept_ms >= kLateMs && size > own_ && here.team != this) waited_ms_.store(slept_ms, std::memory_order_relaxed);
        }
        if (here.team == this && guests_[here.guest].is_sent_away.load(std::memory_order_relaxed)) throw SentAway{};
    }

    // Where this thread is a guest of this team, on the core that it has or had last; else -1.
    int own_slot() const { return here.team == this ? guests_[here.guest].slot.load(std::memory_order_relaxed) : -1; }

    void start_over() {
        next_.store(0, std::memory_order_relaxed);
        early_.store(0, std::memory_order_relaxed);
    }

    // Guests join on cores that are free. They hear of it by `call_guests`, when all that they will read is written.
    void admit(int place, int64_t now) {
        if (!asks_) return;
        if (const int64_t waited = waited_ms_.exchange(0, std::memory_order_relaxed)) alone_until_ = now + 4 * waited;
        if (now < alone_until_) return;
        for (int rank = size(); rank < capacity(); rank++) {
            Guest& guest = guests_[rank - own_];
            if (guest.is_sent_away.load(std::memory_order_acquire)) return;  // it has not heard of it yet
            const int slot = cores_.borrow(now);
            if (slot < 0) return;
            guest.slot.store(slot, std::memory_order_relaxed);
            guest.place = place;
            guest.since_ms = now;
            size_.store(rank + 1, std::memory_order_relaxed);
            had_guests_ = true;
        }
    }

    // Guests that were admitted and do not know it. To be asked before others go on: without these guests they come no further than
    // the next barrier, but where there are none, they may change everything that is read here.
    std::pair<int, int> uncalled() {
        const int first = called_;
        called_ = size() - own_;
        return {first, called_};
    }
    void call_guests(int first, int last) {
        for (int guest = first; guest < last; guest++) {
            guests_[guest].calls.fetch_add(1, std::memory_order_seq_cst);  // as in meet()
            guests_[guest].calls.notify_one();
        }
    }

    void end_with_guests() {
        is_lending_ = false;
        expected_.store(size(), std::memory_order_relaxed);
        keep_only(own_, size() > own_ ? CoreTable::now_ms() : 0);
    }

    // Ranks stay without a gap: one behind a guest whose core is wanted goes too, and may come back at the next boundary.
    void send_away(int64_t now) {
        for (int rank = own_; rank < size(); rank++) {
            const int slot = guests_[rank - own_].slot.load(std::memory_order_relaxed);
            if (cores_.is_wanted(slot, now) || waited_ms_.load(std::memory_order_relaxed)) {
                for (int other = rank; other < size(); other++) guests_[other - own_].is_sent_away.store(true, std::memory_order_relaxed);
                return keep_only(rank, now);
            }
            cores_.keep(slot, now);
        }
    }

    void keep_only(int count, int64_t now) {
        for (int rank = count; rank < size(); rank++) {
            const Guest& guest = guests_[rank - own_];
            cores_.give_back(guest.slot.load(std::memory_order_relaxed), now - guest.since_ms);
        }
        called_ = std::min(called_, count - own_);
        size_.store(count, std::memory_order_relaxed);
    }

    void serve(int rank) {
        for (uint32_t seen = 0;;) {
            wait_while(region_, seen, spin_);
            seen++;
            if (stop_) return;
            attempt(rank, kStart);
            meet([] {});
        }
    }

    void serve_as_guest(int rank) {
        here = {this, rank - own_};
        Guest& guest = guests_[here.guest];
        int core = -2;  // those of the thread that made this one, to which the worker may be bound
        for (uint32_t seen = 0;;) {
            wait_while(guest.calls, seen, spin_);
            seen++;
            if (stop_) return;
            if (const int lent = cores_.core_of(guest.slot.load(std::memory_order_relaxed)); lent != core) bind_to_core(core = lent);
            try {
                attempt(rank, guest.place);
                meet([] {});
            } catch (const SentAway&) {
                guest.is_sent_away.store(false, std::memory_order_release);
            }
        }
    }

    void attempt(int rank, int place) {
        try {
            call_(context_, rank, place);
        } catch (const std::bad_alloc&) {
            failed_ = true;
        }
    }

    void end() {
        stop_ = true;
        region_.fetch_add(1, std::memory_order_seq_cst);
        region_.notify_all();
        for (Guest& guest : guests_) {
            guest.calls.fetch_add(1, std::memory_order_seq_cst);
            guest.calls.notify_all();
        }
        for (auto& thread : threads_) thread.join();
        cores_.rest();
    }

    // Returns the milliseconds that it slept.
    int64_t wait_while(std::atomic<uint32_t>& value, uint32_t old, std::chrono::microseconds spin) {
        const auto is_new = [&] { return value.load(std::memory_order_acquire) != old; };
        for (int i = 0; i < 64; i++) {
            if (is_new()) return 0;
            pause_cpu();
        }
        const int slot = own_slot();  // where its core is wanted, a guest does not spin
        const auto end = std::chrono::steady_clock::now() + spin;
        while (std::chrono::steady_clock::now() < end && (slot < 0 || !cores_.is_wanted(slot))) {
            for (int i = 0; i < 16; i++) {
                if (is_new()) return 0;
                pause_cpu();
            }
        }
        const int64_t asleep = CoreTable::now_ms();
        while (!is_new()) value.wait(old, std::memory_order_acquire);
        return CoreTable::now_ms() - asleep;
    }

    static constexpr std::chrono::microseconds kBarrierSpin{1000};
    static constexpr int64_t kLateMs = 4;
    static constexpr int kNothing = 1 << 22;  // more than any stage has, and small enough to be multiplied

    const int own_;
    const std::chrono::microseconds spin_;
    std::vector<std::thread> threads_;
    void (*call_)(void*, int, int) = nullptr;
    void* context_ = nullptr;
    bool stop_ = false;
    std::mutex turn_;
    std::atomic<bool> failed_{false};
    CoreTable cores_;
    std::vector<Guest> guests_;
    bool is_lending_ = false, asks_ = false;  // of the present region: it goes by the table of cores, and looks for guests
    bool had_guests_ = false;
    int called_ = 0;           // guests that were told to join
    std::atomic<int> expected_{0};
    std::atomic<int64_t> waited_ms_{0};  // for a guest, at the last barrier
    int64_t alone_until_ = 0;
    std::atomic<int> size_;
    // Each on a line of its own: they are written by different threads at different times.
    alignas(64) std::atomic<uint32_t> region_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> next_{0};
    std::atomic<uint32_t> early_{0};
};

inline thread_local Team::Here Team::here;

}  // namespace pdmesh
