#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

/// System calls on folders, links and locks; errors and the seam for tests are as in system.hpp.
namespace pinflow::detail::system {

// ---- names ------------------------------------------------------------------------------------------------

/// As status_of_path, but of a symbolic link itself.
std::optional<struct ::stat> status_of_link(const std::string& path);
/// Creates a folder with exactly these permission bits, whatever the umask is.
/// @return false if the path exists, whatever it is.
bool make_folder(const std::string& path, ::mode_t mode);
/// Opens a folder, with O_CLOEXEC. Does not follow a symbolic link.
/// @return the descriptor.
int open_folder(const std::string& path);
/// Removes an empty folder. Ignores errors, since it is for cleaning up.
void remove_folder(const std::string& path) noexcept;
/// Removes the name of a file.
void remove_name(const std::string& path);
/// Renames a file or a folder to a name that must not exist.
void rename_to_new(const std::string& from, const std::string& to);
/// Exchanges two names atomically.
void exchange_names(const std::string& from, const std::string& to);

// ---- open files -------------------------------------------------------------------------------------------

/// Opens a file for reading and writing, with O_CLOEXEC, without blocking. Does not follow a symbolic link.
/// @return the descriptor.
int open_for_writing(const std::string& path);
/// Opens the file of a descriptor again, for reading and writing, with O_CLOEXEC: the new open file
/// description has its own locks. `path` is for messages.
/// @return the descriptor.
int open_again(int descriptor, const std::string& path);
/// Makes the file at least this large, and takes the space for these bytes, so that no later write to them
/// can find the filesystem full.
void allocate(int descriptor, const std::string& path, std::uint64_t size_bytes);
/// Allocates the pages of a part of a shared, writable mapping of a file (MADV_POPULATE_WRITE). `data` must
/// be the beginning of a page. The pages are huge pages if `advise` has requested them and the filesystem
/// allows them.
/// @return false if the system does not know the request (before Linux 5.14).
/// @throws system_failure, with errc::no_space_on_device if there is too little space.
bool allocate_mapped(std::byte* data, std::uint64_t size_bytes, const std::string& path);

// ---- locks ------------------------------------------------------------------------------------------------

/// Locks a folder with flock, until every copy of the descriptor is closed. This excludes only others that
/// open the folder themselves and call this function. Does not wait.
/// @return false if it is locked already.
bool lock_folder(int descriptor, const std::string& path);
/// Locks a file for one writer, until every copy of the descriptor is closed, in all processes (F_OFD_SETLK).
/// @return false if another open file description has the lock.
bool lock_for_writing(int descriptor, const std::string& path);

}  // namespace pinflow::detail::system
