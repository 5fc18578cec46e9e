#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "pinflow/array.hpp"
#include "pinflow/row_source.hpp"

namespace pinflow::detail {

/// The elements of one array in C order and little-endian, read once from the front to the back, in memory
/// that does not grow with the array: what conversion reads from. Not thread-safe.
class element_stream {
 public:
    element_stream() = default;
    element_stream(const element_stream&) = delete;
    element_stream& operator=(const element_stream&) = delete;
    virtual ~element_stream() = default;

    /// Of the elements as they are delivered: little-endian.
    virtual const pinflow::dtype& dtype() const noexcept = 0;
    virtual const shape_vector& shape() const noexcept = 0;
    /// Fills `destination`, a whole number of elements, with those that come next.
    /// @throws invalid_argument past the end, data_changed, system_failure, format_error.
    virtual void read(std::span<std::byte> destination) = 0;
    /// @throws what is wrong with the array, if only its end shows it (a checksum, a file that changed
    /// meanwhile); to be called after the last element.
    virtual void finish() = 0;
};

/// Of any opened array: in C or Fortran order, strided, big-endian, without axes. Files are read with pread.
/// `memory_bytes` bounds what reordering may take.
std::unique_ptr<element_stream> stream_elements(const array& array, std::uint64_t memory_bytes);

/// Of rows, one after the other; the shape is (row_count, row_shape...). `memory_bytes` bounds what is read
/// at a time, which is one row at least.
std::unique_ptr<element_stream> stream_rows(std::shared_ptr<const row_source> rows,
                                            std::uint64_t memory_bytes);

}  // namespace pinflow::detail
