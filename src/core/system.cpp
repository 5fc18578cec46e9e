#include "src/core/system.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/checked.hpp"
#include "src/core/quote.hpp"
#include "src/core/system_failure.hpp"

namespace pinflow::detail::system {

namespace {

hooks<failure_hook> installed_hooks;

injected_failure ask_hook(call what, std::string_view path) {
    injected_failure found;
    installed_hooks.ask([&](const failure_hook& hook) {
        found = hook(what, path);
        return found != injected_failure{};
    });
    return found;
}

/// Calls `function(size)` until no signal interrupts it. The hook may shorten the size, or make the call fail
/// with errno set as usual.
template <typename Function>
::ssize_t transfer(call what, std::string_view path, std::size_t size, Function function) {
    ::ssize_t result = -1;
    do {
        const injected_failure failure = ask_hook(what, path);
        if (failure.error != 0) {
            errno = failure.error;
            result = -1;
        } else {
            result = function(std::min(size, failure.max_bytes));
        }
    } while (result == -1 && errno == EINTR);
    return result;
}

/// The same for calls that move no bytes.
template <typename Function>
int attempt(call what, std::string_view path, Function function) {
    return static_cast<int>(transfer(what, path, 0, [&](std::size_t) { return function(); }));
}

/// The system would take the part before the zero byte for the path.
/// @throws invalid_argument.
void refuse_zero_byte(const std::string& path) {
    if (path.find('\0') != path.npos)
        throw invalid_argument(
            fmt::format("no file can be called {}: its path has a zero byte", quote(path)));
}

/// The part of `destination` that a file can fill from that offset on: no file reaches past the largest
/// offset. With an offset of -1, preadv2 would read at the descriptor's position.
std::span<std::byte> within_any_file(std::uint64_t offset_bytes, std::span<std::byte> destination) noexcept {
    constexpr auto end = static_cast<std::uint64_t>(std::numeric_limits<::off_t>::max());
    return destination.first(std::min<std::uint64_t>(destination.size(), end - std::min(offset_bytes, end)));
}

/// mmap. @return MAP_FAILED with errno set, as mmap does.
void* map(std::string_view path, void* address, std::uint64_t size_bytes, int protection, int flags,
          int descriptor, std::uint64_t offset_bytes) {
    if (const int error = ask_hook(call::mmap, path).error; error != 0) {
        errno = error;
        return MAP_FAILED;
    }
    return ::mmap(address, size_bytes, protection, flags, descriptor, static_cast<::off_t>(offset_bytes));
}

}  // namespace

scoped_failure_hook::scoped_failure_hook(failure_hook hook) : scope_(installed_hooks, std::move(hook)) {}

bool hook_is_installed() noexcept {
    return !installed_hooks.is_empty();
}

int injected_error(call what, std::string_view path) {
    return ask_hook(what, path).error;
}

void fail_if_injected(call what, const std::string& path, std::string_view attempt) {
    if (const int error = injected_error(what, path); error != 0) fail(error, "{}", attempt);
}

int open_for_reading(const std::string& path) {
    refuse_zero_byte(path);
    const int descriptor = attempt(
        call::open, path, [&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); });
    if (descriptor == -1) fail(errno, "cannot open '{}'", path);
    return descriptor;
}

int create_for_writing(const std::string& path, ::mode_t mode) {
    refuse_zero_byte(path);
    const int descriptor = attempt(call::open, path, [&] {
        return ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, mode);
    });
    if (descriptor == -1) fail(errno, "cannot create '{}'", path);
    return descriptor;
}

/// Not /proc/self: it has the main thread's descriptors, and that thread may have ended or have its own
/// table.
constexpr const char* own_descriptors = "/proc/thread-self/fd";

std::optional<int> create_unnamed(const std::string& folder, ::mode_t mode) {
    if (::access(own_descriptors, F_OK) == -1) return std::nullopt;
    const int descriptor = attempt(call::open_unnamed, folder, [&] {
        return ::open(folder.c_str(), O_RDWR | O_TMPFILE | O_CLOEXEC, mode);
    });
    if (descriptor != -1) return descriptor;
    // EISDIR: a kernel without O_TMPFILE; no other failure to open a folder this way gives it
    if (errno == EOPNOTSUPP || errno == EISDIR) return std::nullopt;
    fail(errno, "cannot create a file in '{}'", folder);
}

void give_name(int descriptor, const std::string& path) {
    // linkat with AT_EMPTY_PATH would need CAP_DAC_READ_SEARCH, so the descriptor is linked through /proc
    const std::string file = fmt::format("{}/{}", own_descriptors, descriptor);
    const int status = attempt(call::link, path, [&] {
        return ::linkat(AT_FDCWD, file.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW);
    });
    if (status == -1) fail(errno, "cannot create '{}'", path);
}

void set_mode(int descriptor, const std::string& path, ::mode_t mode) {
    if (attempt(call::chmod, path, [&] { return ::fchmod(descriptor, mode); }) == -1) {
        fail(errno, "cannot set the permissions of '{}'", path);
    }
}

void close(int descriptor) noexcept {
    ask_hook(call::close, {});  // only counts the call: there is no error to inject
    // not retried after EINTR: Linux has released the descriptor by then, and another thread may already own
    // it
    ::close(descriptor);
}

struct ::stat status(int descriptor, const std::string& path) {
    struct ::stat result{};
    if (attempt(call::fstat, path, [&] { return ::fstat(descriptor, &result); }) == -1) {
        fail(errno, "cannot read the status of '{}'", path);
    }
    return result;
}

std::optional<struct ::stat> status_of_path(const std::string& path) {
    refuse_zero_byte(path);
    struct ::stat result{};
    if (attempt(call::stat, path, [&] { return ::stat(path.c_str(), &result); }) == 0) return result;
    if (errno == ENOENT || errno == ENOTDIR || errno == EACCES) return std::nullopt;
    fail(errno, "cannot read the status of '{}'", path);
}

std::size_t read_at(int descriptor, const std::string& path, std::uint64_t offset_bytes,
                    std::span<std::byte> destination) {
    const auto piece = within_any_file(offset_bytes, destination);
    if (piece.empty()) return 0;
    const ::ssize_t count = transfer(call::pread, path, piece.size(), [&](std::size_t size) {
        return ::pread(descriptor, piece.data(), size, static_cast<::off_t>(offset_bytes));
    });
    if (count == -1) {
        fail(errno, "cannot read {} bytes at offset {} of '{}'", destination.size(), offset_bytes, path);
    }
    return static_cast<std::size_t>(count);
}

void read_ahead(int descriptor, std::uint64_t offset_bytes, std::uint64_t size_bytes) noexcept {
    static_cast<void>(::posix_fadvise(descriptor, static_cast<::off_t>(offset_bytes),
                                      static_cast<::off_t>(size_bytes), POSIX_FADV_WILLNEED));
}

std::optional<std::size_t> read_cached_at(int descriptor, std::uint64_t offset_bytes,
                                          std::span<std::byte> destination, bool& supported) {
    // a hook simulates storage: read_at calls it
    if (hook_is_installed()) return std::nullopt;
    const auto reachable = within_any_file(offset_bytes, destination);
    if (reachable.empty()) return 0;
    const ::iovec piece{reachable.data(), reachable.size()};
    const ::ssize_t count = ::preadv2(descriptor, &piece, 1, static_cast<::off_t>(offset_bytes), RWF_NOWAIT);
    if (count >= 0) return static_cast<std::size_t>(count);
    // EAGAIN: not in the page cache. read_at reports real errors
    if (errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL) supported = false;
    return std::nullopt;
}

void write_all(int descriptor, const std::string& path, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        const ::ssize_t count = transfer(call::write, path, bytes.size(), [&](std::size_t size) {
            return ::write(descriptor, bytes.data(), size);
        });
        if (count == -1) fail(errno, "cannot write {} bytes to '{}'", bytes.size(), path);
        bytes = bytes.subspan(static_cast<std::size_t>(count));
    }
}

void write_all_at(int descriptor, const std::string& path, std::uint64_t offset_bytes,
                  std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        const ::ssize_t count = transfer(call::write, path, bytes.size(), [&](std::size_t size) {
            return ::pwrite(descriptor, bytes.data(), size, static_cast<::off_t>(offset_bytes));
        });
        if (count == -1) {
            fail(errno, "cannot write {} bytes at offset {} of '{}'", bytes.size(), offset_bytes, path);
        }
        bytes = bytes.subspan(static_cast<std::size_t>(count));
        offset_bytes += static_cast<std::uint64_t>(count);
    }
}

void resize(int descriptor, const std::string& path, std::uint64_t size_bytes) {
    if (attempt(call::truncate, path,
                [&] { return ::ftruncate(descriptor, static_cast<::off_t>(size_bytes)); }) == -1) {
        fail(errno, "cannot give '{}' a size of {} bytes", path, size_bytes);
    }
}

void sync(int descriptor, const std::string& path) {
    if (attempt(call::fsync, path, [&] { return ::fsync(descriptor); }) == -1) {
        fail(errno, "cannot make '{}' durable", path);
    }
}

void sync_folder(const std::string& path) {
    const int descriptor =
        attempt(call::open, path, [&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
    if (descriptor == -1) fail(errno, "cannot open the folder '{}'", path);
    try {
        sync(descriptor, path);
    } catch (...) {
        close(descriptor);
        throw;
    }
    close(descriptor);
}

void rename(const std::string& from, const std::string& to) {
    if (attempt(call::rename, to, [&] { return ::rename(from.c_str(), to.c_str()); }) == -1) {
        fail(errno, "cannot rename '{}' to '{}'", from, to);
    }
}

void remove(const std::string& path) noexcept {
    static_cast<void>(attempt(call::unlink, path, [&] { return ::unlink(path.c_str()); }));
}

bool is_on_tmpfs(const std::string& path) {
    struct ::statfs status{};
    if (attempt(call::statfs, path, [&] { return ::statfs(path.c_str(), &status); }) == -1) return false;
    constexpr std::uint64_t tmpfs = 0x01021994;
    return static_cast<std::uint64_t>(status.f_type) == tmpfs;
}

std::optional<std::uint64_t> free_bytes(const std::string& folder) {
    struct ::statfs status{};
    if (attempt(call::statfs, folder, [&] { return ::statfs(folder.c_str(), &status); }) == -1) {
        return std::nullopt;
    }
    if ((status.f_flags & ST_RDONLY) != 0) return std::nullopt;
    constexpr std::uint64_t btrfs = 0x9123683E;
    constexpr std::uint64_t zfs = 0x2FC12FC1;
    constexpr std::uint64_t bcachefs = 0xCA451A4E;
    constexpr std::uint64_t f2fs = 0xF2F52010;
    constexpr std::uint64_t overlayfs = 0x794C7630;  // its upper layer may be on any of them
    const auto type = static_cast<std::uint64_t>(status.f_type) & 0xFFFFFFFF;
    const bool may_compress =
        type == btrfs || type == zfs || type == bcachefs || type == f2fs || type == overlayfs;
    if (status.f_blocks == 0 || may_compress) return std::nullopt;
    const std::uint64_t blocks = ::geteuid() == 0 ? status.f_bfree : status.f_bavail;
    return saturated(blocks,
                     static_cast<std::uint64_t>(status.f_frsize > 0 ? status.f_frsize : status.f_bsize));
}

std::uint64_t max_descriptors() noexcept {
    ::rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    return limit.rlim_cur;
}

void raise_max_descriptors(std::uint64_t count) noexcept {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    ::rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    const ::rlim_t wanted = std::min<::rlim_t>(count, limit.rlim_max);
    if (wanted <= limit.rlim_cur) return;
    limit.rlim_cur = wanted;
    static_cast<void>(::setrlimit(RLIMIT_NOFILE, &limit));
}

std::optional<std::uint64_t> max_address_bytes() noexcept {
    ::rlimit limit{};
    if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
    return limit.rlim_cur;
}

// ---- memory -----------------------------------------------------------------------------------------------

void advise(const std::byte* data, std::uint64_t size_bytes, int advice) noexcept {
    if (ask_hook(call::madvise, {}).error != 0) return;
    // madvise needs the beginning of a page
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    const std::uintptr_t slack = address % static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
    static_cast<void>(::madvise(reinterpret_cast<void*>(address - slack), size_bytes + slack, advice));
}

std::byte* map_anonymous(std::uint64_t size_bytes) {
    void* const data =
        map({}, nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) fail(errno, "cannot allocate {} bytes of memory", size_bytes);
    return static_cast<std::byte*>(data);
}

std::byte* reserve_addresses(std::uint64_t size_bytes) {
    void* const data =
        map({}, nullptr, size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) fail(errno, "cannot reserve {} bytes of the address space", size_bytes);
    return static_cast<std::byte*>(data);
}

void map_over(std::byte* address, std::uint64_t size_bytes, int descriptor, const std::string& path,
              std::uint64_t offset_bytes) {
    if (map(path, address, size_bytes, PROT_READ, MAP_SHARED | MAP_FIXED, descriptor, offset_bytes) ==
        MAP_FAILED) {
        fail(errno, "cannot map {} bytes at offset {} of '{}'", size_bytes, offset_bytes, path);
    }
}

std::byte* map_privately(int descriptor, const std::string& path, std::uint64_t offset_bytes,
                         std::uint64_t size_bytes) {
    void* const data = map(path, nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                           descriptor, offset_bytes);
    if (data == MAP_FAILED)
        fail(errno, "cannot map {} bytes at offset {} of '{}' for private use", size_bytes, offset_bytes,
             path);
    return static_cast<std::byte*>(data);
}

void unmap(std::byte* data, std::uint64_t size_bytes) noexcept {
    ::munmap(data, size_bytes);
}

struct ::sigaction signal_action(int signal) {
    struct ::sigaction action{};
    if (attempt(call::sigaction, {}, [&] { return ::sigaction(signal, nullptr, &action); }) == -1) {
        fail(errno, "cannot read the action of signal {}", signal);
    }
    return action;
}

void set_signal_action(int signal, const struct ::sigaction& action) {
    if (attempt(call::sigaction, {}, [&] { return ::sigaction(signal, &action, nullptr); }) == -1) {
        fail(errno, "cannot set the action of signal {}", signal);
    }
}

}  // namespace pinflow::detail::system
