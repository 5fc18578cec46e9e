#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "pinflow/device.hpp"
#include "pinflow/stream.hpp"

namespace pinflow::detail {

/// The point in a stream, or in two, where the data of some slots is complete. Slots that are filled together
/// share one. Once it is known to be passed, the device is not asked again. Thread-safe, except `record`.
class data_mark {
 public:
    explicit data_mark(const pinflow::device& device) : event_(device), second_event_(device) {}

    /// Marks the work enqueued so far on a stream, or on two.
    void record(stream_view stream, std::optional<stream_view> second = {}) {
        passed_.store(false, std::memory_order_relaxed);
        has_second_ = second.has_value();
        event_.record(stream);
        if (second) second_event_.record(*second);
    }
    /// Makes `stream` wait until it is passed.
    void hold_up(stream_view stream) const {
        stream.wait(event_);
        if (has_second_) stream.wait(second_event_);
    }

    /// Whether it is known to be passed. Does not ask the device.
    bool known_done() const noexcept { return passed_.load(std::memory_order_acquire); }
    /// Whether it has been passed. Never waits.
    /// @throws device_error.
    bool done() const {
        return known_done() || note(event_.done() && (!has_second_ || second_event_.done()));
    }
    /// Waits at most `timeout`, for each stream.
    /// @return whether it has been passed.
    /// @throws device_error.
    bool synchronize_for(std::chrono::microseconds timeout) const {
        return known_done() || note(event_.synchronize_for(timeout) &&
                                    (!has_second_ || second_event_.synchronize_for(timeout)));
    }

 private:
    bool note(bool passed) const noexcept {
        if (passed) passed_.store(true, std::memory_order_release);
        return passed;
    }

    pinflow::event event_;
    pinflow::event second_event_;
    bool has_second_ = false;
    mutable std::atomic<bool> passed_ = false;
};

/// Marks that are reused once nothing else refers to them. For one thread at a time.
class data_marks {
 public:
    /// Makes `count` marks at once. `take` makes more only if something else refers to each of them.
    data_marks(const pinflow::device& device, std::size_t count) : device_(device) {
        for (std::size_t i = 0; i < count; ++i)
            all_.push_back(std::make_shared<data_mark>(device));
    }

    std::shared_ptr<data_mark> take() {
        for (const auto& mark : all_) {
            // a mark with one reference belongs to this list alone, so no other thread can copy it
            if (mark.use_count() != 1) continue;
            std::atomic_thread_fence(
                std::memory_order_acquire);  // orders this after the last use by another thread
            return mark;
        }
        return all_.emplace_back(std::make_shared<data_mark>(device_));
    }

 private:
    pinflow::device device_;
    std::vector<std::shared_ptr<data_mark>> all_;
};

}  // namespace pinflow::detail
