#pragma once

#include <chrono>

namespace pinflow::detail {

/// Tells how long the calling thread was blocked, rather than computing or kept from a core by others. By the
/// thread's CPU clock, and by whether it has given its core up of its own accord.
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
