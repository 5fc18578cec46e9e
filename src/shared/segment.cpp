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

/// Calls `found` with the names of every file in the folder that ends in .npy, and `other` with the path of
/// everything else, and of what begins with a dot.
template <typename Found, typename Other>
void walk(const fs::path& folder, std::vector<std::string>& names, const Found& found, const Other& other) {
    for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
        const fs::path& path = entry.path();
        if (path.filename().string().front() == '.') {
            other(path);
        } else if (entry.is_directory() && !entry.is_symlink()) {
            names.push_back(path.filename().string());
            walk(path, names, found, other);
            names.pop_back();
        } else if (path.extension() == ".npy") {
            names.push_back(path.stem().string());
            found(names, path);
            names.pop_back();
        } else {
            other(path);
        }
    }
}

std::string joined(const std::vector<std::string>& names) {
    std::string name;
    for (const std::string& each : names)
        name += (name.empty() ? "" : "/") + each;
    return name;
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
    return open_checked(checked_folder(folder), parse_segment_name(name)).data.labelled(label_of(name));
}

fs::path find_segment(std::string_view name, const fs::path& folder) {
    return open_checked(checked_folder(folder), parse_segment_name(name)).data.file()->path();
}

std::vector<segment_info> list_segments(const fs::path& folder) {
    const auto checked = existing(folder);
    if (!checked) return {};
    std::vector<segment_info> listed;
    const auto add_file = [&](const std::vector<std::string>& names, const fs::path& path) {
        const std::string name = joined(names);
        try {
            listed.push_back(info_of(open_checked(*checked, names), name));
        } catch (const error& failure) {
            std::error_code gone;
            segment_info info;
            info.name = name;
            info.path = path;
            info.file_size_bytes = fs::file_size(path, gone);
            if (gone && !fs::is_symlink(path, gone)) return;  // it was removed meanwhile
            if (gone) info.file_size_bytes = 0;
            info.problem = failure.what();
            listed.push_back(std::move(info));
        }
    };
    const auto add_other = [&](const fs::path& path) {
        segment_info info;
        info.path = path;
        info.name = fs::relative(path, checked->path()).string();
        const bool is_hidden = path.filename().string().front() == '.';
        info.problem =
            fmt::format("'{}' is not a segment: {}", path.string(),
                        is_hidden ? "a process that was killed has left it, or it is being replaced"
                                  : "its name does not end in .npy");
        listed.push_back(std::move(info));
    };
    std::vector<std::string> names;
    try {
        walk(checked->path(), names, add_file, add_other);
    } catch (const fs::filesystem_error& failure) {
        throw system_failure(fmt::format("cannot list '{}': {}", folder.string(), failure.what()),
                             failure.code());
    }
    std::ranges::sort(listed, {}, &segment_info::name);
    return listed;
}

void remove_segment(std::string_view name, const fs::path& folder) {
    const std::vector<std::string> names = parse_segment_name(name);
    const checked_folder checked(folder);
    const folder_lock lock = checked.lock();
    const fs::path file = checked.file_of(names);
    if (system::status_of_link(file.string())) {
        system::remove_name(file.string());
        // folders of a group that have become empty
        for (fs::path parent = file.parent_path(); parent != checked.path(); parent = parent.parent_path())
            system::remove_folder(parent.string());
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
    const folder_lock lock = checked->lock();
    std::vector<fs::path> removed = checked->left_behind();
    for (const fs::path& path : removed)
        remove_tree(path);
    for (const segment_info& each : list_segments(folder)) {
        if (each.problem.empty()) continue;
        removed.push_back(each.path);
        remove_tree(each.path);
    }
    return removed;
}

}  // namespace pinflow
