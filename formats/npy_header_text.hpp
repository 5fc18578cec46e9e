#pragma once

#include <cstdint>
#include <string_view>

#include "pinflow/formats/npy.hpp"

namespace pinflow::detail {

/// numpy's limit on the header text, in characters; a UTF-8 character takes up to 4 bytes.
inline constexpr std::uint64_t max_npy_header_characters = 10'000;
/// The limit of numpy 2; numpy 1 allows 32.
inline constexpr std::size_t max_npy_axes = 64;
/// numpy keeps lengths and sizes in a signed 64-bit integer.
inline constexpr std::uint64_t max_npy_size_bytes = INT64_MAX;

/// Parses the text of a header, a Python dictionary. In version 3 the text is UTF-8 that was already
/// validated; in other versions it is Latin-1. `data_offset_bytes` of the result is 0.
/// @throws format_error (a sentence without the path), unsupported for pickled objects.
npy_header parse_npy_header_text(std::string_view text, unsigned major_version);

}  // namespace pinflow::detail
