#pragma once

#include <string_view>

/// Runs main's `--child NAME`, a test in its own process. @return the process's exit status.
int run_as_child(std::string_view name);
