// Whether steps of a size are quicker with threads on borrowed cores: measured, as it depends on what else those cores do. All that a
// token passes on its way to a client runs on some core too, and a short step that waits for a thread beside it gains nothing.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace pdmesh {

class GuestWorth {
  public:
    // Whether to look for guests for a step of so many tokens. The choice that seems worse is tried now and then.
    bool asks(int num_tokens) const {
        const Size& size = sizes_[index_of(num_tokens)];
        if (!size.alone.is_known() || !size.together.is_known()) return size.alone.is_known();
        return size.since_tried >= kTryEvery ? !size.is_worth() : size.is_worth();
    }

    // How long it took. Where there was no guest to be had, that is a measurement of a step alone.
    void note(int num_tokens, bool had_guests, int64_t ns) {
        Size& size = sizes_[index_of(num_tokens)];
        const bool is_trial = size.alone.is_known() && size.together.is_known() && had_guests != size.is_worth();
        size.since_tried = is_trial ? 0 : size.since_tried + 1;
        (had_guests ? size.together : size.alone).add(ns);
    }

  private:
    // A running mean of nanoseconds. The first step of a size finds memory and caches cold: the second one counts in its place.
    struct Mean {
        int64_t ns = 0;
        int num_seen = 0;
        bool is_known() const { return num_seen > 1; }
        void add(int64_t next) {
            ns = num_seen > 1 ? ns + (next - ns) / 4 : next;
            num_seen = std::min(num_seen + 1, 2);
        }
    };
    struct Size {
        Mean alone, together;
        int since_tried = 0;
        bool is_worth() const { return together.ns < alone.ns; }
    };
    static constexpr int kTryEvery = 50;
    static int index_of(int num_tokens) { return std::bit_width(static_cast<uint32_t>(num_tokens)); }

    Size sizes_[33];
};

}  // namespace pdmesh
