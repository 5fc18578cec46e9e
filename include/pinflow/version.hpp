#pragma once

#include <string_view>

namespace pinflow {

/// The library's version, "MAJOR.MINOR.PATCH". CMake reads it from this line.
inline constexpr std::string_view version = "0.1.0";

}  // namespace pinflow
