#pragma once

#include <cerrno>
#include <string>
#include <string_view>
#include <system_error>

namespace pinflow::detail {

/// Advice for an errno value; empty if there is none, or if the error's own text suffices.
std::string_view advice_for(int error) noexcept;

/// The error's text, followed by "; " and the advice if there is any.
std::string described(const std::error_code& code);

}  // namespace pinflow::detail
