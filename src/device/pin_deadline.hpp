#pragma once

#include <chrono>

namespace pinflow::detail {

using pin_clock = std::chrono::steady_clock;

/// `duration` after `start`, at most the last time that the clock can show.
inline pin_clock::time_point later(pin_clock::time_point start, std::chrono::nanoseconds duration) noexcept {
    return duration < pin_clock::time_point::max() - start ? start + duration : pin_clock::time_point::max();
}

}  // namespace pinflow::detail
