#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "formats/zip_directory.hpp"
#include "pinflow/memory.hpp"

/// Reads and inflates the members of a zip archive. Functions that read throw format_error (a sentence
/// without the path) for data that contradicts the directory, what `read_bytes` throws, and std::bad_alloc.
namespace pinflow::detail {

/// Checks that a member can be read.
/// @throws unsupported for a member that is encrypted, is a patch of other data, uses an unknown compression
/// method, or needs a later version of the format than 6.3.
/// @throws format_error if its compressed and uncompressed sizes contradict each other.
void check_zip_member_readable(const zip_entry& entry);

/// Reads one member sequentially, in constant memory. Not thread-safe.
class zip_member_reader {
 public:
    /// @param data_offset_bytes the offset of the member's data.
    /// @param piece_bytes how many bytes of a deflated member to read at a time. A stored member is read
    /// directly to the destination.
    /// @throws as check_zip_member_readable.
    zip_member_reader(zip_entry entry, std::uint64_t data_offset_bytes, read_bytes read,
                      std::size_t piece_bytes);
    zip_member_reader(const zip_member_reader&) = delete;
    zip_member_reader& operator=(const zip_member_reader&) = delete;
    ~zip_member_reader();

    /// Fills `destination` with the next bytes.
    /// @throws invalid_argument past the member's end.
    void read(std::span<std::byte> destination);
    /// Reads the rest, checks that the compressed data ends there, and checks the CRC-32 of the whole member.
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

    /// Inflates the member into `destination`, which has `entry.size_bytes` (the uncompressed size), and
    /// checks its CRC-32. The compressed bytes are read into memory first.
    /// @throws invalid_argument for a destination of another size; system_failure if there is no memory for
    /// the compressed bytes.
    void inflate(const zip_entry& entry, std::uint64_t data_offset_bytes, const read_bytes& read,
                 std::span<std::byte> destination);

 private:
    struct decompressor;

    std::unique_ptr<decompressor> decompressor_;
    memory_region compressed_;  // reused for the next member
};

}  // namespace pinflow::detail
