// A team of threads that runs one region at a time: the caller is rank 0, the others wait for the next region.
//
// Waiting is spinning, then sleeping in the kernel (std::atomic::wait, a futex on Linux): workers of two processes that share
// cores must not spin against each other for long. Between regions the spinning is short. Within one it lasts about as long as a
// scheduler's tick: on a core that other processes use too, a thread that slept runs again only at the next tick, by when the
// others sleep in their turn, and so on at every barrier.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace pdmesh {

inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Team {
  public:
    // `spin_us`: how long a thread that waits for the next region spins before it sleeps.
    Team(int num_threads, int spin_us) : size_(num_threads < 1 ? 1 : num_threads), spin_(spin_us) {
        try {
            for (int rank = 1; rank < size_; rank++) threads_.emplace_back([this, rank] { serve(rank); });
        } catch (...) {  // the system refuses a thread: the others must end first
            end();
            throw;
        }
    }

    ~Team() { end(); }

    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    // Runs body(rank) on every rank; returns when all have returned. Callers take turns. Throws bad_alloc when a rank ran out of
    // memory: only a body without barriers may.
    template <class Body>
    void run(Body&& body) {
        std::lock_guard turn(turn_);
        start_over();
        if (size_ == 1) {
            body(0);
            return;
        }
        context_ = &body;
        call_ = [](void* context, int rank) { (*static_cast<std::remove_reference_t<Body>*>(context))(rank); };
        region_.fetch_add(1, std::memory_order_seq_cst);  // as in barrier()
        region_.notify_all();
        attempt(0);
        barrier();
        if (failed_.exchange(false)) throw std::bad_alloc();
    }

    // Within a region: all ranks wait for each other. What any rank wrote before is seen by all after.
    void barrier() {
        if (size_ == 1) return start_over();
        const uint32_t round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            start_over();
            // Sequentially consistent: notify_all looks for sleepers by a load, which must not overtake this store, or one that is
            // falling asleep just then is never woken.
            round_.store(round + 1, std::memory_order_seq_cst);
            round_.notify_all();
        } else {
            wait_while(round_, round, kBarrierSpin);
        }
    }

    // Within a region: the next item of the current stage (0, 1, 2, ...), each given to one rank. A barrier starts over at 0.
    int take() { return next_.fetch_add(1, std::memory_order_relaxed); }

    // Within a region: a barrier in two halves, with work between them, once between two barriers. What a rank wrote before it
    // arrives is seen by all behind `await_all`.
    void arrive() {
        early_.fetch_add(1, std::memory_order_seq_cst);  // as in barrier()
        early_.notify_all();
    }
    void await_all() {
        for (uint32_t seen; (seen = early_.load(std::memory_order_acquire)) < static_cast<uint32_t>(size_);)
            wait_while(early_, seen, kBarrierSpin);
    }

  private:
    void start_over() {
        next_.store(0, std::memory_order_relaxed);
        early_.store(0, std::memory_order_relaxed);
    }

    void serve(int rank) {
        for (uint32_t seen = 0;;) {
            wait_while(region_, seen, spin_);
            seen++;
            if (stop_) return;
            attempt(rank);
            barrier();
        }
    }

    void attempt(int rank) {
        try {
            call_(context_, rank);
        } catch (const std::bad_alloc&) {
            failed_ = true;
        }
    }

    void end() {
        stop_ = true;
        region_.fetch_add(1, std::memory_order_seq_cst);
        region_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    void wait_while(std::atomic<uint32_t>& value, uint32_t old, std::chrono::microseconds spin) {
        const auto is_new = [&] { return value.load(std::memory_order_acquire) != old; };
        for (int i = 0; i < 64; i++) {
            if (is_new()) return;
            pause_cpu();
        }
        const auto end = std::chrono::steady_clock::now() + spin;
        while (std::chrono::steady_clock::now() < end) {
            for (int i = 0; i < 16; i++) {
                if (is_new()) return;
                pause_cpu();
            }
        }
        while (!is_new()) value.wait(old, std::memory_order_acquire);
    }

    static constexpr std::chrono::microseconds kBarrierSpin{1000};

    const int size_;
    const std::chrono::microseconds spin_;
    std::vector<std::thread> threads_;
    void (*call_)(void*, int) = nullptr;
    void* context_ = nullptr;
    bool stop_ = false;
    std::mutex turn_;
    std::atomic<bool> failed_{false};
    // Each on a line of its own: they are written by different threads at different times.
    alignas(64) std::atomic<uint32_t> region_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> next_{0};
    std::atomic<uint32_t> early_{0};
};

}  // namespace pdmesh
