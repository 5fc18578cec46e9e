#pragma once

#include <signal.h>
#include <sys/stat.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>

#include "src/core/hooks.hpp"

/// System calls on files, memory, threads and signals. Checks their status, retries interrupted calls, and
/// formats the error messages. Tests can inject a failure into each kind of `call`, but not into `close`,
/// `unmap`, `read_ahead` and the functions on resource limits. All functions throw system_failure unless they
/// say otherwise, and may be called from any thread.
///
/// Boost maps single files (mapped_file.cpp) and segments (map_for_writing in src/shared), and the tool
/// spawns its child process. `fail_if_injected` is called before each of the three. Other calls made
/// elsewhere cannot be made to fail:
/// - reading /proc, /sys, CPU times, counts of page faults, process and user ids, the number of cores, sizes
/// of pages and memory
/// - finding the files that match a pattern (formats/patterns.cpp), and making paths absolute
/// - those of the SIGBUS handler, and the checks whether it is active (fault_guard.cpp)
/// - listing the folder of segments and removing leftovers from it, reading the size of a segment after its
///   filesystem is full, closing descriptors in a forked child (src/shared)
/// - calls made by the tool (src/cli) and by libraries
namespace pinflow::detail::system {

enum class call {
    open,
    open_unnamed,
    chmod,
    close,
    fstat,
    stat,
    pread,
    write,
    truncate,
    fsync,
    link,
    rename,
    unlink,
    mmap,
    madvise,
    sigaction,
    start_thread,
    spawn,
    statfs,
    mkdir,
    fallocate,
    lock
};

// ---- the seam ---------------------------------------------------------------------------------------------

/// The failure that a test injects into one call.
struct injected_failure {
    int error = 0;  ///< the errno value; 0 lets the call happen
    std::size_t max_bytes = std::numeric_limits<std::size_t>::max();  ///< shortens reads and writes

    bool operator==(const injected_failure&) const = default;
};
/// Called before each call; `path` names the file, if the call knows it. May be called from several threads
/// at once, and may block, to simulate a slow disk.
using failure_hook = std::function<injected_failure(call what, std::string_view path)>;

/// Installs a hook for its lifetime. For tests. If there are several, the last installed is called first. If
/// it lets the call happen unchanged, the others are called.
class scoped_failure_hook {
 public:
    explicit scoped_failure_hook(failure_hook hook);

 private:
    hooks<failure_hook>::scope scope_;
};

/// Whether a hook is installed.
bool hook_is_installed() noexcept;

/// The errno value that a hook injects into `what`; 0 if none does.
int injected_error(call what, std::string_view path);

/// Throws system_failure if a hook makes `what` fail. For calls that a library makes for us.
void fail_if_injected(call what, const std::string& path, std::string_view attempt);

// ---- files ------------------------------------------------------------------------------------------------

/// Opens a file for reading, with O_CLOEXEC, without blocking. As the other functions here that take a path
/// which a caller gave, it throws invalid_argument for one with a zero byte.
/// @return the descriptor.
int open_for_reading(const std::string& path);
/// Creates a file for writing and reading, with O_CLOEXEC. The file must not exist yet.
/// @return the descriptor.
int create_for_writing(const std::string& path, ::mode_t mode);
/// Creates an unnamed file in a folder, for writing and reading, with O_CLOEXEC. If it is closed, or its
/// process is killed, before `give_name`, it is deleted.
/// @return the descriptor; empty if the filesystem does not support O_TMPFILE (NFS, for example), or if there
/// is no /proc, which `give_name` needs.
std::optional<int> create_unnamed(const std::string& folder, ::mode_t mode);
/// Gives a file of create_unnamed a name, which must not exist yet.
void give_name(int descriptor, const std::string& path);
/// Gives an open file these permission bits.
void set_mode(int descriptor, const std::string& path, ::mode_t mode);
/// Closes a descriptor; ignores errors. After reading they mean nothing, and a file that must be durable is
/// synced before.
void close(int descriptor) noexcept;

struct ::stat status(int descriptor, const std::string& path);
/// The status of a path. Empty if the path does not exist, or if this user has no access to it.
/// @throws system_failure for any other error.
std::optional<struct ::stat> status_of_path(const std::string& path);

/// Reads up to destination.size() bytes.
/// @return the bytes read; 0 at the end of the file.
std::size_t read_at(int descriptor, const std::string& path, std::uint64_t offset_bytes,
                    std::span<std::byte> destination);
/// The same, but from the page cache only. Never throws: read_at reports errors.
/// @return empty if the read would wait for storage or fails, if this filesystem does not support the request
/// (`supported` becomes false then), or if a hook is installed.
std::optional<std::size_t> read_cached_at(int descriptor, std::uint64_t offset_bytes,
                                          std::span<std::byte> destination, bool& supported);
/// Begins to read a part of a file into the page cache; a hint, whose errors are ignored.
void read_ahead(int descriptor, std::uint64_t offset_bytes, std::uint64_t size_bytes) noexcept;
/// Writes all of `bytes` at the descriptor's position.
void write_all(int descriptor, const std::string& path, std::span<const std::byte> bytes);
/// Writes all of `bytes` at an offset; does not change the descriptor's position.
void write_all_at(int descriptor, const std::string& path, std::uint64_t offset_bytes,
                  std::span<const std::byte> bytes);
/// Truncates a file to that size, or extends it with zeros.
void resize(int descriptor, const std::string& path, std::uint64_t size_bytes);
/// Makes a file's contents, or a folder's entries, durable.
void sync(int descriptor, const std::string& path);
/// Opens the folder `path`, makes its entries durable and closes it.
void sync_folder(const std::string& path);
void rename(const std::string& from, const std::string& to);
/// Removes a name. Ignores errors, since it is for cleaning up.
void remove(const std::string& path) noexcept;

/// How many bytes this user can still write to the filesystem of a folder. Empty if unknown: the filesystem
/// does not report it, is mounted read-only, or may compress the data.
std::optional<std::uint64_t> free_bytes(const std::string& folder);
/// Whether a file lies in memory: on tmpfs. False if the system does not say.
bool is_on_tmpfs(const std::string& path);

/// How many descriptors this process may have open: the soft limit of RLIMIT_NOFILE.
std::uint64_t max_descriptors() noexcept;
/// Raises the soft limit of RLIMIT_NOFILE to `count`, at most to the hard limit. Never lowers it.
void raise_max_descriptors(std::uint64_t count) noexcept;
/// The soft limit of RLIMIT_AS; empty if there is none.
std::optional<std::uint64_t> max_address_bytes() noexcept;

// ---- memory -----------------------------------------------------------------------------------------------

/// madvise; a hint, whose errors are ignored.
void advise(const std::byte* data, std::uint64_t size_bytes, int advice) noexcept;
/// Anonymous private pages.
std::byte* map_anonymous(std::uint64_t size_bytes);
/// Reserves addresses without memory, so that no other mapping uses them.
std::byte* reserve_addresses(std::uint64_t size_bytes);
/// Maps a part of a file, shared and read-only, over reserved addresses. Address and offset must be multiples
/// of the page size. If this throws, it is unknown whether the addresses are still reserved.
void map_over(std::byte* address, std::uint64_t size_bytes, int descriptor, const std::string& path,
              std::uint64_t offset_bytes);
/// Maps a part of a file, private and writable: what is written does not reach the file. The offset must be a
/// multiple of the page size.
std::byte* map_privately(int descriptor, const std::string& path, std::uint64_t offset_bytes,
                         std::uint64_t size_bytes);
void unmap(std::byte* data, std::uint64_t size_bytes) noexcept;

// ---- threads ----------------------------------------------------------------------------------------------

/// Starts a thread that runs `work`, which must not throw. `purpose` says what the thread does, for the error
/// ("registers pages").
std::thread start_thread(std::string_view purpose, std::function<void()> work);
/// Counts how many threads, at most `wanted`, can run at the same time, by starting them with stacks of this
/// size. All have been joined on return. Waits up to 100 ms until the kernel no longer counts them.
unsigned count_startable_threads(unsigned wanted, std::size_t stack_bytes);

// ---- signals ---------------------------------------------------------------------------------------------

/// What the process does on `signal`.
struct ::sigaction signal_action(int signal);
void set_signal_action(int signal, const struct ::sigaction& action);

}  // namespace pinflow::detail::system
