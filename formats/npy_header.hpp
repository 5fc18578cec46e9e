#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace pinflow::detail {

/// Bytes that tell how long a header is: magic, version and the longest form of the length.
inline constexpr std::size_t npy_preamble_size_bytes = 12;

/// Where the data begins, from the first bytes of a file alone (npy_preamble_size_bytes, or all of a shorter
/// file). The result lies within the file and is bounded, so that many bytes can safely be read and parsed.
/// @throws format_error (a sentence without the path) for what is not the beginning of a .npy file.
std::uint64_t npy_data_offset_bytes(std::span<const std::byte> bytes, std::uint64_t file_size_bytes);

}  // namespace pinflow::detail
