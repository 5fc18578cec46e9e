#pragma once

#include <atomic>
#include <functional>
#include <memory>

namespace pinflow::detail {

/// A thread of a load, or none. When its work has ended, it waits for the work of another load for a moment:
/// first busily, as waking it takes 50 to 100 us on a virtual machine, then asleep. So one load after another
/// starts no threads.
class load_thread {
 public:
    load_thread() = default;
    /// Runs `work`, which must not throw, on a thread that waits, or on a new one.
    /// @throws system_failure if the system refuses a thread; std::bad_alloc.
    explicit load_thread(std::function<void()> work);
    load_thread(load_thread&&) = default;
    load_thread& operator=(load_thread&&) = default;
    ~load_thread() = default;

    /// Waits until the work has returned. Call it before destroying this, unless there is no thread.
    void join() const noexcept;

 private:
    std::shared_ptr<std::atomic<bool>> is_done_;  ///< null: no thread
};

}  // namespace pinflow::detail
