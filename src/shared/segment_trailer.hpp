#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace pinflow::detail {

inline constexpr std::size_t trailer_size_bytes = 4096;

/// The end of a segment's file; README.md has its layout.
struct segment_trailer {
    std::uint64_t data_offset_bytes = 0;
    std::uint64_t data_size_bytes = 0;
    bool is_writable = false;  ///< then the checksum is empty
    std::string checksum;      ///< 32 hexadecimal digits
    std::string boot_id;
    std::uint64_t pid = 0;
    std::uint32_t uid = 0;
    std::int64_t created_ns = 0;  ///< since 1970
    /// The element type if it is bfloat16 or an 8-bit float, which a .npy header cannot say; otherwise empty.
    std::string type;
};

void write_trailer(const segment_trailer& trailer, std::span<std::byte, trailer_size_bytes> bytes);

/// Reads the trailer of a file of that size. A pure function of its arguments.
/// @throws format_error (a sentence without the path) if the bytes are not a trailer, contradict the size, or
/// have a damaged checksum; unsupported for another version, and for flags that this version does not know.
segment_trailer read_trailer(std::span<const std::byte, trailer_size_bytes> bytes,
                             std::uint64_t file_size_bytes);

}  // namespace pinflow::detail
