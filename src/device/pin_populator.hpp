#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <thread>

namespace pinflow::detail {

/// Brings pages into the page table while other pages are registered: read-only pages on its own thread, all
/// other pages on all cores. Pages of files and of shared memory are only read. Without the populator, the
/// registration would read from the disk itself, and meanwhile block all other calls in its context. If
/// the thread cannot be started, the populator does nothing, and the registration brings the pages in. For
/// one thread at a time.
class pin_populator {
 public:
    /// @param stop ends the work early once it is true; must outlive the populator
    explicit pin_populator(const std::atomic<bool>& stop);
    /// Waits for the thread, which skips the requests that it has not begun.
    ~pin_populator();
    pin_populator(const pin_populator&) = delete;
    pin_populator& operator=(const pin_populator&) = delete;

    struct request {
        std::span<const std::byte> pages;
        bool read_only;
        bool shared;
    };
    /// Adds a request. Does not wait.
    void add(const request& wanted);
    /// Waits for the oldest request that has not been waited for yet. There must be one.
    void wait_for_next();

 private:
    void run() noexcept;
    void populate(const request& wanted) const noexcept;
    bool is_ending() const noexcept;

    const std::atomic<bool>& stop_;
    std::atomic<bool> ending_ = false;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<request> requests_;
    std::uint64_t finished_count_ = 0;
    std::uint64_t awaited_count_ = 0;
    std::thread thread_;
};

}  // namespace pinflow::detail
