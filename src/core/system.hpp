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

/// The one layer that makes system calls on files, memory and threads: it checks their status, retries what a
/// signal has interrupted, and words the errors. Every call passes a seam where tests inject faults. All
/// functions throw system_failure unless they say otherwise, and may be called from any thread.
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
    statfs
};

// ---- the seam ---------------------------------------------------------------------------------------------

/// What a test wants to happen to one call.
struct injected_failure {
    int error = 0;  ///< the errno value to fail with (the call is made again after EINTR); 0 lets it happen
    std::size_t max_bytes = std::numeric_limits<std::size_t>::max();  ///< shortens reads and writes

    bool operator==(const injected_failure&) const = default;
};
/// Asked before each call; `path` names the file it is about, where the call knows it. May be called from
/// several threads at once, and may wait: a slow disk is made that way.
using failure_hook = std::function<injected_failure(call what, std::string_view path)>;

/// Installs a hook for its lifetime. For tests. Of several, the last is asked first. If it lets the call
/// happen unchanged, the others are asked.
class scoped_failure_hook {
 public:
    explicit scoped_failure_hook(failure_hook hook);

 private:
    hooks<failure_hook>::scope scope_;
};

/// Whether there is one.
bool hook_is_installed() noexcept;

/// Throws system_failure when a hook wants `what` to fail: for calls that a library makes on our behalf.
void fail_if_injected(call what, const std::string& path, std::string_view attempt);

// ---- files ------------------------------------------------------------------------------------------------

/// Opens for reading, with O_CLOEXEC and without ever blocking. @return the descriptor.
int open_for_reading(const std::string& path);
/// Creates a file for writing, and for reading that back, which must not exist yet, with O_CLOEXEC.
/// @return the descriptor.
int create_for_writing(const std::string& path, ::mode_t mode);
/// Creates a file in a folder that has no name yet, for writing, and for reading that back, with O_CLOEXEC:
/// it is gone when it is closed before `give_name`, or its process is killed. @return the descriptor; empty
/// where there are no such files (O_TMPFILE: on NFS, say), or no /proc, which naming them takes.
std::optional<int> create_unnamed(const std::string& folder, ::mode_t mode);
/// Gives the file that create_unnamed made its name, which must not exist yet.
void give_name(int descriptor, const std::string& path);
/// Gives an open file these permission bits.
void set_mode(int descriptor, const std::string& path, ::mode_t mode);
/// Never fails: an error of close after reading says nothing, and writers have called fsync before.
void close(int descriptor) noexcept;

struct ::stat status(int descriptor, const std::string& path);
/// Empty when nothing answers to `path` (any more), or not to this user. @throws system_failure.
std::optional<struct ::stat> status_of_path(const std::string& path);

/// Reads up to destination.size() bytes. @return the bytes read; 0 at the end of the file.
std::size_t read_at(int descriptor, const std::string& path, std::uint64_t offset_bytes,
                    std::span<std::byte> destination);
/// The same, from the page cache alone. @return empty when that would have to wait for storage, or cannot be
/// asked for on this filesystem (`supported` becomes false then).
std::optional<std::size_t> read_cached_at(int descriptor, std::uint64_t offset_bytes,
                                          std::span<std::byte> destination, bool& supported);
/// Writes all of `bytes` at the descriptor's position.
void write_all(int descriptor, const std::string& path, std::span<const std::byte> bytes);
/// Writes all of `bytes` at an offset, and leaves the descriptor's position.
void write_all_at(int descriptor, const std::string& path, std::uint64_t offset_bytes,
                  std::span<const std::byte> bytes);
/// Cuts a file off at that size, or extends it with zeros.
void resize(int descriptor, const std::string& path, std::uint64_t size_bytes);
/// Makes a file's contents, or a folder's entries, durable.
void sync(int descriptor, const std::string& path);
/// Opens the folder `path`, makes its entries durable and closes it.
void sync_folder(const std::string& path);
void rename(const std::string& from, const std::string& to);
/// Removes a name; an error is ignored, as this is for cleaning up.
void remove(const std::string& path) noexcept;

/// How many bytes this user can still write to the filesystem of a folder. Empty if that is not known: the
/// filesystem does not say, or may compress what is written.
std::optional<std::uint64_t> free_bytes(const std::string& folder);

/// How many descriptors this process may have open: the soft limit of RLIMIT_NOFILE.
std::uint64_t max_descriptors() noexcept;
/// Raises the soft limit of RLIMIT_NOFILE to `count`, at most to the hard limit. Never lowers it.
void raise_max_descriptors(std::uint64_t count) noexcept;
/// The soft limit of RLIMIT_AS; empty when there is none.
std::optional<std::uint64_t> max_address_bytes() noexcept;

// ---- memory -----------------------------------------------------------------------------------------------

/// madvise; a hint, whose errors are ignored.
void advise(const std::byte* data, std::uint64_t size_bytes, int advice) noexcept;
/// Anonymous private pages.
std::byte* map_anonymous(std::uint64_t size_bytes);
/// Addresses that nothing else will be mapped to, without memory behind them.
std::byte* reserve_addresses(std::uint64_t size_bytes);
/// Maps a part of a file, shared and read-only, over reserved addresses. Address and offset are multiples of
/// the page size. When this throws, it is unknown whether the addresses are still reserved.
void map_over(std::byte* address, std::uint64_t size_bytes, int descriptor, const std::string& path,
              std::uint64_t offset_bytes);
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
