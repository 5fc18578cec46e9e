#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "pinflow/pin.hpp"
#include "src/device/pin_limits.hpp"
#include "src/device/pin_registry.hpp"

namespace pinflow::detail {

/// What stands behind pinned_pages: the thread that registers, and what it has registered so far. The
/// registry, the locker and the machine's answers are given, so that tests can stand in for them.
class pin_worker {
 public:
    /// What the machine says; asked once, by the thread.
    struct machine_answers {
        memory_limits limits;
        std::string maps;
    };
    using ask_machine = machine_answers (*)();
    static machine_answers this_machine();

    pin_worker(std::vector<pin_range> ranges, page_locker& locker, pin_registry& registry,
               const pin_options& options, ask_machine ask = &this_machine);
    /// One that registers nothing, for this reason.
    pin_worker(const std::vector<pin_range>& ranges, std::string reason);
    ~pin_worker();
    pin_worker(const pin_worker&) = delete;
    pin_worker& operator=(const pin_worker&) = delete;

    bool covers(const std::byte* data, std::uint64_t size_bytes) const noexcept;
    pin_stretch stretch_at(const std::byte* data, std::uint64_t size_bytes) const noexcept;
    std::uint64_t registered_prefix_bytes() const noexcept;
    bool finished() const noexcept { return finished_.load(std::memory_order_acquire); }
    bool wait() const;
    pin_report report() const;

 private:
    /// A range, the whole pages that it lies on, and which pieces of them are registered.
    struct tracked_range {
        tracked_range(pin_range what, std::uint64_t size_of_piece);
        /// Bytes of the range before the piece `index` of its pages, at most all.
        std::uint64_t bytes_before(std::uint64_t index) const noexcept;
        std::uint64_t registered_bytes() const noexcept;

        pin_range range;
        std::span<const std::byte> pages;
        std::uint64_t piece_bytes;
        std::vector<std::atomic<bool>> registered;  ///< one a piece
    };
    struct piece {
        tracked_range* tracked;
        std::uint64_t index;
        bool read_only;
        bool shared;

        std::uint64_t offset_bytes() const noexcept { return index * tracked->piece_bytes; }
        std::span<const std::byte> pages() const noexcept;
    };

    void run(ask_machine ask) noexcept;
    /// @return why not everything could be registered, or empty.
    std::string register_all(ask_machine ask);
    std::string register_pieces(const std::vector<piece>& pieces);
    void finish(std::string reason);

    std::vector<std::unique_ptr<tracked_range>> ranges_;  // as given
    std::vector<const tracked_range*> by_address_;
    std::uint64_t total_bytes_ = 0;
    page_locker* locker_ = nullptr;
    pin_registry* registry_ = nullptr;
    pin_options options_;

    std::atomic<bool> stop_ = false;
    std::atomic<bool> finished_ = false;
    mutable std::mutex mutex_;  // of reason_, duration_
    mutable std::condition_variable ended_;
    bool complete_ = false;
    std::string reason_;
    std::chrono::nanoseconds duration_{};

    // the thread's own until it has ended
    pin_registry::holds held_;
    std::vector<std::span<const std::byte>> reserved_;
    std::uint64_t read_only_bytes_ = 0;
    std::thread thread_;
};

}  // namespace pinflow::detail
