#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/dtype.hpp"
#include "pinflow/row_source.hpp"
#include "pinflow/rows.hpp"

/// Segments: arrays in shared memory, one copy for all processes of a user on this machine.
///
/// A segment is a .npy file in a folder of the user's own. Its data begins at a multiple of 4096 bytes (at
/// 4096, unless the header is longer), and a trailer of 4096 bytes follows it (src/shared/README.md describes
/// the trailer). numpy maps the file: `np.load(path, mmap_mode="r")`. A segment appears under its name
/// complete or not at all. If a process is killed while it publishes, no incomplete segment remains. With
/// `replace`, or for a group, a name that begins with a dot may remain. The next publisher or
/// `clean_segments` removes it. A segment stays until it is removed, the machine restarts, or
/// systemd-logind removes the shared memory of a user who has logged out (RemoveIPC, which is its default).
///
/// A name is 1 to 200 bytes of UTF-8 without slashes, control characters, line separators and marks of text
/// direction. It does not begin with a dot or end in .npy.
/// NAME/ARRAY is one of several arrays that were published together.
///
/// Every function may be called from any thread, and in any number of processes, at the same time.
namespace pinflow {

/// The default folder, `/dev/shm/pinflow-UID`. It is created when the first segment is published, for this
/// user only (mode 0700). Every function refuses a folder that is a symbolic link, belongs to another user or
/// is accessible to other users. Functions that open a segment refuse such a file too, and `list_segments`
/// reports it as a problem. `remove_segment`, and publishing with `replace`, do not check the file.
std::filesystem::path segment_folder();

/// What is known about a segment without reading its data.
struct segment_info {
    std::string name;
    std::filesystem::path path;
    std::uint64_t file_size_bytes = 0;
    /// Why the file cannot be opened as a segment, as a full sentence. Empty if it can; if not, the members
    /// below keep their defaults.
    std::string problem;
    std::optional<pinflow::dtype> dtype;
    shape_vector shape;
    std::uint64_t size_bytes = 0;  ///< of the data
    bool is_writable = false;      ///< made by writable_segment::create
    /// XXH3-128 of the data, as 32 hexadecimal digits in the order of xxhsum; empty if it is writable.
    std::string checksum;
    std::uint64_t creator_pid = 0;
    std::chrono::system_clock::time_point created;
};

struct publish_options {
    /// Replaces a segment of that name. Processes that have it open keep the old one.
    bool replace = false;
    /// For publish_file: each file that a pattern matches is one row, as open_options::stack.
    bool stack = false;
    /// Called with the bytes copied so far and the bytes of all data, by one thread at a time. It must not
    /// throw.
    std::function<void(std::uint64_t copied_bytes, std::uint64_t total_bytes)> progress = nullptr;
    std::filesystem::path folder = segment_folder();
};

/// Copies all rows of `source` into a new segment, by all cores, and computes its checksum on the way. Rows
/// that only `read_rows` can give (compressed ones) are decoded straight into it. Whether there is room is
/// checked before the first byte is copied. Each piece then takes its memory, so the call can still fail
/// if others fill the filesystem meanwhile. It then leaves no file. If RLIMIT_FSIZE is less than the size of
/// the file, the system sends SIGXFSZ. Transparent huge pages are used if the system allows them on advice.
/// @throws invalid_argument for an invalid name, for a name with a slash, and for an inconsistent source.
/// @throws system_failure with std::errc::file_exists if the name is in use and `replace` is not set, or if
/// it is in use for arrays that were published together; with no_space_on_device if the filesystem is too
/// small, and with not_enough_memory if the machine or the cgroup is.
/// Also with device_or_resource_busy, after the copy, if another process keeps the folder locked for a
/// minute.
/// @throws unsupported if the filesystem has no unnamed files (O_TMPFILE), without /proc, and for structured
/// types with a field of bfloat16 or 8-bit floats.
/// @throws data_changed if a file of the source changes meanwhile; what the source throws.
segment_info publish(std::string_view name, const row_source& source, const publish_options& options = {});

/// An array to publish, and its name within the group: one or several names, with slashes between them.
struct named_rows {
    std::string name;
    std::shared_ptr<const row_source> rows;
};

/// Publishes several arrays as NAME/ARRAY. All of them appear at once.
/// @throws system_failure with std::errc::file_exists if a group has that name and `replace` is not set, or
/// if a single segment has it.
/// @throws invalid_argument for an empty list and for names that collide; otherwise as publish.
std::vector<segment_info> publish_group(std::string_view name, std::span<const named_rows> arrays,
                                        const publish_options& options = {});

/// Publishes the array FILE[:NAME], or all files that match a pattern as one array, as open_rows does. Unlike
/// open_rows, it also takes arrays that have no axes or are in Fortran order, unless FILE is a pattern. The
/// arrays of a file with several become NAME/ARRAY, as with publish_group. Compressed arrays are decoded
/// straight into the segment: HDF5 chunks by all cores, .npz members by one. But .npz members in Fortran
/// order, or of a pattern, are first inflated into other memory. The CRC-32 of .npz members is checked,
/// unless FILE is a pattern. Each array takes a descriptor meanwhile, those of more than 4 MiB a few.
/// @throws as publish, publish_group and open.
std::vector<segment_info> publish_file(std::string_view name, const std::string& file,
                                       const publish_options& options = {});

/// Opens a segment: maps its data, read-only, and keeps a descriptor. The array and loaders of it go on if
/// the segment is removed or replaced. The checksum is not compared: see verify_segment.
/// @throws invalid_argument for an invalid name.
/// @throws system_failure with std::errc::no_such_file_or_directory if there is no such segment, and with
/// permission_denied if the folder or the file is refused (see segment_folder).
/// @throws data_changed if it is replaced again and again meanwhile.
/// @throws format_error if the file is not a complete segment; unsupported if a later version wrote it.
array open_segment(std::string_view name, const std::filesystem::path& folder = segment_folder());

/// The path that open_segment opens, after the same checks: for programs that map the file themselves.
/// @throws as open_segment.
std::filesystem::path find_segment(std::string_view name,
                                   const std::filesystem::path& folder = segment_folder());

/// Lists all segments, in order of their names, and files in the folder that are none (see
/// segment_info::problem). Empty if there is no folder.
/// @throws system_failure if the folder is refused or cannot be read.
std::vector<segment_info> list_segments(const std::filesystem::path& folder = segment_folder());

/// Reads all data and compares their checksum with the one of the trailer. `progress` is called as
/// publish_options::progress.
/// @throws as open_segment; format_error if they differ; unsupported for a writable segment, which has none.
void verify_segment(
    std::string_view name, const std::filesystem::path& folder = segment_folder(),
    const std::function<void(std::uint64_t read_bytes, std::uint64_t total_bytes)>& progress = nullptr);

/// Removes a segment, or a group with all of its arrays, or one array of a group. Processes that have it
/// open keep it.
/// @throws invalid_argument for an invalid name.
/// @throws system_failure with std::errc::no_such_file_or_directory if there is no such segment, with
/// permission_denied if a folder is refused, and with device_or_resource_busy if another process keeps the
/// folder locked for a minute.
void remove_segment(std::string_view name, const std::filesystem::path& folder = segment_folder());

/// Removes what killed processes have left (names that begin with a dot, empty folders), and .npy files that
/// are not complete segments. A segment that cannot be opened for another reason stays.
/// @return the removed paths.
/// @throws system_failure if the folder is refused, or another process keeps it locked for a minute.
std::vector<std::filesystem::path> clean_segments(const std::filesystem::path& folder = segment_folder());

/// A segment that one writer at a time may change, and any number of processes read: a table that outlives
/// its process. It has no checksum. Readers open it with open_segment and see changes at once, so they may
/// see a row that is only partly written. A moved-from segment has no bytes, and its `table` throws
/// invalid_argument.
///
/// The lock of a writer ends with the object and its tables, or with its process, however that ends. A child
/// process made by fork has neither the memory nor the lock.
class writable_segment {
 public:
    /// Creates a segment of zeros, and opens it for writing.
    /// @throws as publish.
    static writable_segment create(std::string_view name, const pinflow::dtype& type, shape_vector shape,
                                   const std::filesystem::path& folder = segment_folder());
    /// Opens an existing one.
    /// @throws as open_segment; unsupported if it was published, with a checksum; system_failure with
    /// std::errc::device_or_resource_busy if it has a writer.
    explicit writable_segment(std::string_view name, const std::filesystem::path& folder = segment_folder());

    const pinflow::dtype& dtype() const noexcept { return dtype_; }
    const shape_vector& shape() const noexcept { return shape_; }
    /// The elements in C order, in shared memory; valid while this object, or a table of it, lives.
    std::span<std::byte> bytes() const noexcept;
    /// The rows, for a row_exchange; they keep the memory and the lock.
    /// @throws unsupported if the array has no axes; invalid_argument if a row has no bytes.
    row_table table() const;

 private:
    struct state;
    explicit writable_segment(std::shared_ptr<const state> opened);

    std::shared_ptr<const state> state_;
    pinflow::dtype dtype_;
    shape_vector shape_;
};

}  // namespace pinflow
