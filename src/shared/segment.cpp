#include "pinflow/shared/segment.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "src/core/system_folders.hpp"
#include "src/shared/segment_file.hpp"

namespace pinflow {

namespace {

namespace fs = std::filesystem;
using namespace detail;

std::string label_of(std::string_view name) {
    return fmt::format("shm:{}", name);
}

/// Walks the folder and its subfolders. Calls `other` for each entry whose name begins with a dot, `found`
/// for each other entry whose name ends in .npy, and `other` for each other file. Entries that vanish
/// meanwhile are skipped.
/// @param names the names of the subfolders above; `found` gets them and the entry's own name without .npy.
template <typename Found, typename Other>
void walk(const fs::path& folder, std::vector<std::string>& names, const Found& found, const Other& other) {
    for (const fs::path& path : entries_of(folder)) {
        const auto status = system::status_of_link(path.string());
        if (!status) continue;
        const bool is_hidden = path.filename().string().front() == '.';
        if (!is_hidden && S_ISDIR(status->st_mode) && path.extension() != ".npy") {
            names.push_back(path.filename().string());
            try {
                walk(path, names, found, other);
            } catch (const system_failure& failure) {
                if (failure.code() != std::errc::no_such_file_or_directory) throw;
            }
            names.pop_back();
        } else if (!is_hidden && path.extension() == ".npy") {
            names.push_back(path.stem().string());
            found(names, path, *status);
            names.pop_back();
        } else {
            other(path, *status);
        }
    }
}

std::string joined(const std::vector<std::string>& names) {
    std::string name;
    for (const std::string& each : names)
        name += (name.empty() ? "" : "/") + each;
    return name;
}

/// Whether the file is not a complete segment. False if that cannot be found out.
bool is_damaged(const checked_folder& folder, const std::vector<std::string>& names) {
    try {
        open_checked(folder, names);
        return false;
    } catch (const format_error&) {
        return true;
    } catch (const error&) {
        return false;
    }
}

/// Removes the empty folders in a folder, the innermost first.
void remove_empty_folders(const fs::path& folder, std::vector<fs::path>& removed) {
    for (const fs::path& path : entries_of(folder)) {
        const auto status = system::status_of_link(path.string());
        if (!status || !S_ISDIR(status->st_mode)) continue;
        remove_empty_folders(path, removed);
        system::remove_folder(path.string());
        if (!system::status_of_link(path.string())) removed.push_back(path);
    }
}

/// A folder that exists; empty if there is none.
std::optional<checked_folder> existing(const fs::path& path) {
    if (!system::status_of_link(path.string())) return std::nullopt;
    return checked_folder(path);
}

}  // namespace

fs::path segment_folder() {
    return fmt::format("/dev/shm/pinflow-{}", ::geteuid());
}

array open_segment(std::string_view name, const fs::path& folder) {
    return open_named(name, folder).data.labelled(label_of(name));
}

fs::path find_segment(std::string_view name, const fs::path& folder) {
    return open_named(name, folder).data.file()->path();
}

std::vector<segment_info> list_segments(const fs::path& folder) {
    const auto checked = existing(folder);
    if (!checked) return {};
    std::vector<segment_info> listed;
    const auto add_problem = [&](std::string name, const fs::path& path, const struct ::stat& status,
                                 std::string problem) {
        segment_info info;
        info.name = std::move(name);
        info.path = path;
        info.file_size_bytes = S_ISREG(status.st_mode) ? static_cast<std::uint64_t>(status.st_size) : 0;
        info.problem = std::move(problem);
        listed.push_back(std::move(info));
    };
    const auto add_file = [&](const std::vector<std::string>& names, const fs::path& path,
                              const struct ::stat& status) {
        const std::string name = joined(names);
        try {
            static_cast<void>(parse_segment_name(name));
            const opened_segment opened = open_checked(*checked, names);
            listed.push_back(info_of(name, path, opened.data.file()->size_bytes(), opened.data.dtype(),
                                     opened.data.shape(), opened.trailer));
        } catch (const error& failure) {
            if (!system::status_of_link(path.string())) return;  // it was removed meanwhile
            add_problem(name, path, status, failure.what());
        }
    };
    const auto add_other = [&](const fs::path& path, const struct ::stat& status) {
        const bool is_hidden = path.filename().string().front() == '.';
        const bool is_in_group = path.parent_path() != checked->path();
        add_problem(path.lexically_relative(checked->path()).string(), path, status,
                    fmt::format("'{}' is not a segment: {}", path.string(),
                                !is_hidden ? "its name does not end in .npy"
                                : is_in_group
                                    ? "its name begins with a dot, and pinflow makes no such names in groups"
                                    : "a process is publishing or removing segments, or a killed "
                                      "process has left it (then `pinflow clean` removes it)"));
    };
    std::vector<std::string> names;
    walk(checked->path(), names, add_file, add_other);
    std::ranges::sort(listed, {}, &segment_info::name);
    return listed;
}

void remove_segment(std::string_view name, const fs::path& folder) {
    const std::vector<std::string> names = parse_segment_name(name);
    const checked_folder checked(folder);
    const own_descriptor lock = checked.lock();
    checked.check_folders(names);
    const fs::path file = checked.file_of(names);
    if (system::status_of_link(file.string())) {
        system::remove_name(file.string());
        // folders of a group that have become empty
        fs::path parent = file;
        for (std::size_t i = 1; i < names.size(); ++i) {
            parent = parent.parent_path();
            system::remove_folder(parent.string());
        }
        return;
    }
    const fs::path group = checked.group_of(names.front());
    const auto status = system::status_of_link(group.string());
    if (names.size() > 1 || !status) {
        throw system_failure(fmt::format("there is no segment '{}'", file.string()),
                             std::make_error_code(std::errc::no_such_file_or_directory));
    }
    // out of sight first, so that nobody opens a part of it
    const fs::path hidden = checked.path() / ("." + names.front());
    remove_tree(hidden);
    system::rename_to_new(group.string(), hidden.string());
    remove_tree(hidden);
}

std::vector<fs::path> clean_segments(const fs::path& folder) {
    const auto checked = existing(folder);
    if (!checked) return {};
    const own_descriptor lock = checked->lock();
    std::vector<fs::path> removed;
    const auto remove = [&](const fs::path& path) {
        remove_tree(path);
        if (!system::status_of_link(path.string())) removed.push_back(path);
    };
    for (const fs::path& path : checked->hidden())
        remove(path);
    const auto remove_if_damaged = [&](const std::vector<std::string>& names, const fs::path& path,
                                       const struct ::stat&) {
        if (is_damaged(*checked, names)) remove(path);
    };
    std::vector<std::string> names;
    walk(checked->path(), names, remove_if_damaged, [](const fs::path&, const struct ::stat&) {});
    remove_empty_folders(checked->path(), removed);
    return removed;
}

}  // namespace pinflow
