#pragma once

#include <fmt/format.h>

#include <system_error>
#include <utility>

#include "pinflow/error.hpp"
#include "src/core/error_advice.hpp"
#include "src/core/system.hpp"

namespace pinflow::detail::system {

/// @throws system_failure. Takes errno by value first: formatting may change it.
template <typename... Arguments>
[[noreturn]] void fail(int error, fmt::format_string<Arguments...> attempted, Arguments&&... arguments) {
    const std::error_code code(error, std::generic_category());
    throw system_failure(
        fmt::format("{}: {}", fmt::format(attempted, std::forward<Arguments>(arguments)...), described(code)),
        code);
}

}  // namespace pinflow::detail::system
