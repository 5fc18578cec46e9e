#pragma once

#include <fmt/format.h>

#include <utility>

#include "pinflow/error.hpp"

namespace pinflow::detail {

/// The message of the exception is the formatted sentence.
template <typename... Arguments>
[[noreturn]] void throw_format_error(fmt::format_string<Arguments...> sentence, Arguments&&... arguments) {
    throw format_error(fmt::format(sentence, std::forward<Arguments>(arguments)...));
}

template <typename... Arguments>
[[noreturn]] void throw_unsupported(fmt::format_string<Arguments...> sentence, Arguments&&... arguments) {
    throw unsupported(fmt::format(sentence, std::forward<Arguments>(arguments)...));
}

}  // namespace pinflow::detail
