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

/// The content of rows that it keeps alive.
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

/// Whether an array of a .npz file is compressed: as rows, it would be inflated to other memory first.
bool is_deflated_member(const std::string& path, std::string name) {
    if (format_of(path) != file_format::npz) return false;
    if (name.ends_with(".npy")) name.resize(name.size() - 4);
    const std::vector<array_listing> listed = list_arrays(path);
    const auto found = std::ranges::find_if(
        listed, [&](const array_listing& each) { return each.name == name || each.name == name + ".npy"; });
    return found != listed.end() && found->dtype && !found->mappable;
}

/// @param name empty for the only array of a file.
std::unique_ptr<segment_content> array_content(const std::string& path, const std::string& name) {
    if (is_deflated_member(path, name)) return elements_content(path, name);
    try {
        return rows_content(name.empty() ? path : path + ":" + name);
    } catch (const unsupported&) {
        // it may have no axes, or be in Fortran order
        return elements_content(path, name);
    }
}

}  // namespace

std::vector<segment_info> publish_file(std::string_view name, const std::string& file,
                                       const publish_options& options) {
    if (is_pattern(file))
        return {publish_content(name, *rows_content(file, {.stack = options.stack}), options)};
    const file_and_name split = split_file_and_name(file);
    if (split.named) return {publish_content(name, *array_content(split.path, split.name), options)};
    std::vector<array_listing> listed = list_arrays(split.path);
    std::erase_if(listed, [](const array_listing& each) {  // folders, which some archivers list
        return !each.dtype && each.name.ends_with('/');
    });
    if (listed.empty()) throw invalid_argument(fmt::format("cannot publish '{}': it has no arrays", file));
    if (listed.size() == 1)
        return {publish_content(name, *array_content(split.path, listed.front().name), options)};
    std::vector<named_content> arrays;
    for (const array_listing& each : listed) {
        if (!each.dtype)
            throw unsupported(fmt::format("cannot publish '{}:{}': {}; choose arrays as '{}:NAME'",
                                          split.path, each.name, each.reason, split.path));
        arrays.emplace_back(each.name, array_content(split.path, each.name));
    }
    return publish_contents(name, arrays, options);
}

}  // namespace pinflow
