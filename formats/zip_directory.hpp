#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

/// Where the members of a zip archive lie: functions of the file's bytes alone. The source of the format is
/// PKWARE's APPNOTE.TXT 6.3. All throw format_error, in a sentence without the path.
namespace pinflow::detail {

/// Fills the destination with a file's bytes from an offset on; it is never asked past the file's end.
using read_bytes = std::function<void(std::uint64_t offset_bytes, std::span<std::byte> destination)>;

/// What an archive's directory says of one member. The sizes in a member's own header are not looked at:
/// writers that do not know them in advance leave them out.
struct zip_entry {
    std::string name;  ///< UTF-8
    std::uint16_t version_needed = 0;
    std::uint16_t flags = 0;
    std::uint16_t method = 0;
    std::uint32_t crc32 = 0;
    std::uint64_t compressed_bytes = 0;
    std::uint64_t size_bytes = 0;  ///< uncompressed
    std::uint64_t header_offset_bytes = 0;
    std::uint64_t end_bytes = 0;  ///< where what comes next in the file begins, which it cannot reach into

    bool deflated() const noexcept { return method == 8; }
};

inline constexpr std::uint16_t zip_flag_encrypted = 1u << 0 | 1u << 6 | 1u << 13;
inline constexpr std::uint16_t zip_flag_patched = 1u << 5;
inline constexpr std::uint16_t zip_flag_utf8 = 1u << 11;

/// Reads the directory, in pieces, so that no size in it is taken for granted. What it shows to be wrong
/// makes the whole archive suspicious: members that lie outside the file or overlap, a count or a size that
/// does not fit, names that are absolute, lead upwards or are taken, several disks, bytes before or behind
/// the archive.
std::vector<zip_entry> read_zip_directory(std::uint64_t file_size_bytes, const read_bytes& read);

/// Where a member's data begins; it ends within the bounds of the member. Checks the member's own header.
std::uint64_t zip_data_offset_bytes(const zip_entry& entry, const read_bytes& read);

/// What is wrong with a member's name, to follow "is": empty when nothing is.
std::string_view zip_name_defect(std::string_view name) noexcept;

}  // namespace pinflow::detail
