// What Python calls. Nothing here knows of Python: its lock is not held meanwhile.
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <algorithm>

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "tiers.h"

using namespace pdmesh;

namespace {

constexpr int kMaxPieces = 64;            // of one system call
constexpr int64_t kMaxBytes = 512 << 10;  // of one system call: what came is still in the caches when it is summed
constexpr int kPollMs = 10;

struct Run {
    uint8_t* target;
    const uint8_t* source;
    int64_t num_bytes;
};

// Where a transfer through a socket stands, in a list of pieces.
struct Cursor {
    int64_t index;   // of the piece that is under way
    int64_t offset;  // in it
    uint32_t value;  // checksum of what was moved
    int32_t error;   // errno that ended a turn, or 0
};

const Tier* tier_at(int32_t index) {
    for (const Tier* list : {kArchitectureTiers, kPortableTiers, kUnsummedTiers})
        for (; list->name; list++)
            if (index-- == 0) return list;
    return nullptr;
}

// The next pieces for one system call; returns how many.
int next_pieces(const iovec* pieces, int64_t count, const Cursor& cursor, int64_t at_most, iovec* out) {
    int used = 0;
    int64_t offset = cursor.offset;
    for (int64_t index = cursor.index; index < count && used < kMaxPieces && at_most > 0; index++, offset = 0) {
        const int64_t size = std::min<int64_t>(pieces[index].iov_len - offset, at_most);
        out[used++] = {static_cast<uint8_t*>(pieces[index].iov_base) + offset, static_cast<size_t>(size)};
        at_most -= size;
    }
    return used;
}

void advance(const iovec* pieces, int64_t count, Cursor& cursor, int64_t num_bytes) {
    cursor.offset += num_bytes;
    while (cursor.index < count && cursor.offset >= static_cast<int64_t>(pieces[cursor.index].iov_len))
        cursor.offset -= pieces[cursor.index++].iov_len;
}

uint32_t sum_moved(Step sum, uint32_t value, const iovec* pieces, int64_t num_bytes) {
    uint32_t state = ~value;
    for (; num_bytes > 0; pieces++) {
        const int64_t size = std::min<int64_t>(pieces->iov_len, num_bytes);
        state = sum(state, nullptr, static_cast<const uint8_t*>(pieces->iov_base), size);
        num_bytes -= size;
    }
    return ~state;
}

// Moves pieces through the socket until all are through, max_ms have passed, or the socket has (or takes) nothing for kPollMs. What was moved is summed at once, while it is in the caches. Returns the bytes moved; cursor.error says what went wrong behind them (EPIPE: the peer has closed).
template <bool receives>
int64_t turn(Step sum, int fd, const iovec* pieces, int64_t count, Cursor& cursor, int64_t max_ms) {
    using Clock = std::chrono::steady_clock;
    const auto deadline = Clock::now() + std::chrono::milliseconds(max_ms);
    int64_t done = 0;
    iovec window[kMaxPieces];
    advance(pieces, count, cursor, 0);  // over empty pieces
    while (cursor.index < count && Clock::now() < deadline) {
        msghdr message{};
        message.msg_iov = window;
        message.msg_iovlen = next_pieces(pieces, count, cursor, kMaxBytes, window);
        const ssize_t moved = receives ? recvmsg(fd, &message, MSG_DONTWAIT) : sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (moved > 0) {
            cursor.value = sum_moved(sum, cursor.value, window, moved);
            advance(pieces, count, cursor, moved);
            done += moved;
        } else if (moved == 0) {
            cursor.error = EPIPE;
            break;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            pollfd waiting{fd, static_cast<short>(receives ? POLLIN : POLLOUT), 0};
            if (poll(&waiting, 1, kPollMs) == 0) break;
        } else if (errno != EINTR) {
            cursor.error = errno;
            break;
        }
    }
    return done;
}

}  // namespace

extern "C" {

// The name of a tier, best first, or null behind the last.
const char* pdmesh_kv_tier_name(int32_t tier) {
    const Tier* found = tier_at(tier);
    return found ? found->name : nullptr;
}

int32_t pdmesh_kv_has_tier(int32_t tier) {
    const Tier* found = tier_at(tier);
    return found && found->is_there();
}

// The checksum of what `value` is the checksum of, followed by all pieces.
uint32_t pdmesh_kv_sum(int32_t tier, uint32_t value, const iovec* pieces, int64_t count) {
    const Step sum = tier_at(tier)->sum;
    uint32_t state = ~value;
    for (int64_t i = 0; i < count; i++)
        state = sum(state, nullptr, static_cast<const uint8_t*>(pieces[i].iov_base), static_cast<int64_t>(pieces[i].iov_len));
    return ~state;
}

// Copies the runs and returns the checksum of the copies. `streams`: past the caches.
uint32_t pdmesh_kv_copy(int32_t tier, uint32_t value, const Run* runs, int64_t count, int32_t streams) {
    const Step copy = streams ? tier_at(tier)->stream : tier_at(tier)->copy;
    uint32_t state = ~value;
    for (int64_t i = 0; i < count; i++) state = copy(state, runs[i].target, runs[i].source, runs[i].num_bytes);
#if defined(__x86_64__)
    if (streams) asm volatile("sfence" ::: "memory");  // such stores are ordered by nothing else
#endif
    return ~state;
}

int64_t pdmesh_kv_receive(int32_t tier, int32_t fd, const iovec* pieces, int64_t count, Cursor* cursor, int64_t max_ms) {
    return turn<true>(tier_at(tier)->sum, fd, pieces, count, *cursor, max_ms);
}

int64_t pdmesh_kv_send(int32_t tier, int32_t fd, const iovec* pieces, int64_t count, Cursor* cursor, int64_t max_ms) {
    return turn<false>(tier_at(tier)->sum, fd, pieces, count, *cursor, max_ms);
}

}
