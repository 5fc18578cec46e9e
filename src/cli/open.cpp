#include "src/cli/open.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "pinflow/error.hpp"
#include "src/cli/arguments.hpp"

namespace pinflow::cli {

namespace {

void refuse_segment(const std::string& text) {
    if (text.starts_with("shm:")) {
        throw usage_error(
            fmt::format("this build of pinflow cannot open shared segments, such as '{}'", text));
    }
}

}  // namespace

source_argument find_source(const std::string& text) {
    refuse_segment(text);
    if (text.empty()) throw invalid_argument("cannot open '': the path is empty");
    if (is_pattern(text)) return {text, std::nullopt, std::nullopt};
    file_and_name split = split_file_and_name(text);
    const file_format format = format_of(split.path);
    std::optional<std::string> name;
    if (split.named) name = std::move(split.name);
    return {std::move(split.path), std::move(name), format};
}

void check_stacks(bool stack, const source_argument& source) {
    if (stack && !source.is_pattern())
        throw usage_error(fmt::format("--stack needs a pattern of several files, which '{}' is not: {}",
                                      source.path, quote_pattern));
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

std::shared_ptr<const row_source> open_source_rows(const std::string& text, const open_options& options) {
    refuse_segment(text);
    return open_rows(text, options);
}

}  // namespace pinflow::cli
