#pragma once

#include <map>
#include <mutex>

#include "pinflow/stream.hpp"

namespace pinflow::detail {

/// A lock for each stream, so that what one thread enqueues on it is not interleaved with the work of
/// another. Thread-safe.
class stream_locks {
 public:
    /// Waits for threads that enqueue on the same stream.
    [[nodiscard]] std::unique_lock<std::mutex> lock(stream_view stream) {
        std::unique_lock finding(mutex_);
        std::mutex& found = locks_[stream.native_handle()];
        finding.unlock();
        return std::unique_lock(found);
    }

 private:
    std::mutex mutex_;  ///< for the map
    /// By handle. A later stream with the handle of one that has ended uses the same lock.
    std::map<void*, std::mutex> locks_;
};

}  // namespace pinflow::detail
