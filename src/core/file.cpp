#include "pinflow/file.hpp"

#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/descriptor_cache.hpp"
#include "src/core/error_advice.hpp"
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

std::int64_t nanoseconds_of(std::chrono::steady_clock::time_point time) noexcept {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

std::string_view kind_of(::mode_t mode) noexcept {
    if (S_ISDIR(mode)) return "a folder";
    if (S_ISFIFO(mode)) return "a named pipe";
    if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
    if (S_ISSOCK(mode)) return "a socket";
    return "not a file";
}

file_identity identity_of(const struct ::stat& status) noexcept {
    return {static_cast<std::uint64_t>(status.st_dev), static_cast<std::uint64_t>(status.st_ino),
            static_cast<std::uint64_t>(status.st_size), nanoseconds_of(status.st_mtim)};
}

/// Opens `opened_path` and calls `check` with the file's status. If the status cannot be read, the error
/// names `path`.
template <typename Check>
int open_checked(const std::string& opened_path, const std::string& path, Check check) {
    const int descriptor = detail::system::open_for_reading(opened_path);
    try {
        check(detail::system::status(descriptor, path));
    } catch (...) {
        detail::system::close(descriptor);
        throw;
    }
    return descriptor;
}

}  // namespace

// ---- descriptors ------------------------------------------------------------------------------------------

void descriptor_lease::end_use::operator()(detail::cached_descriptor* used) const noexcept {
    used->release();
}

int descriptor_lease::get() const noexcept {
    return used_ ? used_->get() : -1;
}

input_file::input_file(const std::filesystem::path& path, change_check check)
    : path_(path.string()), check_(check), descriptor_(std::make_unique<detail::cached_descriptor>()) {
    // without a working directory there is no absolute path: the relative path finds the same file, or none
    std::error_code no_folder;
    absolute_path_ = std::filesystem::absolute(path, no_folder).string();
    if (no_folder) absolute_path_ = path_;
    descriptor_->acquire([this] { return open_first(); });
    descriptor_lease lease(*descriptor_);
    if (check_ != change_check::path) kept_open_.emplace(std::move(lease));
}

input_file::~input_file() = default;

int input_file::open_first() {
    return open_checked(path_, path_, [this](const struct ::stat& status) {
        if (!S_ISREG(status.st_mode)) {
            throw format_error(fmt::format(
                "cannot open '{}': it is {}, not a regular file{}", path_, kind_of(status.st_mode),
                S_ISDIR(status.st_mode)
                    ? "; to open the files in it, pass a pattern such as 'FOLDER/*.npy' to "
                      "open_rows (in Python, to open), or in quotes to the tool"
                    : ""));
        }
        identity_ = identity_of(status);
    });
}

int input_file::open_again() const {
    try {
        return open_checked(absolute_path_, path_,
                            [this](const struct ::stat& status) { check_identity(identity_of(status)); });
    } catch (const system_failure& failure) {
        throw system_failure(
            fmt::format("cannot reopen '{}', which was closed because too many files were open: {}", path_,
                        detail::described(failure.code())),
            failure.code());
    }
}

descriptor_lease input_file::lease_descriptor() const {
    if (!descriptor_->acquire_if_open()) descriptor_->acquire([this] { return open_again(); });
    return descriptor_lease(*descriptor_);
}

// ---- reading ----------------------------------------------------------------------------------------------

std::chrono::nanoseconds input_file::read(std::uint64_t offset_bytes,
                                          std::span<std::byte> destination) const {
    using clock = std::chrono::steady_clock;
    std::chrono::nanoseconds waited{};
    if (destination.empty()) return waited;
    const descriptor_lease lease = lease_descriptor();
    const int descriptor = lease.get();
    bool cache_can_be_asked = true;
    while (!destination.empty()) {
        std::optional<std::size_t> count;
        if (cache_can_be_asked) {
            count = detail::system::read_cached_at(descriptor, offset_bytes, destination, cache_can_be_asked);
        }
        if (!count || *count == 0) {
            // copying within the call is CPU time: the rest of the call was waiting
            const auto cpu_before = thread_cpu_time();
            const auto before = clock::now();
            count = detail::system::read_at(descriptor, path_, offset_bytes, destination);
            const auto cpu = thread_cpu_time() - cpu_before;
            waited += std::max(clock::now() - before - cpu, std::chrono::nanoseconds{});
        }
        if (*count == 0) {
            const auto size_bytes =
                static_cast<std::uint64_t>(detail::system::status(descriptor, path_).st_size);
            const std::string attempt =
                fmt::format("cannot read {} bytes at offset {} of '{}': the file has {} bytes",
                            destination.size(), offset_bytes, path_, size_bytes);
            if (size_bytes == identity_.size_bytes) {
                check_unchanged();
                throw invalid_argument(attempt);
            }
            throw data_changed(
                fmt::format("{} now, it had {} when it was opened", attempt, identity_.size_bytes));
        }
        offset_bytes += *count;
        destination = destination.subspan(*count);
    }
    return waited;
}

// ---- changes ----------------------------------------------------------------------------------------------

void input_file::check_identity(const file_identity& now) const {
    if (now.device != identity_.device || now.inode != identity_.inode) {
        throw data_changed(
            fmt::format("'{}' has changed since it was opened: another file has taken its place", path_));
    }
    if (now.size_bytes != identity_.size_bytes) {
        throw data_changed(
            fmt::format("'{}' has changed since it was opened: it had {} bytes then, and has {} now", path_,
                        identity_.size_bytes, now.size_bytes));
    }
    if (check_ != change_check::size && now.modified_ns != identity_.modified_ns) {
        throw data_changed(fmt::format("'{}' has changed since it was opened: it was modified", path_));
    }
}

void input_file::check_now(std::int64_t now_ns) const {
    if (kept_open_) {
        check_identity(identity_of(detail::system::status(kept_open_->get(), path_)));
    } else if (const auto at_path = detail::system::status_of_path(absolute_path_)) {
        check_identity(identity_of(*at_path));
    } else if (descriptor_->acquire_if_open()) {
        const descriptor_lease lease(*descriptor_);
        check_identity(identity_of(detail::system::status(lease.get(), path_)));
    }
    checked_ns_.store(now_ns, std::memory_order_relaxed);
}

void input_file::check_unchanged() const {
    check_now(nanoseconds_of(std::chrono::steady_clock::now()));
}

void input_file::check_unchanged(std::chrono::nanoseconds max_age,
                                 std::chrono::steady_clock::time_point now) const {
    const std::int64_t now_ns = nanoseconds_of(now);
    const std::int64_t checked_ns = checked_ns_.load(std::memory_order_relaxed);
    if (checked_ns != never && now_ns - checked_ns < max_age.count()) return;
    check_now(now_ns);
}

}  // namespace pinflow
