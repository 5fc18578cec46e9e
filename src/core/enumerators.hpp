#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string_view>

#include "pinflow/error.hpp"

namespace pinflow::detail {

/// Refuses a value that its enumeration does not have. A cast from an integer may produce one.
/// @param last the last enumerator; the others are 0 ... last - 1.
/// @throws invalid_argument.
template <typename Enum>
void check_enumerator(Enum value, Enum last, std::string_view name) {
    const auto number = static_cast<std::int64_t>(value);
    if (number < 0 || number > static_cast<std::int64_t>(last))
        throw invalid_argument(fmt::format("{} has no value {}", name, number));
}

}  // namespace pinflow::detail
