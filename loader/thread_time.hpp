#pragma once

#include <chrono>

namespace pinflow::detail {

/// Measures how long the calling thread was blocked, excluding time spent computing or preempted. Uses the
/// thread's CPU clock and its count of voluntary context switches.
class blocked_timer {
 public:
    blocked_timer() noexcept;

    /// Since construction, on the same thread.
    std::chrono::nanoseconds blocked() const noexcept;

 private:
    struct reading {
        std::chrono::nanoseconds wall;
        std::chrono::nanoseconds cpu;
        long times_given_up;
    };
    static reading now() noexcept;

    reading begin_;
};

}  // namespace pinflow::detail
