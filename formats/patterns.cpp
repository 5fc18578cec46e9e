#include "formats/patterns.hpp"

#include <dirent.h>
#include <fmt/format.h>
#include <fnmatch.h>
#include <glob.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <iterator>
#include <new>
#include <system_error>

#include "pinflow/error.hpp"
#include "src/core/error_advice.hpp"

namespace pinflow::detail {

namespace {

/// Orders text by its characters, but numbers in it by their value: "part-2" comes before "part-10".
bool natural_less(std::string_view a, std::string_view b) {
    const auto is_digit = [](char character) { return character >= '0' && character <= '9'; };
    /// Takes the leading digits of `text`, without leading zeros.
    const auto take_number = [&](std::string_view& text) {
        std::size_t size = 0;
        while (size < text.size() && is_digit(text[size]))
            ++size;
        std::string_view digits = text.substr(0, size);
        text.remove_prefix(size);
        digits.remove_prefix(std::min(digits.find_first_not_of('0'), digits.size()));
        return digits;
    };
    std::string_view rest_of_a = a;
    std::string_view rest_of_b = b;
    while (!rest_of_a.empty() && !rest_of_b.empty()) {
        if (is_digit(rest_of_a.front()) && is_digit(rest_of_b.front())) {
            const std::string_view number_a = take_number(rest_of_a);
            const std::string_view number_b = take_number(rest_of_b);
            if (number_a.size() != number_b.size()) return number_a.size() < number_b.size();
            if (number_a != number_b) return number_a < number_b;
        } else {
            // as bytes, whatever the sign of char is
            if (rest_of_a.front() != rest_of_b.front())
                return static_cast<unsigned char>(rest_of_a.front()) <
                       static_cast<unsigned char>(rest_of_b.front());
            rest_of_a.remove_prefix(1);
            rest_of_b.remove_prefix(1);
        }
    }
    if (rest_of_a.empty() != rest_of_b.empty()) return rest_of_a.empty();
    return a < b;  // they differ in leading zeros only, if at all
}

/// A missing folder has no matches, but an unreadable one might.
bool is_absence(int failure) {
    return failure == ENOENT || failure == ENOTDIR;
}

/// The error of a stat that failed for another reason than a missing path; 0 if none did. glob takes such
/// paths for missing ones.
thread_local int stat_error = 0;

int noted(int status) {
    if (status != 0 && !is_absence(errno)) stat_error = errno;
    return status;
}

/// `absolute` without symbolic links and "..", up to the first wildcard. The last part stays as it is.
std::filesystem::path without_links(const std::filesystem::path& absolute) {
    std::filesystem::path folder;
    auto part = absolute.begin();
    for (; part != absolute.end() && std::next(part) != absolute.end() && !has_wildcards(part->string());
         ++part)
        folder /= *part;
    std::error_code unknown;
    std::filesystem::path real = std::filesystem::weakly_canonical(folder, unknown);
    if (unknown) real = folder;
    for (; part != absolute.end(); ++part)
        real /= *part;
    return real;
}

}  // namespace

bool has_wildcards(std::string_view text) {
    return text.find_first_of("*?[") != text.npos;
}

bool exists(const std::string& path) {
    std::error_code ignored;
    return std::filesystem::exists(path, ignored);
}

std::vector<std::string> matches_of(const std::string& pattern) {
    if (!has_wildcards(pattern) || pattern.find('\0') != pattern.npos) return {};
    ::glob_t found{};
    found.gl_opendir = [](const char* name) -> void* { return ::opendir(name); };
    found.gl_readdir = [](void* folder) { return ::readdir(static_cast<::DIR*>(folder)); };
    found.gl_closedir = [](void* folder) { ::closedir(static_cast<::DIR*>(folder)); };
    found.gl_stat = [](const char* name, struct ::stat* to) { return noted(::stat(name, to)); };
    found.gl_lstat = [](const char* name, struct ::stat* to) { return noted(::lstat(name, to)); };
    const auto stop_at = [](const char* /*folder*/, int failure) { return is_absence(failure) ? 0 : 1; };
    stat_error = 0;
    const int status = ::glob(pattern.c_str(), GLOB_NOSORT | GLOB_ALTDIRFUNC, stop_at, &found);
    const int error = status == GLOB_ABORTED ? errno : stat_error;
    std::vector<std::string> paths;
    try {
        if (status == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    } catch (...) {
        ::globfree(&found);
        throw;
    }
    ::globfree(&found);
    if (status == GLOB_NOSPACE) throw std::bad_alloc();
    if (status == GLOB_ABORTED || stat_error != 0) {
        const std::error_code code(error, std::generic_category());
        throw system_failure(
            fmt::format("cannot look for the files that match '{}': {}", pattern, described(code)), code);
    }
    std::ranges::sort(paths, natural_less);
    return paths;
}

matched_files files_of_pattern(const std::string& text) {
    matched_files found;
    try_cuts(text, [&](const file_and_name& cut) {
        found.paths = matches_of(cut.path);
        if (cut.named) found.name = cut.name;
        return !found.paths.empty();
    });
    return found;
}

bool pattern_covers(const std::string& text, const std::string& path) {
    // as absolute paths: "./part-1.npy" is a file of 'part-*.npy', too
    const auto normal = [](const std::string& name) {
        std::error_code no_folder;
        const std::filesystem::path whole = std::filesystem::absolute(name, no_folder);
        return (no_folder ? std::filesystem::path(name) : whole).lexically_normal();
    };
    const auto matches = [](const std::filesystem::path& pattern, const std::filesystem::path& name) {
        return ::fnmatch(pattern.c_str(), name.c_str(), FNM_PATHNAME | FNM_PERIOD) == 0;
    };
    bool covers = false;
    try_cuts(text, [&](const file_and_name& cut) {
        const std::filesystem::path pattern = normal(cut.path);
        const std::filesystem::path name = normal(path);
        return covers = matches(pattern, name) || matches(without_links(pattern), without_links(name));
    });
    return covers;
}

}  // namespace pinflow::detail
