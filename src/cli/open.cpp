#include "src/cli/open.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "pinflow/error.hpp"
#include "pinflow/formats/hdf5.hpp"
#include "pinflow/shared/segment.hpp"
#include "src/cli/arguments.hpp"

namespace pinflow::cli {

namespace {

/// Describes a field of a structured .npy file, which has no listing of its own.
array_listing list_field(const std::string& path, const std::string& name) {
    const array field = open(path, name);
    array_listing listing = list_arrays(path).front();
    listing.name = name;
    listing.dtype = field.dtype();
    listing.shape = field.shape();
    listing.offset_bytes = field.offset_bytes();
    listing.size_bytes = field.size_bytes();
    listing.mappable = field.has_view();
    listing.reason = field.reason();
    return listing;
}

}  // namespace

source_argument find_source(const std::string& text) {
    if (text.starts_with(segment_prefix)) {
        const std::string name = text.substr(segment_prefix.size());
        return {find_segment(name).string(), std::nullopt, file_format::npy, open_segment(name).dtype()};
    }
    if (text.empty()) throw invalid_argument("cannot open '': the path is empty");
    if (is_pattern(text)) return {text, std::nullopt, std::nullopt, std::nullopt};
    file_and_name split = split_file_and_name(text);
    const file_format format = format_of(split.path);
    std::optional<std::string> name;
    if (split.named) name = std::move(split.name);
    return {std::move(split.path), std::move(name), format, std::nullopt};
}

void check_stacks(bool stack, const source_argument& source) {
    if (stack && !source.is_pattern())
        throw usage_error(
            fmt::format("--stack needs a pattern, which '{}' is not: {}", source.path, quote_pattern));
}

std::string names_of(const std::vector<array_listing>& arrays) {
    constexpr std::size_t max_named = 10;
    std::string names;
    for (std::size_t i = 0; i < std::min(arrays.size(), max_named); ++i) {
        names += fmt::format("{}'{}'", i == 0 ? "" : ", ", arrays[i].name);
    }
    if (arrays.size() > max_named) names += ", ...";
    return names;
}

array_listing find_array(const source_argument& source) {
    const std::string& name = *source.name;
    if (source.format == file_format::npy) return list_field(source.path, name);
    if (source.format == file_format::hdf5) return list_hdf5(source.path, name);
    std::vector<array_listing> listed = list_arrays(source.path);
    auto found = std::ranges::find(listed, name, &array_listing::name);
    if (found == listed.end() && source.format == file_format::npz && name.ends_with(".npy")) {
        found = std::ranges::find(listed, name.substr(0, name.size() - 4), &array_listing::name);
    }
    if (found == listed.end()) {
        throw invalid_argument(fmt::format("cannot open '{}' of '{}': it has no such array (it has {})", name,
                                           source.path, listed.empty() ? "none" : names_of(listed)));
    }
    if (!found->dtype) {
        throw unsupported(fmt::format("cannot open '{}' of '{}': {}", name, source.path, found->reason));
    }
    return std::move(*found);
}

std::vector<array_listing> list_group(const std::string& text) {
    std::vector<array_listing> listed;
    if (!text.starts_with(segment_prefix)) return listed;
    const std::string group = text.substr(segment_prefix.size()) + "/";
    for (const segment_info& each : list_segments()) {
        if (!each.name.starts_with(group) || !each.problem.empty()) continue;
        array_listing listing = list_arrays(each.path).front();
        listing.name = each.name.substr(group.size());
        listing.dtype = each.dtype;
        listed.push_back(std::move(listing));
    }
    return listed;
}

bool has_scattered_rows(const array_listing& listed) {
    const auto is_long = [](std::uint64_t length) { return length > 1; };
    return listed.fortran_order && listed.size_bytes > 0 && std::ranges::count_if(listed.shape, is_long) > 1;
}

std::shared_ptr<const row_source> open_source_rows(const std::string& text, const open_options& options) {
    if (text.starts_with(segment_prefix)) return open_segment(text.substr(segment_prefix.size())).rows();
    return open_rows(text, options);
}

}  // namespace pinflow::cli
