#include "src/core/source_check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "src/core/checked.hpp"
#include "src/core/extent_stride.hpp"

namespace pinflow::detail {

namespace {

[[noreturn]] void refuse(const row_source& source, const std::string& inconsistency) {
    throw invalid_argument(
        fmt::format("the row source {} is inconsistent: {}", source.description(), inconsistency));
}

void check_row_size(const row_source& source) {
    std::uint64_t row_bytes = source.dtype().size_bytes();
    bool fits = true;
    // with a length of 0 there are no bytes, however large the other lengths
    if (std::ranges::find(source.row_shape(), 0U) != source.row_shape().end()) {
        row_bytes = 0;
    } else {
        for (const std::uint64_t length : source.row_shape())
            fits = fits && multiply(row_bytes, length, row_bytes);
    }
    if (!fits) {
        refuse(source, fmt::format("a row of shape {} in elements of {} bytes takes 2^64 bytes or more",
                                   to_string(source.row_shape()), source.dtype().size_bytes()));
    }
    if (row_bytes != source.row_size_bytes()) {
        refuse(source, fmt::format("a row of shape {} in elements of {} bytes takes {} bytes, not {}",
                                   to_string(source.row_shape()), source.dtype().size_bytes(), row_bytes,
                                   source.row_size_bytes()));
    }
    if (std::uint64_t all = 0; !multiply(source.row_count(), row_bytes, all)) {
        refuse(source,
               fmt::format("{} rows of {} bytes take 2^64 bytes or more", source.row_count(), row_bytes));
    }
}

/// Checks extent number `index`, whose rows have bytes.
void check_extent(const row_source& source, const row_extent& extent, std::size_t index) {
    const std::uint64_t size_bytes = span_bytes(extent, source.row_size_bytes());
    if (size_bytes == ~std::uint64_t{0}) {
        refuse(source, fmt::format("extent {} of {} rows, one every {} bytes, takes 2^64 bytes or more",
                                   index, extent.row_count, extent.stride_bytes));
    }
    if (extent.file == nullptr) {
        if (extent.data != nullptr) return;
        refuse(source, fmt::format("extent {} of {} rows has neither a file nor a data pointer", index,
                                   extent.row_count));
    }
    std::uint64_t end_bytes = 0;
    if (add(extent.offset_bytes, size_bytes, end_bytes) && end_bytes <= extent.file->size_bytes()) return;
    refuse(source, fmt::format("extent {}, of {} bytes at offset {}, reaches past the end of '{}', which has "
                               "{} bytes",
                               index, size_bytes, extent.offset_bytes, extent.file->path(),
                               extent.file->size_bytes()));
}

void check_extents(const row_source& source) {
    const auto extents = source.extents();
    if (extents.empty()) return;
    std::uint64_t row_count = 0;
    for (std::size_t index = 0; index < extents.size(); ++index) {
        const row_extent& extent = extents[index];
        // if the sum overflows, there are more rows than any source has
        if (!add(row_count, extent.row_count, row_count) || row_count > source.row_count()) {
            refuse(source, fmt::format("it has {} rows, and its first {} extents have more",
                                       source.row_count(), index + 1));
        }
        if (extent.row_count > 0 && source.row_size_bytes() > 0) check_extent(source, extent, index);
    }
    if (row_count != source.row_count()) {
        refuse(source, fmt::format("it has {} rows, and its {} extents have {}", source.row_count(),
                                   extents.size(), row_count));
    }
}

}  // namespace

void check_row_source(const row_source& source) {
    if (!source.dtype().is_little_endian()) {
        refuse(source, fmt::format("its elements are {}, and sources deliver little-endian ones",
                                   source.dtype().descr()));
    }
    check_row_size(source);
    check_extents(source);
}

void check_row_request(const row_source& rows, std::span<const std::uint64_t> ids,
                       std::span<const std::byte> destination) {
    const std::uint64_t row_count = rows.row_count();
    for (const std::uint64_t id : ids) {
        if (id >= row_count) {
            throw invalid_argument(
                fmt::format("row {} is out of range: {} has {} rows", id, rows.description(), row_count));
        }
    }
    std::uint64_t size_bytes = 0;
    if (!multiply(ids.size(), rows.row_size_bytes(), size_bytes) || destination.size() != size_bytes) {
        throw invalid_argument(fmt::format("{} rows of {} bytes do not fit a destination of {} bytes exactly",
                                           ids.size(), rows.row_size_bytes(), destination.size()));
    }
}

}  // namespace pinflow::detail
