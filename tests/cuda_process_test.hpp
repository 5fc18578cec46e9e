#pragma once

#include <string_view>

/// Runs the part `name` of a test in this process, which main was started for with `--child NAME`.
/// @return the process's exit status.
int run_as_child(std::string_view name);
