#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pinflow/buffer.hpp"
#include "src/device/pin_deadline.hpp"
#include "src/device/pin_reservations.hpp"

namespace pinflow::detail {

/// Why pages cannot be registered.
struct pin_refusal {
    std::string reason;            ///< the end of a sentence
    bool same_for_others = false;  ///< also for all other pages with the same read-only flag
    bool may_be_locked = false;    ///< the pages must stay mapped for good
};

/// Page-locks host memory in place, for a device. The seam between the registry and CUDA.
class page_locker {
 public:
    virtual ~page_locker() = default;
    /// Registers whole pages. `read_only` is for pages that the device must not write, such as pages of a
    /// file.
    /// @return nothing if the pages are registered, or page-locked by other code: `unlock` leaves these
    /// locked. A refusal by the system is returned, not thrown.
    virtual std::optional<pin_refusal> lock(std::span<const std::byte> pages, bool read_only) = 0;
    /// @return false if the pages may still be locked. They must then stay mapped for good.
    virtual bool unlock(std::span<const std::byte> pages) noexcept = 0;
    /// Called between two calls of `lock` while a reader copies. May pause briefly, so that others can use
    /// the device.
    virtual void yield_driver() noexcept = 0;
};

/// The locker of CUDA device `index`. It is never destroyed. Only in builds with CUDA.
/// @throws device_error if the device cannot be used.
page_locker& cuda_page_locker(int index);

/// Keeps the host pages that pinflow has registered in place, process-wide. Of pinned buffers it keeps only
/// the size. Pages form intervals that never overlap. Holders of each interval are counted, so that arrays
/// that share pages can come and go in any order. Thread-safe. The mutex is not held during page_locker::lock
/// and unlock.
class pin_registry {
 public:
    /// The registry of the process. It is never destroyed.
    static pin_registry& process();

    /// Intervals that a holder uses, by their first addresses.
    using holds = std::vector<std::uintptr_t>;

    /// Registers those of `pages` (whole pages) that are not registered yet, and counts a holder for all of
    /// them. If another holder is registering or unregistering some of the pages, the call waits for that
    /// operation. If the operation takes longer than `busy_deadline`, the call refuses.
    /// @param owner keeps the memory mapped until its pages are unregistered
    /// @param held receives the intervals, which must be given to `release`
    /// @return nothing if all pages are registered. After a refusal or an exception, the call holds no pages.
    /// A std::exception of the locker is a refusal.
    std::optional<pin_refusal> acquire(page_locker& locker, std::span<const std::byte> pages, bool read_only,
                                       const std::shared_ptr<const void>& owner, holds& held,
                                       std::chrono::nanoseconds busy_deadline = std::chrono::seconds(30));
    /// Removes a holder of these intervals. Unregisters the intervals that have no holder left, then releases
    /// their owners. If pages may still be locked, their interval and its owner are kept.
    void release(std::span<const std::uintptr_t> held) noexcept;

    /// Reserves `pages` of a budget before they are acquired: see pin_reservations::add.
    bool reserve(std::span<const std::byte> pages, std::uint64_t budget_bytes);
    /// Undoes one successful `reserve` of the same pages.
    void give_back(std::span<const std::byte> pages) noexcept;
    /// Bytes reserved now by all holders together.
    std::uint64_t reserved_bytes() const;
    /// Counts pages of pinned buffers. They use up a part of a budget that was set, and are never refused.
    void add_buffer(std::uint64_t size_bytes) noexcept { buffer_bytes_ += size_bytes; }
    /// Undoes one `add_buffer` of the same size.
    void remove_buffer(std::uint64_t size_bytes) noexcept { buffer_bytes_ -= size_bytes; }
    std::uint64_t buffer_bytes() const noexcept { return buffer_bytes_; }
    /// Whether some of `bytes` are registered in place by pinflow, or are being registered or unregistered.
    /// Their registration may end when their holders release them.
    bool knows(std::span<const std::byte> bytes) const;
    /// The number of intervals: registered, or being registered or unregistered.
    std::size_t size() const;

    /// Appends `ranges` to `pieces`, cut at both ends of each interval of the source, because CUDA does not
    /// guarantee copies across such a boundary. Leaves out ranges of size 0.
    void cut(std::span<const copy_range> ranges, std::vector<copy_range>& pieces) const;

 private:
    struct interval {
        std::uintptr_t end = 0;
        std::uint64_t users = 0;
        bool busy = false;  ///< being registered or unregistered
        pin_clock::time_point busy_since;
        page_locker* locker = nullptr;
        std::shared_ptr<const void> owner;
    };

    /// Adds the counted intervals to `taken`, even if it throws or refuses. Returns with the lock held.
    std::optional<pin_refusal> acquire_locked(std::unique_lock<std::mutex>& lock, page_locker& locker,
                                              std::span<const std::byte> pages, bool read_only,
                                              const std::shared_ptr<const void>& owner, holds& taken,
                                              std::chrono::nanoseconds busy_deadline);
    void release_locked(std::unique_lock<std::mutex>& lock, std::span<const std::uintptr_t> held) noexcept;
    std::uintptr_t edge_after(std::uintptr_t address) const;

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::map<std::uintptr_t, interval> intervals_;  // by their first address
    /// 0 only if no interval is registered. Updated after each successful registration and release. `cut`
    /// reads it without the lock.
    std::atomic<std::size_t> count_ = 0;
    pin_reservations reserved_;
    std::atomic<std::uint64_t> buffer_bytes_ = 0;
    std::list<std::shared_ptr<const void>>
        kept_;  // owners of pages that may be registered though `lock` failed
};

}  // namespace pinflow::detail
