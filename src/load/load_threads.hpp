#pragma once

#include <atomic>
#include <functional>
#include <memory>

namespace pinflow::detail {

/// Runs work of a load on a kept or a new thread; or nothing. Afterwards the thread spins for 0.2 ms and
/// sleeps for 100 ms, ready for the next load. Waking it takes 50 to 100 us on a virtual machine.
class load_thread {
 public:
    load_thread() = default;
    /// Runs `work`, which must not throw, on an idle thread, or on a new one.
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
