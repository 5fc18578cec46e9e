#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "src/cli/output.hpp"

namespace pinflow::cli {

/// One line of JSON, keys in the order given. Bytes of file names that are not UTF-8 become U+FFFD, because
/// JSON cannot represent them. Characters that would change a terminal are escaped, as `\u202e`.
inline std::string json_line(const nlohmann::ordered_json& value) {
    return escaped_json(value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace)) + "\n";
}

}  // namespace pinflow::cli
