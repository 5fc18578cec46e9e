#include "pinflow/file.hpp"

#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <optional>
#include <string_view>

#include "pinflow/error.hpp"
#include "src/core/system.hpp"

namespace pinflow {

namespace {

std::chrono::nanoseconds thread_cpu_time() noexcept {
    ::timespec time{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

std::int64_t nanoseconds_of(const ::timespec& time) noexcept {
    return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

std::string_view kind_of(::mode_t mode) noexcept {
    if (S_ISDIR(mode)) return "a folder";
    if (S_ISFIFO(mode)) return "a named pipe";
    if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
    if (S_ISSOCK(mode)) return "a socket";
    return "not a file";
}

}  // namespace

input_file::input_file(const std::filesystem::path& path) : path_(path.string()) {
    descriptor_ = detail::system::open_for_reading(path_);
    try {
        // without a working directory there is no absolute path: the name as it is finds the same file, or
        // none
        std::error_code no_folder;
        absolute_path_ = std::filesystem::absolute(path, no_folder).string();
        if (no_folder) absolute_path_ = path_;
        const struct ::stat status = detail::system::status(descriptor_, path_);
        if (!S_ISREG(status.st_mode)) {
            throw format_error(fmt::format("cannot open '{}': it is {}, not a regular file", path_,
                                           kind_of(status.st_mode)));
        }
        identity_ = {static_cast<std::uint64_t>(status.st_dev), static_cast<std::uint64_t>(status.st_ino),
                     static_cast<std::uint64_t>(status.st_size), nanoseconds_of(status.st_mtim)};
    } catch (...) {
        detail::system::close(descriptor_);
        throw;
    }
}

input_file::~input_file() {
    detail::system::close(descriptor_);
}

std::chrono::nanoseconds input_file::read(std::uint64_t offset_bytes,
                                          std::span<std::byte> destination) const {
    using clock = std::chrono::steady_clock;
    std::chrono::nanoseconds waited{};
    bool cache_can_be_asked = true;
    while (!destination.empty()) {
        std::optional<std::size_t> count;
        if (cache_can_be_asked) {
            count =
                detail::system::read_cached_at(descriptor_, offset_bytes, destination, cache_can_be_asked);
        }
        if (!count || *count == 0) {
            // the copying within the call is the CPU's: what the thread did not compute it waited for
            const auto cpu_before = thread_cpu_time();
            const auto before = clock::now();
            count = detail::system::read_at(descriptor_, path_, offset_bytes, destination);
            const auto cpu = thread_cpu_time() - cpu_before;
            waited += std::max(clock::now() - before - cpu, std::chrono::nanoseconds{});
        }
        if (*count == 0) {
            throw data_changed(
                fmt::format("cannot read {} bytes at offset {} of '{}': the file has {} bytes now, it had {} "
                            "when it was opened",
                            destination.size(), offset_bytes, path_,
                            detail::system::status(descriptor_, path_).st_size, identity_.size_bytes));
        }
        offset_bytes += *count;
        destination = destination.subspan(*count);
    }
    return waited;
}

void input_file::check_unchanged() const {
    const struct ::stat now = detail::system::status(descriptor_, path_);
    const auto size_bytes = static_cast<std::uint64_t>(now.st_size);
    if (size_bytes != identity_.size_bytes) {
        throw data_changed(
            fmt::format("'{}' changed while it was read: it had {} bytes when it was opened, now it has {}",
                        path_, identity_.size_bytes, size_bytes));
    }
    if (nanoseconds_of(now.st_mtim) != identity_.modified_ns) {
        throw data_changed(
            fmt::format("'{}' changed while it was read: it was modified after it was opened", path_));
    }
    const auto at_path = detail::system::status_of_path(absolute_path_);
    if (at_path && (static_cast<std::uint64_t>(at_path->st_dev) != identity_.device ||
                    static_cast<std::uint64_t>(at_path->st_ino) != identity_.inode)) {
        throw data_changed(
            fmt::format("'{}' changed while it was read: another file has taken its place", path_));
    }
}

}  // namespace pinflow
