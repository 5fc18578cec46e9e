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
/// Exchanges two names, at once.
void exchange_names(const std::string& from, const std::string& to);

// ---- open files -------------------------------------------------------------------------------------------

/// Opens a file for reading and writing, with O_CLOEXEC, without blocking. Does not follow a symbolic link.
/// @return the descriptor.
int open_for_writing(const std::string& path);
/// Opens the file of a descriptor again, for reading and writing, with O_CLOEXEC: an open file of its own,
/// with locks of its own. `path` is for messages.
/// @return the descriptor.
int open_again(int descriptor, const std::string& path);
/// Gives the file this size, and takes the space for all of it, so that no later write can find the
/// filesystem full.
void allocate(int descriptor, const std::string& path, std::uint64_t size_bytes);
/// Takes the space for all of a shared, writable mapping of a file (MADV_POPULATE_WRITE), by pages as its
/// advice asks for.
/// @return false if the system does not know the request (before Linux 5.14).
/// @throws system_failure with errc::no_space_on_device if there is too little.
bool allocate_mapped(std::byte* data, std::uint64_t size_bytes, const std::string& path);

// ---- locks ------------------------------------------------------------------------------------------------

/// Locks a folder against other processes that do the same, until the descriptor is closed.
/// @return false if it is locked.
bool lock_folder(int descriptor, const std::string& path);
/// Locks an open file for one writer, until it is closed in every process that has it (F_OFD_SETLK).
/// @return false if another open file has the lock.
bool lock_for_writing(int descriptor, const std::string& path);

}  // namespace pinflow::detail::system
