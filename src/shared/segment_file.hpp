#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/array.hpp"
#include "pinflow/memory.hpp"
#include "pinflow/shared/segment.hpp"
#include "src/shared/segment_folder.hpp"
#include "src/shared/segment_trailer.hpp"

namespace pinflow::detail {

/// Maps all of an open file for reading and writing. Huge pages are requested, and children made by fork do
/// not have the mapping.
/// @throws system_failure.
memory_region map_for_writing(int descriptor, const std::string& path, std::uint64_t size_bytes);

/// A segment that has no name yet: the process can be killed at any time and leaves nothing.
class segment_file {
 public:
    /// Creates a file that has its header. Call `allocate_pages` for a part of `data` before writing there.
    /// @throws invalid_argument if a .npy header cannot hold type and shape, or if the array is too large.
    /// @throws system_failure, unsupported: as publish.
    segment_file(const checked_folder& folder, std::filesystem::path path, const dtype& type,
                 const shape_vector& shape);

    int descriptor() const noexcept { return descriptor_->get(); }
    /// The path that it gets, for messages.
    const std::filesystem::path& path() const noexcept { return path_; }
    std::span<std::byte> data() const noexcept {
        return memory_.bytes().subspan(trailer_.data_offset_bytes, trailer_.data_size_bytes);
    }
    /// Allocates the pages of a part of `data`, so that no later write there can find the filesystem full and
    /// raise SIGBUS. Thread-safe.
    /// @throws system_failure, with errc::no_space_on_device if the filesystem is full.
    void allocate_pages(std::span<std::byte> part) const;
    /// Allocates the pages of all of `data`, with all cores.
    void allocate_pages() const;
    /// Unmaps the whole pages of a part of `data`. The file keeps their content. Several threads can unmap
    /// parts as they finish them; one munmap of the whole file at the end would use one thread, and add a
    /// tenth to the time of copying. Thread-safe.
    void unmap_pages(std::span<std::byte> part) const;
    /// Writes the trailer; an empty checksum makes a writable segment.
    void finish(const std::string& checksum);
    /// What is known of a finished segment.
    segment_info info(std::string name) const;
    /// Gives the mapping to the caller; `data` must not be called after that.
    memory_region give_mapping() noexcept { return std::move(memory_); }

 private:
    /// Allocates pages through the mapping.
    /// @return false if Linux has no MADV_POPULATE_WRITE (before 5.14).
    bool map_new_pages(std::span<std::byte> part) const;
    /// Runs `take`.
    /// @throws system_failure, with what helps if the filesystem is full.
    template <typename Take>
    auto fail_full_if_full(const Take& take) const;

    std::filesystem::path path_;
    std::optional<own_descriptor> descriptor_;
    pinflow::dtype type_;
    shape_vector shape_;
    segment_trailer trailer_;
    memory_region memory_;
    bool has_all_pages_ = false;  ///< from fallocate (Linux before 5.14)
    std::string folder_path_;
};

/// The minimum that a segment with `data_size_bytes` of data takes of its filesystem: the data in whole
/// pages, one page for the header, and the trailer.
std::uint64_t min_file_bytes(std::uint64_t data_size_bytes) noexcept;

/// @throws system_failure as publish if the filesystem or the machine has less room than `size_bytes` for
/// `path`.
void check_room(const checked_folder& folder, const std::filesystem::path& path, std::uint64_t size_bytes);

/// Gives a finished segment its name.
/// @throws system_failure with errc::file_exists if a segment has that name and `replace` is not set, or if a
/// group has it; what checked_folder::lock throws.
void give_name(const segment_file& file, const checked_folder& folder, const std::string& name, bool replace);

/// One segment of a group.
struct named_file {
    std::vector<std::string> names;  ///< the parts of its name in the group, which has slashes between them
    segment_file file;
};
/// Gives the segments of a group their names, all at once.
/// @throws system_failure with errc::file_exists if a group has that name and `replace` is not set, or if a
/// single segment has it; what checked_folder::lock throws.
void give_names(std::span<const named_file> files, const checked_folder& folder, const std::string& group,
                bool replace);

/// Checks that a segment or a group can get this name. For a group, removes an empty folder of that name.
/// @throws system_failure with errc::file_exists if a segment or group of this name would be in the way.
void check_name_is_free(const checked_folder& folder, const std::string& name, bool is_group, bool replace);

struct opened_segment {
    array data;
    segment_trailer trailer;
};
/// Opens a segment. The opened file may be replaced or removed later; that of a writable one may be written.
/// @throws as open_segment.
opened_segment open_checked(const checked_folder& folder, const std::vector<std::string>& names);
/// The same by its name, which is checked before the folder.
opened_segment open_named(std::string_view name, const std::filesystem::path& folder);

/// Makes the segment_info of a segment from what its header and its trailer say.
segment_info info_of(std::string name, const std::filesystem::path& path, std::uint64_t file_size_bytes,
                     const dtype& type, const shape_vector& shape, const segment_trailer& trailer);

}  // namespace pinflow::detail
