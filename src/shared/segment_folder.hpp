#pragma once

#include <sys/stat.h>

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "src/shared/own_descriptor.hpp"

namespace pinflow::detail {

/// The names between the slashes of a segment's name.
/// @throws invalid_argument unless each is a name as pinflow/shared/segment.hpp says.
std::vector<std::string> parse_segment_name(std::string_view name);

/// Whether `status` is that of a file or a folder of this user, to which no other user has access. If not,
/// `reason` says why, as the end of a sentence.
bool is_private(const struct ::stat& status, std::string& reason);

/// A folder of segments that has been checked: a real folder of this user, with access for no one else. So no
/// other user can put anything into it.
class checked_folder {
 public:
    /// @throws system_failure with errc::no_such_file_or_directory if there is no folder, and with
    /// permission_denied if it is refused.
    explicit checked_folder(std::filesystem::path path);
    /// The same, but creates a folder that does not exist.
    static checked_folder create(const std::filesystem::path& path);

    const std::filesystem::path& path() const noexcept { return path_; }
    /// The file of a segment: "a/b" is "a/b.npy" in this folder.
    std::filesystem::path file_of(const std::vector<std::string>& names) const;
    /// The folder of a group.
    std::filesystem::path group_of(const std::string& name) const { return path_ / name; }
    /// Checks the file of a segment, and the folders that lead to it.
    /// @throws system_failure with errc::no_such_file_or_directory if there is none, and with
    /// permission_denied if it is refused.
    struct ::stat check(const std::vector<std::string>& names) const;
    /// The same for the folders only.
    void check_folders(const std::vector<std::string>& names) const;

    /// Locks the folder; waits for up to a minute until nobody else has the lock. Names that begin with a dot
    /// are made only while it is held. Those that its next holder finds were left by a killed process, or by
    /// a removal that failed.
    /// @return the descriptor that has the lock.
    /// @throws system_failure with errc::device_or_resource_busy if the lock is not free after a minute.
    own_descriptor lock() const;
    /// The paths in this folder whose names begin with a dot.
    std::vector<std::filesystem::path> hidden() const;

 private:
    std::filesystem::path path_;
};

/// The paths in a folder. @throws system_failure.
std::vector<std::filesystem::path> entries_of(const std::filesystem::path& folder);

/// Removes a file, or a folder of segments with all that is in it. Does not follow links, and ignores errors.
void remove_tree(const std::filesystem::path& path) noexcept;

}  // namespace pinflow::detail
