#include "src/core/output_file.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <system_error>

#include "pinflow/error.hpp"
#include "src/core/system.hpp"

namespace pinflow::detail {

namespace {

constexpr std::size_t max_collected_bytes = std::size_t{1} << 20;

[[noreturn]] void fail(const std::string& path, std::string_view reason, std::errc error) {
    throw system_failure(fmt::format("cannot write '{}': {}", path, reason), std::make_error_code(error));
}

/// Puts the path of the output file in front of error messages.
template <typename Step>
void naming(const std::string& path, Step step) {
    try {
        step();
    } catch (const system_failure& failure) {
        throw system_failure(fmt::format("cannot write '{}': {}", path, failure.what()), failure.code());
    }
}

/// A name that no other output_file of this process uses. A file of that name may exist: a killed process may
/// have left it, or another PID namespace or host may use it.
std::string temporary_name() {
    static std::atomic<std::uint64_t> count = 0;
    return fmt::format(".pinflow-{}-{}.tmp", ::getpid(), count++);
}

}  // namespace

template <typename Step>
void output_file::attempt(Step step) {
    if (descriptor_ == -1) fail(path_, "an earlier step of writing it has failed", std::errc::io_error);
    try {
        step();
    } catch (...) {
        discard();
        throw;
    }
}

output_file::output_file(const std::filesystem::path& path) : path_(path.string()) {
    if (path.empty()) fail(path_, "the path is empty", std::errc::no_such_file_or_directory);
    // absolute, so that a change of the working directory between here and commit changes nothing
    std::error_code ignored;
    const std::filesystem::path absolute = std::filesystem::absolute(path, ignored);
    final_path_ = (absolute.empty() ? path : absolute).string();
    folder_ = absolute.empty() ? "." : absolute.parent_path().string();

    // rename would also replace a device or a pipe
    std::optional<::mode_t> mode;  // of the replaced file, so that the same users can read it
    if (const auto status = system::status_of_path(final_path_)) {
        mode = status->st_mode & 07777U;
        if (S_ISDIR(status->st_mode)) fail(path_, "it is a folder", std::errc::is_a_directory);
        if (!S_ISREG(status->st_mode)) fail(path_, "it is not a regular file", std::errc::invalid_argument);
    } else if (!path.has_filename()) {
        fail(path_, "it names a folder", std::errc::is_a_directory);
    }

    const ::mode_t first_mode = mode ? 0600 : 0666;
    naming(path_, [&] {
        if (const std::optional<int> unnamed = system::create_unnamed(folder_, first_mode)) {
            descriptor_ = *unnamed;
        } else {
            take_temporary_name(
                [&](const std::string& name) { descriptor_ = system::create_for_writing(name, first_mode); });
        }
    });
    if (mode) attempt([&] { system::set_mode(descriptor_, path_, *mode); });
}

template <typename Create>
void output_file::take_temporary_name(Create create) {
    constexpr int max_tries = 1000;
    for (int tries = 1;; ++tries) {
        std::string name = (std::filesystem::path(folder_) / temporary_name()).string();
        try {
            create(name);
        } catch (const system_failure& failure) {
            if (failure.code() == std::errc::file_exists && tries < max_tries) continue;
            throw;
        }
        temporary_path_ = std::move(name);
        return;
    }
}

output_file::~output_file() {
    discard();
}

void output_file::write(std::span<const std::byte> bytes) {
    if (bytes.empty()) return;
    attempt([&] {
        if (collected_.size() + bytes.size() > max_collected_bytes) flush();
        if (bytes.size() >= max_collected_bytes) {
            system::write_all(descriptor_, path_, bytes);
        } else {
            collected_.reserve(max_collected_bytes);
            collected_.insert(collected_.end(), bytes.begin(), bytes.end());
        }
    });
}

void output_file::write_at(std::uint64_t offset_bytes, std::span<const std::byte> bytes) {
    attempt([&] {
        flush();
        system::write_all_at(descriptor_, path_, offset_bytes, bytes);
    });
}

void output_file::read_at(std::uint64_t offset_bytes, std::span<std::byte> destination) {
    attempt([&] {
        flush();
        while (!destination.empty()) {
            const std::size_t count = system::read_at(descriptor_, path_, offset_bytes, destination);
            if (count == 0) break;
            destination = destination.subspan(count);
            offset_bytes += count;
        }
        std::ranges::fill(destination, std::byte{});
    });
}

void output_file::resize(std::uint64_t size_bytes) {
    attempt([&] {
        flush();
        system::resize(descriptor_, path_, size_bytes);
    });
}

void output_file::commit() {
    attempt([&] {
        flush();
        system::sync(descriptor_, path_);
        naming(path_, [&] {
            if (temporary_path_.empty()) {
                // linkat needs an unused name, but rename replaces an existing file
                take_temporary_name([&](const std::string& name) { system::give_name(descriptor_, name); });
            }
            system::rename(temporary_path_, final_path_);
        });
    });
    system::close(descriptor_);
    descriptor_ = -1;
    system::sync_folder(folder_);
}

void output_file::flush() {
    system::write_all(descriptor_, path_, collected_);
    collected_.clear();
}

void output_file::discard() noexcept {
    if (descriptor_ == -1) return;
    system::close(descriptor_);
    descriptor_ = -1;
    if (!temporary_path_.empty()) system::remove(temporary_path_);
}

}  // namespace pinflow::detail
