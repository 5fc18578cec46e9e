#pragma once

#include <string_view>

/// What the tests run in a process of its own: main's `--child NAME`. @return the process's exit status.
int run_as_child(std::string_view name);
