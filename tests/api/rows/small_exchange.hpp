#pragma once

#include <cstdint>

#include "pinflow/rows.hpp"

/// A small table, for tests of when calls begin and end.

inline constexpr std::uint64_t row_bytes = 200;
inline constexpr std::uint64_t row_count = 300;

/// How many times a test looks for a write that comes too early.
inline constexpr int looks = 50;

/// Staging buffers for few rows. With smaller ones, a call would enqueue more operations behind a gate than
/// CUDA queues, which is a few hundred per stream.
inline pinflow::row_exchange_options with_small_staging(pinflow::row_route route) {
    return {.route = route, .threads = 2, .staging_bytes = 40 * row_bytes};
}
