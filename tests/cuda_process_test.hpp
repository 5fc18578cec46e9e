#pragma once

#include <string_view>

/// Runs the part `name` of a test in this process, which was started with `--child NAME`.
/// @return the exit status for main.
int run_as_child(std::string_view name);
