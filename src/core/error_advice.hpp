#pragma once

#include <cerrno>
#include <string>
#include <string_view>
#include <system_error>

namespace pinflow::detail {

/// What helps against an error of a system call; empty when the error says it already, or nothing is known.
std::string_view advice_for(int error) noexcept;

/// The error in words, and behind a semicolon what helps.
std::string described(const std::error_code& code);

}  // namespace pinflow::detail
