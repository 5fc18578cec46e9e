#pragma once

#include <cstdint>

#include "pinflow/rows.hpp"

/// A small table, for tests of when calls begin and end.

inline constexpr std::uint64_t row_bytes = 200;
inline constexpr std::uint64_t row_count = 300;

/// A write that comes too early is seen within this many checks.
inline constexpr int looks = 50;

/// Room for few rows at a time. With fewer rows, a call would enqueue more operations behind a gate than CUDA
/// accepts, which is some hundred in a stream.
inline pinflow::row_exchange_options with_small_staging(pinflow::row_route route) {
    return {.route = route, .threads = 2, .staging_bytes = 40 * row_bytes};
}
