#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pinflow/shared/segment.hpp"
#include "src/shared/segment_content.hpp"

/// Publishes content of any kind. Names, options and errors are those of pinflow::publish and publish_group.
namespace pinflow::detail {

segment_info publish_content(std::string_view name, segment_content& content, const publish_options& options);

struct named_content {
    std::string name;
    std::unique_ptr<segment_content> content;
};
std::vector<segment_info> publish_contents(std::string_view name, std::span<const named_content> arrays,
                                           const publish_options& options);

}  // namespace pinflow::detail
