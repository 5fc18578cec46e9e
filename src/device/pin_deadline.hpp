#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>

namespace pinflow::detail {

using pin_clock = std::chrono::steady_clock;

/// `start` plus `duration`, limited to the clock's maximum.
inline pin_clock::time_point later(pin_clock::time_point start, std::chrono::nanoseconds duration) noexcept {
    return duration < pin_clock::time_point::max() - start ? start + duration : pin_clock::time_point::max();
}

/// Watches a thread's calls that may never return. The first thread that asks about an overdue call gives it
/// up. From then on all threads see it as given up, even if it returns later.
class call_watch {
 public:
    /// Called by the thread before a call that should return by `due`.
    void begin(pin_clock::time_point due) noexcept {
        std::int64_t expected = idle;
        due_.compare_exchange_strong(expected, due.time_since_epoch().count(), std::memory_order_acq_rel);
    }
    /// Called by the thread after the call.
    /// @return false if the call has been given up.
    bool end() noexcept {
        std::int64_t due = due_.load(std::memory_order_relaxed);
        return due != given_up && due_.compare_exchange_strong(due, idle, std::memory_order_acq_rel);
    }
    /// Whether a call has been given up. Gives up an overdue call. Any thread may call it.
    bool has_given_up() noexcept {
        std::int64_t due = due_.load(std::memory_order_acquire);
        if (due == given_up) return true;
        if (due == idle || pin_clock::now().time_since_epoch().count() < due) return false;
        return due_.compare_exchange_strong(due, given_up, std::memory_order_acq_rel) || due == given_up;
    }
    /// The time when the current call becomes overdue. Any thread may call it.
    /// @return the maximum time if there is no call, the minimum time if the call was given up.
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
