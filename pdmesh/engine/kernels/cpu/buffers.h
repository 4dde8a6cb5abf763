// Memory of a step that grows with it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>

#include "rows.h"

namespace pdmesh {

inline std::atomic<int64_t> reserved_bytes = 0;  // what all buffers of this process have grown by

template <class T>
struct Buffer {  // 64-byte aligned, grows, never shrinks; contents are lost when it grows
    std::unique_ptr<T[], void (*)(T*)> data{nullptr, [](T* p) { ::operator delete[](p, std::align_val_t(64)); }};
    size_t size = 0;
    T* reserve(size_t count) {
        if (count > size) {
            count = std::max(count, size + size / 2);  // contexts grow step by step, buffers seldom
            reserved_bytes += static_cast<int64_t>((count - size) * sizeof(T));
            data.reset(static_cast<T*>(::operator new[](count * sizeof(T), std::align_val_t(64))));
            std::memset(static_cast<void*>(data.get()), 0, count * sizeof(T));
            size = count;
        }
        return data.get();
    }
    T* get() const { return data.get(); }
};

struct RowBuffer {
    Buffer<uint8_t> data;
    Buffer<float> scales, scratch;
    Buffer<int32_t> sums;
    Buffer<Outliers> outliers;
    // Room for the rows of any of these maps.
    void reserve(const PdmeshLinear& linear, int num_rows) {
        const size_t scales_of_rows = static_cast<size_t>(num_groups(linear)) * num_rows;
        data.reserve(static_cast<size_t>(round_up(row_units(linear) * 4, 64)) * num_rows + 64);
        scales.reserve(scales_of_rows);
        sums.reserve(scales_of_rows);
        outliers.reserve(num_rows);
        scratch.reserve(scratch_floats(linear));
    }
    Rows view(const PdmeshLinear& linear) const {
        const int units = row_units(linear);
        return {data.get(), static_cast<size_t>(round_up(units * 4, 64)), units, scales.get(), sums.get(), num_groups(linear), outliers.get()};
    }
};

}  // namespace pdmesh
