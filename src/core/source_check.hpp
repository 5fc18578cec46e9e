#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "pinflow/row_source.hpp"

namespace pinflow::detail {

/// Checks that the members of a source are consistent, before they are used to allocate or read.
/// @throws invalid_argument, with the source's description and the numbers, if
/// - row_size_bytes differs from what row_shape and dtype take, or a size overflows 64 bits;
/// - the extents, if there are any, have more or fewer rows than the source;
/// - an extent has neither a file nor data, takes 2^64 bytes or more, or ends past the end of its file.
void check_row_source(const row_source& source);

/// Checks the arguments of row_source::read_rows.
/// @throws invalid_argument for rows out of range, and for a destination of another size.
void check_row_request(const row_source& rows, std::span<const std::uint64_t> ids,
                       std::span<const std::byte> destination);

}  // namespace pinflow::detail
