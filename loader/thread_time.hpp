#pragma once

#include <chrono>

namespace pinflow::detail {

/// Measures how long the calling thread was blocked: its wall time less its CPU time, or 0 if it made no
/// voluntary context switch. So time in which it was preempted counts only if it was also blocked.
class blocked_timer {
 public:
    blocked_timer() noexcept;

    /// The time for which this thread was blocked since construction. Call it on the same thread.
    std::chrono::nanoseconds blocked() const noexcept;
    /// Whether a page fault of this thread since construction had to read from storage.
    bool has_faulted() const noexcept;

 private:
    struct reading {
        std::chrono::nanoseconds wall;
        std::chrono::nanoseconds cpu;
        long voluntary_switches;
        long major_faults;
    };
    static reading now() noexcept;

    reading begin_;
};

}  // namespace pinflow::detail
