#pragma once

#include <chrono>

namespace pinflow::detail {

/// Measures how long the calling thread was blocked, excluding time spent computing or preempted. Uses the
/// thread's CPU clock and its count of voluntary context switches.
class blocked_timer {
 public:
    blocked_timer() noexcept;

    /// The time for which this thread was blocked since construction. Call it on the same thread.
    std::chrono::nanoseconds blocked() const noexcept;

 private:
    struct reading {
        std::chrono::nanoseconds wall;
        std::chrono::nanoseconds cpu;
        long voluntary_switches;
    };
    static reading now() noexcept;

    reading begin_;
};

}  // namespace pinflow::detail
