#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace pinflow::detail {

/// Bytes that give the length of a header: magic, version and the longest form of the length field.
inline constexpr std::size_t npy_preamble_size_bytes = 12;

/// The offset of the data, from the first bytes of a file (npy_preamble_size_bytes, or all of a shorter
/// file). It is within the file and bounded, so that this many bytes can safely be read and parsed.
/// @throws format_error (a sentence without the path) if the bytes are not the beginning of a .npy file.
std::uint64_t npy_data_offset_bytes(std::span<const std::byte> bytes, std::uint64_t file_size_bytes);

}  // namespace pinflow::detail
