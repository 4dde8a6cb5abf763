// Memory of a step that grows with it.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#include "rows.h"

namespace pdmesh {

inline std::atomic<int64_t> reserved_bytes = 0;  // what all buffers of this process have grown by

constexpr size_t kHugePage = 2 << 20;

// Zeros, 64-byte aligned. Large pieces lie in huge pages where the system has them: rows of a product are pages apart.
inline void* allocate_zeros(size_t bytes) {
    const bool is_large = bytes >= kHugePage;
    void* memory = ::operator new[](bytes, std::align_val_t(is_large ? kHugePage : 64));
#if defined(MADV_HUGEPAGE)
    if (is_large) madvise(memory, bytes, MADV_HUGEPAGE);  // refused: then not
#endif
    std::memset(memory, 0, bytes);
    return memory;
}

template <class T>
struct Buffer {  // grows, never shrinks; contents are lost when it grows
    T* reserve(size_t count) {
        if (count > size_) {
            count = std::max(count, size_ + size_ / 2);  // contexts grow step by step, buffers seldom
            reserved_bytes += static_cast<int64_t>((count - size_) * sizeof(T));
            release();  // before: two need not fit
            data_ = static_cast<T*>(allocate_zeros(count * sizeof(T)));
            size_ = count;
        }
        return data_;
    }
    T* get() const { return data_; }

    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { release(); }

  private:
    void release() {
        if (data_) ::operator delete[](data_, std::align_val_t(size_ * sizeof(T) >= kHugePage ? kHugePage : 64));
        data_ = nullptr;
        size_ = 0;
    }
    T* data_ = nullptr;
    size_t size_ = 0;
};

// Bytes from a prepared row to the next: an odd number of lines, or rows of a power of two would all lie in the same sets of a cache.
inline size_t row_stride(int units) { return static_cast<size_t>(round_up(units * 4, 64) | 64); }

constexpr int kSpareRows = 32;  // a block of matrix tiles begins at any row, and reads so many from there on

struct RowBuffer {
    Buffer<uint8_t> data;
    Buffer<float> scales, scratch;
    Buffer<int32_t> sums;
    Buffer<Outliers> outliers;
    // Room for the rows of any of these maps, and for those that a matrix tile reads beside them.
    void reserve(const PdmeshLinear& linear, int num_rows) {
        num_rows += kSpareRows;
        const size_t scales_of_rows = static_cast<size_t>(num_groups(linear)) * num_rows;
        data.reserve(row_stride(row_units(linear)) * num_rows + 64);
        scales.reserve(scales_of_rows);
        sums.reserve(scales_of_rows);
        outliers.reserve(num_rows);
        scratch.reserve(scratch_floats(linear));
    }
    Rows view(const PdmeshLinear& linear) const {
        const int units = row_units(linear);
        return {data.get(), row_stride(units), units, scales.get(), sums.get(), num_groups(linear), outliers.get()};
    }
};

}  // namespace pdmesh
