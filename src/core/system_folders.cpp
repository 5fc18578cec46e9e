#include "src/core/system_folders.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/system.hpp"
#include "src/core/system_failure.hpp"

namespace pinflow::detail::system {

namespace {

/// Calls `function` until no signal interrupts it. A hook may make it fail, with errno set as usual.
template <typename Function>
int attempt(call what, const std::string& path, Function function) {
    int result = -1;
    do {
        if (const int error = injected_error(what, path); error != 0) {
            errno = error;
            result = -1;
        } else {
            result = function();
        }
    } while (result == -1 && errno == EINTR);
    return result;
}

void rename_with(unsigned flags, const std::string& from, const std::string& to) {
    const int status = attempt(
        call::rename, to, [&] { return ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags); });
    if (status == -1) fail(errno, "cannot rename '{}' to '{}'", from, to);
}

}  // namespace

std::optional<struct ::stat> status_of_link(const std::string& path) {
    struct ::stat result{};
    if (attempt(call::stat, path, [&] { return ::lstat(path.c_str(), &result); }) == 0) return result;
    if (errno == ENOENT || errno == ENOTDIR || errno == EACCES) return std::nullopt;
    fail(errno, "cannot read the status of '{}'", path);
}

bool make_folder(const std::string& path, ::mode_t mode) {
    if (attempt(call::mkdir, path, [&] { return ::mkdir(path.c_str(), mode); }) == -1) {
        if (errno == EEXIST) return false;
        fail(errno, "cannot create the folder '{}'", path);
    }
    // a umask can only have removed bits
    if (attempt(call::chmod, path, [&] { return ::chmod(path.c_str(), mode); }) == -1) {
        const int error = errno;
        remove_folder(path);
        fail(error, "cannot set the permissions of '{}'", path);
    }
    return true;
}

int open_folder(const std::string& path) {
    const int descriptor = attempt(call::open, path, [&] {
        return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    });
    if (descriptor == -1) fail(errno, "cannot open the folder '{}'", path);
    return descriptor;
}

void remove_folder(const std::string& path) noexcept {
    static_cast<void>(attempt(call::unlink, path, [&] { return ::rmdir(path.c_str()); }));
}

void remove_name(const std::string& path) {
    if (attempt(call::unlink, path, [&] { return ::unlink(path.c_str()); }) == -1)
        fail(errno, "cannot remove '{}'", path);
}

void rename_to_new(const std::string& from, const std::string& to) {
    rename_with(RENAME_NOREPLACE, from, to);
}

void exchange_names(const std::string& from, const std::string& to) {
    rename_with(RENAME_EXCHANGE, from, to);
}

int open_for_writing(const std::string& path) {
    const int descriptor = attempt(call::open, path, [&] {
        return ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW);
    });
    if (descriptor == -1) fail(errno, "cannot open '{}' for writing", path);
    return descriptor;
}

int open_again(int descriptor, const std::string& path) {
    // not /proc/self: see own_descriptors in system.cpp
    const std::string file = fmt::format("/proc/thread-self/fd/{}", descriptor);
    const int again =
        attempt(call::open, path, [&] { return ::open(file.c_str(), O_RDWR | O_CLOEXEC | O_NOCTTY); });
    if (again == -1) fail(errno, "cannot open '{}' a second time", path);
    return again;
}

void allocate(int descriptor, const std::string& path, std::uint64_t size_bytes) {
    // in pieces: a signal undoes the whole call on a tmpfs
    constexpr std::uint64_t piece_bytes = std::uint64_t{64} << 20;
    for (std::uint64_t at = 0; at < size_bytes; at += piece_bytes) {
        const std::uint64_t piece = std::min(piece_bytes, size_bytes - at);
        const int status = attempt(call::fallocate, path, [&] {
            return ::fallocate(descriptor, 0, static_cast<::off_t>(at), static_cast<::off_t>(piece));
        });
        if (status == -1) fail(errno, "cannot take {} bytes for '{}'", size_bytes, path);
    }
}

bool allocate_mapped([[maybe_unused]] std::byte* data, [[maybe_unused]] std::uint64_t size_bytes,
                     [[maybe_unused]] const std::string& path) {
#ifdef MADV_POPULATE_WRITE
    if (attempt(call::fallocate, path, [&] { return ::madvise(data, size_bytes, MADV_POPULATE_WRITE); }) == 0)
        return true;
    if (errno == EINVAL) return false;
    // EFAULT: a write to the page would raise SIGBUS
    fail(errno == EFAULT ? ENOSPC : errno, "cannot take {} bytes for '{}'", size_bytes, path);
#else
    return false;
#endif
}

bool lock_folder(int descriptor, const std::string& path) {
    if (attempt(call::lock, path, [&] { return ::flock(descriptor, LOCK_EX | LOCK_NB); }) == 0) return true;
    if (errno == EWOULDBLOCK) return false;
    fail(errno, "cannot lock the folder '{}'", path);
}

bool lock_for_writing(int descriptor, const std::string& path) {
    struct ::flock lock{};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    if (attempt(call::lock, path, [&] { return ::fcntl(descriptor, F_OFD_SETLK, &lock); }) == 0) return true;
    if (errno == EAGAIN || errno == EACCES) return false;
    fail(errno, "cannot lock '{}'", path);
}

}  // namespace pinflow::detail::system
