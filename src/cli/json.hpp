#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace pinflow::cli {

/// One line of JSON, keys in the order given. Bytes of file names that are no UTF-8 become U+FFFD, as JSON
/// has no way to carry them.
inline std::string json_line(const nlohmann::ordered_json& value) {
    return value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace pinflow::cli
