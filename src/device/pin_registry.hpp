#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
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
    bool same_for_others = false;  ///< all other pages that are read-only as these would be refused, too
};

/// Page-locks host memory where it lies, for a device; the seam between the registry and CUDA.
class page_locker {
 public:
    virtual ~page_locker() = default;
    /// Registers whole pages. `read_only` is for pages that the device must not write: those of a file.
    /// @return nothing if they are registered. Never throws for what the system refuses.
    virtual std::optional<pin_refusal> lock(std::span<const std::byte> pages, bool read_only) = 0;
    /// @return false when the pages may still be locked, and so must stay mapped for good.
    virtual bool unlock(std::span<const std::byte> pages) noexcept = 0;
    /// Waits between two calls for a moment, in which others can use the device.
    virtual void give_way() noexcept = 0;
};

/// CUDA's, for device `index`; it outlives everything. Only in builds with CUDA.
page_locker& cuda_page_locker(int index);

/// Which host pages are registered with CUDA by pinflow, process-wide: intervals of pages that never overlap,
/// counted, so that arrays which share pages can come and go in any order. Thread-safe; no lock is held while
/// pages are locked.
class pin_registry {
 public:
    /// The process's own; it outlives everything.
    static pin_registry& process();

    /// Intervals that a holder counts on, by their addresses.
    using holds = std::vector<std::uintptr_t>;

    /// Registers those of `pages` (whole pages) that are not registered yet, and counts on all of them. What
    /// is added to `held` must be given to `release`. `owner` keeps the memory mapped until its pages are
    /// unregistered. Pages that another holder is registering or unregistering are waited for, until that has
    /// taken `busy_deadline`.
    /// @return nothing if all are registered; nothing is held otherwise.
    std::optional<pin_refusal> acquire(page_locker& locker, std::span<const std::byte> pages, bool read_only,
                                       const std::shared_ptr<const void>& owner, holds& held,
                                       std::chrono::nanoseconds busy_deadline = std::chrono::seconds(30));
    /// Counts down; unregisters the intervals that nobody counts on any more.
    void release(std::span<const std::uintptr_t> held) noexcept;

    /// Sets `pages` of a budget aside, to be acquired: see pin_reservations::add.
    bool reserve(std::span<const std::byte> pages, std::uint64_t budget_bytes);
    /// Undoes one successful `reserve` of the same pages.
    void give_back(std::span<const std::byte> pages) noexcept;
    /// Bytes that are reserved now, by all holders together.
    std::uint64_t reserved_bytes() const;
    /// Whether some of `bytes` are registered by pinflow, and so may cease to be when their holders have
    /// gone.
    bool knows(std::span<const std::byte> bytes) const;
    /// Intervals registered now.
    std::size_t size() const;

    /// Appends `ranges` to `pieces`: neighbours joined, and cut where the source passes from one registration
    /// to the next, because CUDA promises nothing for a copy that does. Ranges of size 0 are left out.
    void cut(std::span<const copy_range> ranges, std::vector<copy_range>& pieces) const;

 private:
    struct interval {
        std::uintptr_t end = 0;
        std::uint64_t users = 0;
        bool busy = false;  ///< being registered or unregistered: neither there nor gone
        pin_clock::time_point busy_since;
        page_locker* locker = nullptr;
        std::shared_ptr<const void> owner;
    };

    /// Adds to `taken` what it has counted, also if it throws or refuses. Returns with the lock.
    std::optional<pin_refusal> acquire_locked(std::unique_lock<std::mutex>& lock, page_locker& locker,
                                              std::span<const std::byte> pages, bool read_only,
                                              const std::shared_ptr<const void>& owner, holds& taken,
                                              std::chrono::nanoseconds busy_deadline);
    void release_locked(std::unique_lock<std::mutex>& lock, std::span<const std::uintptr_t> held) noexcept;
    std::uintptr_t edge_after(std::uintptr_t address) const;

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::map<std::uintptr_t, interval> intervals_;  // by their first address
    std::atomic<std::size_t> count_ = 0;            // of intervals_, to be read without the lock
    pin_reservations reserved_;
};

}  // namespace pinflow::detail
