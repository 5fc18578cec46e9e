#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/file.hpp"
#include "src/core/checked.hpp"
#include "src/core/quote.hpp"
#include "src/core/source_check.hpp"
#include "src/shared/publish.hpp"
#include "src/shared/segment_file.hpp"

namespace pinflow {

using namespace detail;

namespace {

std::string one_name(std::string_view name) {
    std::vector<std::string> names = parse_segment_name(name);
    if (names.size() != 1)
        throw invalid_argument(
            fmt::format("{} cannot be published: its name has a slash, which stands "
                        "between a group and its arrays",
                        quote(name)));
    return std::move(names.front());
}

/// Refuses two equal names, and a name that is the folder of another.
void check_distinct(std::string_view group, std::span<const std::vector<std::string>> names) {
    std::set<std::vector<std::string>> arrays(names.begin(), names.end());
    bool collide = arrays.size() != names.size();
    for (const std::vector<std::string>& each : names) {
        for (std::size_t length = 1; length < each.size(); ++length)
            collide = collide ||
                      arrays.contains({each.begin(), each.begin() + static_cast<std::ptrdiff_t>(length)});
    }
    if (collide) {
        throw invalid_argument(fmt::format(
            "cannot publish {}: two of its arrays have the same name, or the name of one is the folder of "
            "another",
            quote(group)));
    }
}

/// Copies `content` to `file`, and adds to `copied_bytes`.
void fill(segment_file& file, segment_content& content, const publish_options& options,
          std::uint64_t& copied_bytes, std::uint64_t total_bytes) {
    const auto count = [&](std::uint64_t size_bytes) {
        copied_bytes += size_bytes;
        if (options.progress) options.progress(copied_bytes, total_bytes);
    };
    file.finish(content.copy({.bytes = file.data(),
                              .allocate_pages = [&](std::span<std::byte> part) { file.allocate_pages(part); },
                              .unmap_pages = [&](std::span<std::byte> part) { file.unmap_pages(part); },
                              .progress = count}));
}

}  // namespace

segment_info detail::publish_content(std::string_view name, segment_content& content,
                                     const publish_options& options) {
    const std::string checked = one_name(name);
    const checked_folder folder = checked_folder::create(options.folder);
    check_name_is_free(folder, checked, false, options.replace);
    segment_file file(folder, folder.file_of({checked}), content.dtype(), content.shape());
    std::uint64_t copied_bytes = 0;
    fill(file, content, options, copied_bytes, file.data().size());
    segment_info info = file.info(checked);
    give_name(file, folder, checked, options.replace);
    return info;
}

std::vector<segment_info> detail::publish_contents(std::string_view name,
                                                   std::span<const named_content> arrays,
                                                   const publish_options& options) {
    const std::string checked = one_name(name);
    if (arrays.empty())
        throw invalid_argument(fmt::format("cannot publish {}: no arrays are given", quote(name)));
    std::vector<std::vector<std::string>> names;
    for (const named_content& each : arrays) {
        try {
            names.push_back(parse_segment_name(each.name));
        } catch (const invalid_argument& failure) {
            throw invalid_argument(
                fmt::format("cannot publish {}: {}; choose other names, or publish the arrays of a file one "
                            "by one, as FILE:NAME",
                            quote(name), failure.what()));
        }
    }
    check_distinct(checked, names);
    const checked_folder folder = checked_folder::create(options.folder);
    check_name_is_free(folder, checked, true, options.replace);
    // room for all of them, before the first takes its memory
    std::uint64_t total_bytes = 0;
    std::uint64_t file_bytes = 0;
    for (const named_content& each : arrays) {
        const std::uint64_t data_bytes =
            saturated(element_count(each.content->shape()), each.content->dtype().size_bytes());
        total_bytes = saturated(data_bytes, 1, total_bytes);
        file_bytes = saturated(min_file_bytes(data_bytes), 1, file_bytes);
    }
    check_room(folder, folder.group_of(checked), file_bytes);
    std::vector<named_file> files;
    for (std::size_t i = 0; i < arrays.size(); ++i) {
        std::vector<std::string> whole{checked};
        whole.insert(whole.end(), names[i].begin(), names[i].end());
        const segment_content& content = *arrays[i].content;
        files.push_back(
            {names[i], segment_file(folder, folder.file_of(whole), content.dtype(), content.shape())});
    }
    std::uint64_t copied_bytes = 0;
    for (std::size_t i = 0; i < arrays.size(); ++i)
        fill(files[i].file, *arrays[i].content, options, copied_bytes, total_bytes);
    std::vector<segment_info> published;
    for (std::size_t i = 0; i < arrays.size(); ++i)
        published.push_back(files[i].file.info(checked + "/" + arrays[i].name));
    give_names(files, folder, checked, options.replace);
    return published;
}

segment_info publish(std::string_view name, const row_source& source, const publish_options& options) {
    check_row_source(source);
    return publish_content(name, *content_of(source), options);
}

std::vector<segment_info> publish_group(std::string_view name, std::span<const named_rows> arrays,
                                        const publish_options& options) {
    std::vector<named_content> contents;
    for (const named_rows& each : arrays) {
        if (!each.rows)
            throw invalid_argument(
                fmt::format("cannot publish {}: the array {} is null", quote(name), quote(each.name)));
        check_row_source(*each.rows);
        contents.push_back({each.name, content_of(*each.rows)});
    }
    return publish_contents(name, contents, options);
}

void verify_segment(std::string_view name, const std::filesystem::path& folder,
                    const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
    const opened_segment opened = open_named(name, folder);
    const std::string& path = opened.data.file()->path();
    if (opened.trailer.is_writable)
        throw unsupported(fmt::format("cannot verify '{}': it can be written, so it has no checksum", path));
    checksum sum;
    std::vector<std::byte> buffer(
        std::min<std::uint64_t>(opened.trailer.data_size_bytes, std::uint64_t{1} << 20));
    for (std::uint64_t at = 0; at < opened.trailer.data_size_bytes; at += buffer.size()) {
        const auto part = std::span(buffer).first(
            std::min<std::uint64_t>(buffer.size(), opened.trailer.data_size_bytes - at));
        opened.data.file()->read(opened.trailer.data_offset_bytes + at, part);
        sum.add(part);
        if (progress) progress(at + part.size(), opened.trailer.data_size_bytes);
    }
    if (sum.text() == opened.trailer.checksum) return;
    throw format_error(
        fmt::format("'{}' has changed: the checksum of its data is {}, but its trailer says {}", path,
                    sum.text(), opened.trailer.checksum));
}

}  // namespace pinflow
