#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "formats/zip_directory.hpp"
#include "pinflow/memory.hpp"

/// The data of the members of a zip archive, uncompressed. All throw format_error, in a sentence without the
/// path, for data that is not what the directory promises, and what `read_bytes` throws.
namespace pinflow::detail {

/// @throws unsupported for a member that is encrypted or compressed in a way not known here; format_error
/// when its sizes cannot both be true, so that neither is to be relied on.
void check_zip_member_readable(const zip_entry& entry);

/// Reads one member from the front to the back, in memory that does not grow with it. Not thread-safe.
class zip_member_reader {
 public:
    /// `data_offset_bytes` is where its data lies; `piece_bytes` how much is read from there at a time.
    zip_member_reader(zip_entry entry, std::uint64_t data_offset_bytes, read_bytes read,
                      std::size_t piece_bytes);
    zip_member_reader(const zip_member_reader&) = delete;
    zip_member_reader& operator=(const zip_member_reader&) = delete;
    ~zip_member_reader();

    /// Fills `destination` with what comes next. @throws invalid_argument past the member's end.
    void read(std::span<std::byte> destination);
    /// Reads what is left, and checks that the compressed data ends there, and the CRC-32 of all.
    void finish();

 private:
    struct inflation;

    zip_entry entry_;
    read_bytes read_;
    std::uint64_t position_bytes_;  // in the file
    std::uint64_t left_bytes_;      // uncompressed
    std::uint32_t crc32_ = 0;
    std::unique_ptr<inflation> inflation_;  // null for a stored member
};

/// Inflates whole members, one after the other; much faster than reading them piece by piece. Not
/// thread-safe.
class zip_inflater {
 public:
    zip_inflater();
    zip_inflater(const zip_inflater&) = delete;
    zip_inflater& operator=(const zip_inflater&) = delete;
    ~zip_inflater();

    /// Fills `destination`, as large as the deflated member, and checks its CRC-32.
    void inflate(const zip_entry& entry, std::uint64_t data_offset_bytes, const read_bytes& read,
                 std::span<std::byte> destination);

 private:
    struct decompressor;

    std::unique_ptr<decompressor> decompressor_;
    memory_region compressed_;  // kept from one member to the next
};

}  // namespace pinflow::detail
