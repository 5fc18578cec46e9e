#pragma once

#include <cstdint>

#include "src/device/row_work.hpp"

/// Parts of the kernels that move rows: the rows of an index, and rows as words of 16 bytes.
namespace pinflow::detail::cuda {

constexpr unsigned word_bytes = sizeof(uint4);
constexpr unsigned line_words = 128 / word_bytes;  // of a cache line of the GPU

inline __device__ std::uint64_t thread_number() {
    return std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}
inline __device__ std::uint64_t thread_count() {
    return std::uint64_t{gridDim.x} * blockDim.x;
}

inline __device__ bool refused(const index_errors* errors) {
    return errors != nullptr && (errors->outside_count != 0 || errors->repeated_count != 0);
}

inline __device__ std::uint64_t position_of(const row_order& order, std::uint64_t index) {
    return order.positions == nullptr ? index : order.positions[index];
}

/// Whether the previous index is the same.
inline __device__ bool is_repeated(const row_order& order, std::uint64_t index) {
    return order.sorted && index > 0 && order.ids[index - 1] == order.ids[index];
}

/// Whether the next index is the same.
inline __device__ bool is_overwritten(const row_order& order, std::uint64_t index) {
    return order.sorted && index + 1 < order.count && order.ids[index + 1] == order.ids[index];
}

/// The row at `position` of the group, in its batch.
inline __device__ unsigned char* row_of_batch(const row_transfer& work, std::uint64_t position) {
    unsigned part = 0;
    while (part + 1 < work.parts.count && position >= work.parts.first[part + 1])
        ++part;
    return reinterpret_cast<unsigned char*>(work.parts.rows[part]) +
           (position - work.parts.first[part]) * work.table.row_size_bytes;
}

/// Row number `n` of the table, or its end.
inline __device__ unsigned char* nth_row(const row_transfer& work, std::uint64_t n) {
    return reinterpret_cast<unsigned char*>(work.table.rows) + n * work.table.row_size_bytes;
}

/// The table's row for entry `index` of the order.
inline __device__ unsigned char* row_of_table(const row_transfer& work, std::uint64_t index) {
    if (work.table.by_address) return reinterpret_cast<unsigned char*>(work.order.ids[index]);
    return nth_row(work, work.compact ? index - work.begin : work.order.ids[index] - work.table.first_id);
}

/// The words between the beginning of a line and this address in it.
inline __device__ unsigned words_before_in_line(const unsigned char* address) {
    return static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(address) / word_bytes % line_words);
}

// ---- 16 bytes of any alignment ---------------------------------------------------------------------------

/// 16 bytes with access to their parts.
union word {
    uint4 whole;
    unsigned quarter[4];
    unsigned char byte[word_bytes];
};

/// A row as 16-byte aligned words: the table's row in a gather or scatter, the written row in `repeat`. It is
/// in registered host memory or in device memory. Parts of the first and the last word may belong to
/// neighbouring rows.
struct word_row {
    unsigned char* row;
    std::uint64_t row_bytes;

    __device__ unsigned before() const {  // bytes of the first word before the row
        return static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(row) % word_bytes);
    }
    __device__ std::uint64_t count() const { return (before() + row_bytes + word_bytes - 1) / word_bytes; }
    /// The bytes [begin, end) of word `index` belong to the row.
    __device__ unsigned begin(std::uint64_t index) const { return index == 0 ? before() : 0; }
    __device__ unsigned end(std::uint64_t index) const {
        const std::uint64_t rest = before() + row_bytes - index * word_bytes;
        return rest < word_bytes ? static_cast<unsigned>(rest) : word_bytes;
    }
    __device__ unsigned char* at(std::uint64_t index) const { return row - before() + index * word_bytes; }
};

/// Copies bytes [begin, end) of `value` to the same bytes at `destination`: a whole word at once or in four
/// pieces, if its alignment allows it; everything else byte by byte.
inline __device__ void store(unsigned char* destination, const word& value, unsigned begin, unsigned end) {
    const auto address = reinterpret_cast<std::uintptr_t>(destination);
    if (begin == 0 && end == word_bytes && address % word_bytes == 0) {
        __stcs(reinterpret_cast<uint4*>(destination), value.whole);
        return;
    }
    if (begin == 0 && end == word_bytes && address % 4 == 0) {
#pragma unroll
        for (unsigned i = 0; i < 4; ++i)
            reinterpret_cast<unsigned*>(destination)[i] = value.quarter[i];
        return;
    }
#pragma unroll
    for (unsigned i = 0; i < word_bytes; ++i) {
        if (i >= begin && i < end) destination[i] = value.byte[i];
    }
}

/// Loads bytes [begin, end) at `source` to the same bytes of a word.
inline __device__ word load(const unsigned char* source, unsigned begin, unsigned end) {
    word value;
    const auto address = reinterpret_cast<std::uintptr_t>(source);
    if (begin == 0 && end == word_bytes && address % word_bytes == 0) {
        value.whole = __ldcs(reinterpret_cast<const uint4*>(source));
        return value;
    }
    value.whole = make_uint4(0, 0, 0, 0);
    if (begin == 0 && end == word_bytes && address % 4 == 0) {
#pragma unroll
        for (unsigned i = 0; i < 4; ++i)
            value.quarter[i] = reinterpret_cast<const unsigned*>(source)[i];
        return value;
    }
#pragma unroll
    for (unsigned i = 0; i < word_bytes; ++i) {
        if (i >= begin && i < end) value.byte[i] = source[i];
    }
    return value;
}

/// Loads word `index` of a row of the table. The whole word is loaded at once, unless it extends beyond the
/// table. Rows by address are always loaded so, because whole pages are readable.
inline __device__ word load_from_table(const row_transfer& work, const word_row& row, std::uint64_t index) {
    const unsigned char* const at = row.at(index);
    const bool inside = work.table.by_address ||
                        (at >= nth_row(work, 0) && at + word_bytes <= nth_row(work, work.table.row_count));
    return inside ? load(at, 0, word_bytes) : load(at, row.begin(index), row.end(index));
}

}  // namespace pinflow::detail::cuda
