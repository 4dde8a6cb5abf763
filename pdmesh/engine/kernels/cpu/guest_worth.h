// Whether steps of a size are quicker with threads on borrowed cores: measured, as it depends on what else those cores do. All that a
// token passes on its way to a client runs on some core too, and a short step that waits for a thread beside it gains nothing.
#pragma once

#include <bit>
#include <cstdint>

namespace pdmesh {

class GuestWorth {
  public:
    // Whether to look for guests for a step of so many tokens. The choice that seems worse is tried now and then.
    bool asks(int num_tokens) {
        Size& size = sizes_[index_of(num_tokens)];
        if (!size.alone || !size.together) return !size.together && size.alone;  // one of each first
        const bool seems_worth = size.together < size.alone;
        return size.since_tried >= kTryEvery ? !seems_worth : seems_worth;
    }

    // How long it took. Where there was no guest to be had, that is a measurement of a step alone.
    void note(int num_tokens, bool had_guests, int64_t ns) {
        Size& size = sizes_[index_of(num_tokens)];
        const bool is_trial = size.alone && size.together && had_guests != (size.together < size.alone);
        size.since_tried = is_trial ? 0 : size.since_tried + 1;
        int64_t& mean = had_guests ? size.together : size.alone;
        mean = mean ? mean + (ns - mean) / 4 : ns;
    }

  private:
    struct Size {
        int64_t alone = 0, together = 0;  // running means, nanoseconds; 0: not known
        int since_tried = 0;
    };
    static constexpr int kTryEvery = 50;
    static int index_of(int num_tokens) { return std::bit_width(static_cast<uint32_t>(num_tokens)); }

    Size sizes_[33];
};

}  // namespace pdmesh
