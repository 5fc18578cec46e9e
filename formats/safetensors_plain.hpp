#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

#include "formats/safetensors_tensor.hpp"

namespace pinflow::detail {

/// Headers of 1 MiB and more are parsed in parts of about this size, in parallel.
inline constexpr std::size_t plain_part_bytes = std::size_t{64} << 10;

/// Parses the JSON of a header as known writers usually make it: ASCII, strings without escapes, a tensor
/// with its three keys, and at most 64 KiB of metadata. With one thread, four times as fast as the JSON
/// library.
/// @param part_bytes the size of parts. A header of less than 16 times that size is one part.
/// @return nothing for any other header, valid or not. Names may occur twice. Offsets are relative to the
/// beginning of the data.
/// @throws format_error as checked_tensor, for the tensor that comes first in a plain header.
std::optional<header_content> parse_plain_header(std::string_view json,
                                                 std::size_t part_bytes = plain_part_bytes);

}  // namespace pinflow::detail
