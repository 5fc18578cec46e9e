#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>

namespace pinflow::detail {

using pin_clock = std::chrono::steady_clock;

/// `duration` after `start`, at most the last time that the clock can show.
inline pin_clock::time_point later(pin_clock::time_point start, std::chrono::nanoseconds duration) noexcept {
    return duration < pin_clock::time_point::max() - start ? start + duration : pin_clock::time_point::max();
}

/// Watches a thread's calls that may never return. A call that is not back in time is given up for good by
/// whoever asks first: from then on all threads agree on it, even if the call returns later.
class call_watch {
 public:
    /// By the thread, before a call that should be back at `due`.
    void begin(pin_clock::time_point due) noexcept {
        std::int64_t expected = idle;
        due_.compare_exchange_strong(expected, due.time_since_epoch().count(), std::memory_order_acq_rel);
    }
    /// By the thread, after it. @return false if the call has been given up.
    bool end() noexcept {
        std::int64_t due = due_.load(std::memory_order_relaxed);
        return due != given_up && due_.compare_exchange_strong(due, idle, std::memory_order_acq_rel);
    }
    /// By any thread: whether a call has been given up. Gives up one that is overdue.
    bool has_given_up() noexcept {
        std::int64_t due = due_.load(std::memory_order_acquire);
        if (due == given_up) return true;
        if (due == idle || pin_clock::now().time_since_epoch().count() < due) return false;
        return due_.compare_exchange_strong(due, given_up, std::memory_order_acq_rel) || due == given_up;
    }
    /// By any thread: when the call that is under way will be overdue; the last time when there is none.
    pin_clock::time_point due() const noexcept {
        const std::int64_t due = due_.load(std::memory_order_acquire);
        return due == given_up ? pin_clock::time_point::min()
                               : pin_clock::time_point(pin_clock::duration(due));
    }

 private:
    static constexpr std::int64_t idle = std::numeric_limits<std::int64_t>::max();
    static constexpr std::int64_t given_up = std::numeric_limits<std::int64_t>::min();

    std::atomic<std::int64_t> due_ = idle;
};

}  // namespace pinflow::detail
