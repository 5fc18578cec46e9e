#pragma once

#include <functional>

namespace pinflow::detail {

/// While it lives, says whether the rows that the calling thread reads are no longer wanted. A source whose
/// threads wait for each other asks before it begins to read.
class read_stop {
 public:
    /// Whatever is read meanwhile is wanted.
    read_stop() noexcept : outer_(current) { current = nullptr; }
    /// `is_stopped` must outlive the object.
    explicit read_stop(const std::function<bool()>& is_stopped) noexcept : outer_(current) {
        current = &is_stopped;
    }
    read_stop(const read_stop&) = delete;
    read_stop& operator=(const read_stop&) = delete;
    ~read_stop() { current = outer_; }

    static bool is_requested() { return current != nullptr && (*current)(); }

 private:
    static inline thread_local const std::function<bool()>* current = nullptr;
    const std::function<bool()>* outer_;
};

}  // namespace pinflow::detail
