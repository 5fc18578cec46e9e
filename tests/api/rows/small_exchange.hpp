#pragma once

#include <cstdint>

#include "pinflow/rows.hpp"

/// A small table, for tests of when calls begin and end.

inline constexpr std::uint64_t row_bytes = 200;
inline constexpr std::uint64_t row_count = 300;

/// What an exchange writes to too early shows within so many looks at it.
inline constexpr int looks = 50;

/// Room for few rows at a time, though not so few that more is enqueued behind a gate than CUDA takes, which
/// lets some hundred operations wait in a stream.
inline pinflow::row_exchange_options through_few_slots(pinflow::row_route route) {
    return {.route = route, .threads = 2, .staging_bytes = 40 * row_bytes};
}
