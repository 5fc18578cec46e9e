#pragma once

#include <algorithm>
#include <cstdint>

#include "pinflow/row_source.hpp"
#include "src/core/checked.hpp"

/// Where the rows of an extent lie.
namespace pinflow::detail {

/// Bytes from the start of one row to the start of the next.
constexpr std::uint64_t stride_of(const row_extent& extent, std::uint64_t row_size_bytes) noexcept {
    return extent.stride_bytes == 0 ? row_size_bytes : extent.stride_bytes;
}

/// Whether the rows neither overlap nor leave gaps.
constexpr bool is_contiguous(const row_extent& extent, std::uint64_t row_size_bytes) noexcept {
    return extent.row_count <= 1 || stride_of(extent, row_size_bytes) == row_size_bytes;
}

/// Whether the rows of each extent are contiguous; also true without extents.
inline bool has_contiguous_extents(const row_source& source) {
    return std::ranges::all_of(source.extents(), [&](const row_extent& extent) {
        return is_contiguous(extent, source.row_size_bytes());
    });
}

/// Bytes from the start of the first row to the end of the last, or 2^64 - 1 if they do not fit 64 bits.
constexpr std::uint64_t span_bytes(const row_extent& extent, std::uint64_t row_size_bytes) noexcept {
    if (extent.row_count == 0 || row_size_bytes == 0) return 0;
    return saturated(extent.row_count - 1, stride_of(extent, row_size_bytes), row_size_bytes);
}

}  // namespace pinflow::detail
