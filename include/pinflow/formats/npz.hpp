#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/formats/listing.hpp"

namespace pinflow {

/// The arrays of a .npz file (a zip of .npy members), in the order of its directory, under their names
/// without ".npy". Reads the directory and each member's .npy header, of a deflated member no more than that.
/// What is wrong with one member (it is no array, damaged, encrypted, or compressed in a way that pinflow
/// does not know) is the reason in its listing. The source of the format is PKWARE's APPNOTE.TXT 6.3.
/// @throws system_failure, format_error for what is wrong with the archive (no directory, entries that lie
/// outside the file or overlap, names that are absolute or lead upwards, two members of one name, bytes
/// before or behind it); each message names the path.
std::vector<array_listing> list_npz(const std::filesystem::path& path);

/// Opens one array; `name` may end in ".npy". A stored member is mapped where it lies; a deflated one is
/// inflated into memory of the process's own, never more than its header promises, and its CRC-32 checked.
/// (The CRC of a mapped member is not checked, since that would read it: see `pinflow verify`.)
/// @throws invalid_argument when there is no such member; what list_npz throws; unsupported; format_error for
/// a member whose size or CRC-32 is wrong.
array open_npz(const std::filesystem::path& path, std::string_view name);

/// Opens several, the deflated ones side by side on all cores. In the order of `names`.
std::vector<array> open_npz(const std::filesystem::path& path, std::span<const std::string> names);
inline std::vector<array> open_npz(const std::filesystem::path& path,
                                   std::initializer_list<const char*> names) {
    return open_npz(path, std::vector<std::string>(names.begin(), names.end()));
}

/// Writes a .npz file of stored (not compressed) members, each array's data beginning at a multiple of 4096
/// so that it can be mapped; atomically, as write_npy. numpy reads it, and so does unzip. zip64 where sizes
/// need it. Not thread-safe. A moved-from writer throws invalid_argument.
class npz_writer {
 public:
    explicit npz_writer(const std::filesystem::path& path, std::uint64_t alignment_bytes = 4096);
    npz_writer(npz_writer&&) noexcept;
    npz_writer& operator=(npz_writer&&) noexcept;
    /// Without `finish`, what was written is thrown away.
    ~npz_writer();

    /// Begins the member `name`.npy, a C-order array; the one before must be complete.
    /// @throws invalid_argument for a name that is empty, taken, absolute or leads upwards.
    void begin(std::string_view name, const pinflow::dtype& type, const shape_vector& shape);
    /// Appends elements of the member begun last; pieces may be cut anywhere. @throws invalid_argument past
    /// the size that the shape promises.
    void write(std::span<const std::byte> bytes);
    /// Writes the directory and makes the file durable under its name. @throws invalid_argument when bytes
    /// are missing, system_failure.
    void finish();

 private:
    struct state;
    state& valid_state() const;

    std::unique_ptr<state> state_;
};

}  // namespace pinflow
