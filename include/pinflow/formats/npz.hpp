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

/// Lists the arrays of a .npz file (a zip of .npy members), in the order of its directory, by their names
/// without ".npy". Reads only the directory and each member's .npy header. If a member is no array, is
/// damaged or encrypted, or uses an unknown compression method, its listing has the reason. The source of the
/// format is PKWARE's APPNOTE.TXT 6.3.
/// @throws format_error for a damaged archive: no directory, entries that are outside the file or overlap,
/// names that are absolute or have a part '..', two members of one name, bytes before or after the archive.
/// @throws system_failure. Each message names the path.
std::vector<array_listing> list_npz(const std::filesystem::path& path);

/// Opens one array; `name` may end in ".npy". A stored member is mapped in place. A deflated member is
/// inflated into the process's own memory, never beyond the size in its header, and its CRC-32 is checked.
/// The CRC-32 of a mapped member is not checked, since that would read all of it (`pinflow convert` and
/// `pinflow pin` check it).
/// @throws invalid_argument if there is no such member.
/// @throws format_error for a member whose size or CRC-32 is wrong.
/// @throws unsupported; what list_npz throws.
array open_npz(const std::filesystem::path& path, std::string_view name);

/// Opens several arrays, in the order of `names`; inflates deflated members in parallel on all cores.
std::vector<array> open_npz(const std::filesystem::path& path, std::span<const std::string> names);
inline std::vector<array> open_npz(const std::filesystem::path& path,
                                   std::initializer_list<const char*> names) {
    return open_npz(path, std::vector<std::string>(names.begin(), names.end()));
}

/// Writes a .npz file of stored (uncompressed) members, atomically as write_npy. The data of each array
/// begins at a multiple of `alignment_bytes`, so that it can be mapped. numpy and unzip can read the file; it
/// uses zip64 if sizes need it. Not thread-safe. A moved-from writer throws invalid_argument.
class npz_writer {
 public:
    /// Begins a file without members.
    /// @throws invalid_argument unless `alignment_bytes` is a power of two from 16 to 8192.
    /// @throws system_failure if the file cannot be created.
    explicit npz_writer(const std::filesystem::path& path, std::uint64_t alignment_bytes = 4096);
    npz_writer(npz_writer&&) noexcept;
    npz_writer& operator=(npz_writer&&) noexcept;
    /// Discards the file unless `finish` has put it in place.
    ~npz_writer();

    /// Begins the member `name`.npy, a C-order array. ".npy" is appended even if the name ends in it. The
    /// member before must be complete.
    /// @throws invalid_argument for a name that is empty, already used, absolute, too long, not UTF-8, or has
    /// a part '..' or a zero byte, and for a header that numpy would not read; system_failure.
    void begin(std::string_view name, const pinflow::dtype& type, const shape_vector& shape);
    /// Appends elements to the current member; a piece may end within an element.
    /// @throws invalid_argument for more bytes than the shape has; system_failure.
    void write(std::span<const std::byte> bytes);
    /// Writes the directory, makes the file durable and renames it into place. If only the last step fails,
    /// fsync of the folder, the new file is in place but may not survive a power failure.
    /// @throws invalid_argument if bytes are missing; system_failure.
    void finish();

 private:
    struct state;
    state& valid_state() const;

    std::unique_ptr<state> state_;
};

}  // namespace pinflow
