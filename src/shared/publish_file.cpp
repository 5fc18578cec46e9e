#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "formats/element_streams.hpp"
#include "pinflow/error.hpp"
#include "pinflow/formats/listing.hpp"
#include "pinflow/formats/open.hpp"
#include "src/core/memory_limits.hpp"
#include "src/core/source_check.hpp"
#include "src/shared/publish.hpp"

namespace pinflow {

namespace {

using namespace detail;

/// The content of a row source, which it keeps alive.
class owned_rows final : public segment_content {
 public:
    explicit owned_rows(std::shared_ptr<const row_source> rows)
        : rows_(std::move(rows)), content_(content_of(*rows_)) {}
    const pinflow::dtype& dtype() const noexcept override { return content_->dtype(); }
    shape_vector shape() const override { return content_->shape(); }
    std::string copy(const copy_target& to) override { return content_->copy(to); }

 private:
    std::shared_ptr<const row_source> rows_;
    std::unique_ptr<segment_content> content_;
};

std::unique_ptr<segment_content> rows_content(const std::string& text, const open_options& options = {}) {
    auto rows = open_rows(text, options);
    check_row_source(*rows);
    return std::make_unique<owned_rows>(std::move(rows));
}

std::unique_ptr<segment_content> elements_content(const std::string& path, const std::string& name) {
    constexpr std::uint64_t usual_bytes = std::uint64_t{64} << 20;
    const std::uint64_t memory_bytes = std::min(usual_bytes, read_available_memory().size_bytes / 4);
    return content_of(open_elements(path)->stream(name, memory_bytes));
}

/// Whether an array is a compressed member of a .npz file: as rows, it would be inflated to other memory
/// first.
bool is_deflated_member(file_format format, const array_listing& listed) {
    return format == file_format::npz && listed.dtype && !listed.mappable;
}

/// @param name empty for the only array of a file.
std::unique_ptr<segment_content> array_content(const std::string& path, const std::string& name,
                                               bool is_deflated) {
    if (is_deflated) return elements_content(path, name);
    try {
        return rows_content(name.empty() ? path : path + ":" + name);
    } catch (const unsupported&) {
        // it may have no axes, or be in Fortran order
        return elements_content(path, name);
    }
}

/// The content of the array NAME of a file. Lists the members of a .npz file, to see whether this one is
/// compressed.
std::unique_ptr<segment_content> named_array_content(const std::string& path, std::string name) {
    bool is_deflated = false;
    if (format_of(path) == file_format::npz) {
        if (name.ends_with(".npy")) name.resize(name.size() - 4);
        is_deflated = std::ranges::any_of(list_arrays(path), [&](const array_listing& each) {
            return (each.name == name || each.name == name + ".npy") &&
                   is_deflated_member(file_format::npz, each);
        });
    }
    return array_content(path, name, is_deflated);
}

}  // namespace

std::vector<segment_info> publish_file(std::string_view name, const std::string& file,
                                       const publish_options& options) {
    if (is_pattern(file))
        return {publish_content(name, *rows_content(file, {.stack = options.stack}), options)};
    const file_and_name split = split_file_and_name(file);
    if (split.named) return {publish_content(name, *named_array_content(split.path, split.name), options)};
    const file_format format = format_of(split.path);
    std::vector<array_listing> listed = list_arrays(split.path);
    std::erase_if(listed, [](const array_listing& each) {  // folders, which some archivers list
        return !each.dtype && each.name.ends_with('/');
    });
    if (listed.empty()) throw invalid_argument(fmt::format("cannot publish '{}': it has no arrays", file));
    if (listed.size() == 1)
        return {publish_content(
            name, *array_content(split.path, listed.front().name, is_deflated_member(format, listed.front())),
            options)};
    std::vector<named_content> arrays;
    for (const array_listing& each : listed) {
        if (!each.dtype)
            throw unsupported(fmt::format("cannot publish '{}:{}': {}; choose arrays as '{}:NAME'",
                                          split.path, each.name, each.reason, split.path));
        arrays.emplace_back(each.name,
                            array_content(split.path, each.name, is_deflated_member(format, each)));
    }
    return publish_contents(name, arrays, options);
}

}  // namespace pinflow
