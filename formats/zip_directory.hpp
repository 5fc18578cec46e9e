#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

/// Locates the members of a zip archive: pure functions of the file's bytes. The source of the format is
/// PKWARE's APPNOTE.TXT 6.3. Functions that read throw format_error, and what their reader throws;
/// read_zip_directory also throws system_failure if memory is short. The messages made here are sentences
/// without the path.
namespace pinflow::detail {

/// Fills the destination with a file's bytes from an offset on. Never called for bytes past the end of the
/// file.
using read_bytes = std::function<void(std::uint64_t offset_bytes, std::span<std::byte> destination)>;

/// The directory entry of one member. The sizes in a member's own header are ignored: writers that do not
/// know them in advance leave them out.
struct zip_entry {
    std::string name;  ///< UTF-8
    std::uint16_t version_needed = 0;
    std::uint16_t flags = 0;
    std::uint16_t method = 0;
    std::uint32_t crc32 = 0;
    std::uint64_t compressed_bytes = 0;
    std::uint64_t size_bytes = 0;  ///< uncompressed
    std::uint64_t header_offset_bytes = 0;
    std::uint64_t end_bytes = 0;  ///< upper bound on its end: where the next part of the file begins

    bool deflated() const noexcept { return method == 8; }
};

/// The size of a member's own header, without its name and extra fields.
inline constexpr std::size_t zip_local_size_bytes = 30;
/// The value of a 32-bit field that is too narrow for the real value.
inline constexpr std::uint32_t zip_saturated_32 = 0xFFFF'FFFF;

inline constexpr std::uint16_t zip_flag_encrypted = 1u << 0 | 1u << 6 | 1u << 13;
inline constexpr std::uint16_t zip_flag_patched = 1u << 5;
inline constexpr std::uint16_t zip_flag_utf8 = 1u << 11;

/// Reads the directory in pieces, so that no size in it has to be trusted. Refuses the whole archive for any
/// of these errors: members that are outside the file or overlap, an inconsistent count or size, names that
/// are absolute, have a part '..' or repeat, several disks, bytes before or after the archive.
std::vector<zip_entry> read_zip_directory(std::uint64_t file_size_bytes, const read_bytes& read);

/// The offset of a member's data. Checks the member's own header, and that the data ends within the member's
/// bounds.
std::uint64_t zip_data_offset_bytes(const zip_entry& entry, const read_bytes& read);

/// The defect of a member's name, to follow "is"; empty if there is none.
std::string_view zip_name_defect(std::string_view name) noexcept;

}  // namespace pinflow::detail
