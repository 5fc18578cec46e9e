#include "src/shared/segment_folder.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/quote.hpp"
#include "src/core/system.hpp"
#include "src/core/system_folders.hpp"

namespace pinflow::detail {

namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse_name(std::string_view name, std::string_view reason) {
    throw invalid_argument(fmt::format("{} is not the name of a segment: {}", quote(name), reason));
}

void check_one_name(std::string_view whole, std::string_view name) {
    constexpr std::size_t max_bytes = 200;
    if (name.empty()) refuse_name(whole, "it is empty, or has an empty part");
    if (name.size() > max_bytes)
        refuse_name(whole, fmt::format("it, or a part of it, has {} bytes; the maximum is {}", name.size(),
                                       max_bytes));
    if (name.front() == '.') refuse_name(whole, "it, or a part of it, begins with a dot");
    if (name.ends_with(".npy")) refuse_name(whole, "it, or a part of it, ends in .npy; write it without");
    for (std::size_t at = 0; at < name.size();) {
        const std::size_t begin = at;
        const std::string shown = next_escaped(name, at);
        if (shown != name.substr(begin, at - begin))
            refuse_name(
                whole,
                "it has a control character, a line separator or a mark of text direction, or is not UTF-8");
    }
}

[[noreturn]] void refuse(const fs::path& path, std::string_view reason) {
    throw system_failure(fmt::format("cannot use '{}': {}", path.string(), reason),
                         std::make_error_code(std::errc::permission_denied));
}

[[noreturn]] void fail_missing(const std::string& sentence) {
    throw system_failure(sentence, std::make_error_code(std::errc::no_such_file_or_directory));
}

/// With a slash at the end, a link would be followed.
fs::path without_slash(fs::path path) {
    while (!path.has_filename() && path.has_relative_path())
        path = path.parent_path();
    return path;
}

void check_folder(const fs::path& path, const struct ::stat& status) {
    std::string reason;
    if (!S_ISDIR(status.st_mode))
        refuse(path, S_ISLNK(status.st_mode) ? "it is a symbolic link" : "it is not a folder");
    if (!is_private(status, reason)) refuse(path, reason);
}

}  // namespace

std::vector<std::string> parse_segment_name(std::string_view name) {
    std::vector<std::string> names;
    for (std::string_view rest = name;;) {
        const std::size_t slash = rest.find('/');
        const std::string_view part = rest.substr(0, slash);
        check_one_name(name, part);
        names.emplace_back(part);
        if (slash == std::string_view::npos) return names;
        rest.remove_prefix(slash + 1);
    }
}

bool is_private(const struct ::stat& status, std::string& reason) {
    if (status.st_uid != ::geteuid()) {
        reason = fmt::format("it belongs to the user {}, not to {}", status.st_uid, ::geteuid());
    } else if ((status.st_mode & 077U) != 0) {
        reason = fmt::format("other users have access to it (mode {:o}); chmod go= removes that",
                             status.st_mode & 07777U);
    }
    return reason.empty();
}

checked_folder::checked_folder(fs::path path) : path_(without_slash(std::move(path))) {
    const auto status = system::status_of_link(path_.string());
    if (!status) fail_missing(fmt::format("there are no segments: there is no folder '{}'", path_.string()));
    check_folder(path_, *status);
}

checked_folder checked_folder::create(const fs::path& path) {
    system::make_folder(without_slash(path).string(), 0700);
    return checked_folder(path);
}

fs::path checked_folder::file_of(const std::vector<std::string>& names) const {
    fs::path path = path_;
    for (const std::string& name : names)
        path /= name;
    path += ".npy";
    return path;
}

void checked_folder::check_folders(const std::vector<std::string>& names) const {
    fs::path folder = path_;
    for (std::size_t i = 0; i + 1 < names.size(); ++i) {
        folder /= names[i];
        const auto status = system::status_of_link(folder.string());
        if (!status) fail_missing(fmt::format("there is no segment '{}'", file_of(names).string()));
        check_folder(folder, *status);
    }
}

struct ::stat checked_folder::check(const std::vector<std::string>& names) const {
    check_folders(names);
    const fs::path path = file_of(names);
    const auto status = system::status_of_link(path.string());
    if (!status) {
        fs::path group = path;
        group.replace_extension();
        if (const auto other = system::status_of_link(group.string()); other && S_ISDIR(other->st_mode)) {
            fail_missing(
                fmt::format("there is no segment '{}': '{}' holds several; name one of them as NAME/ARRAY",
                            path.string(), group.string()));
        }
        fail_missing(fmt::format("there is no segment '{}'", path.string()));
    }
    std::string reason;
    if (S_ISLNK(status->st_mode)) refuse(path, "it is a symbolic link");
    if (!S_ISREG(status->st_mode)) refuse(path, "it is not a regular file");
    if (!is_private(*status, reason)) refuse(path, reason);
    return *status;
}

own_descriptor checked_folder::lock() const {
    own_descriptor folder([&] { return system::open_folder(path_.string()); });
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (!system::lock_folder(folder.get(), path_.string())) {
        if (std::chrono::steady_clock::now() > deadline) {
            throw system_failure(
                fmt::format("cannot change '{}': it has been locked for a minute", path_.string()),
                std::make_error_code(std::errc::device_or_resource_busy));
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return folder;
}

std::vector<fs::path> checked_folder::hidden() const {
    std::vector<fs::path> found;
    for (const fs::path& each : entries_of(path_)) {
        if (each.filename().string().front() == '.') found.push_back(each);
    }
    return found;
}

std::vector<fs::path> entries_of(const fs::path& folder) {
    std::vector<fs::path> found;
    std::error_code code;
    fs::directory_iterator entry(folder, code);
    for (; !code && entry != fs::directory_iterator(); entry.increment(code))
        found.push_back(entry->path());
    if (code)
        throw system_failure(fmt::format("cannot list '{}': {}", folder.string(), code.message()), code);
    return found;
}

void remove_tree(const fs::path& path) noexcept {
    std::error_code ignored;
    fs::remove_all(path, ignored);  // does not follow links
}

}  // namespace pinflow::detail
