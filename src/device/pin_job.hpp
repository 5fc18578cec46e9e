#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pinflow/pin.hpp"
#include "src/device/pin_deadline.hpp"
#include "src/device/pin_limits.hpp"
#include "src/device/pin_order.hpp"
#include "src/device/pin_populator.hpp"
#include "src/device/pin_registry.hpp"
#include "src/device/pin_tracker.hpp"

namespace pinflow::detail {

/// Registers some ranges on one thread (`run`), and unregisters them on another (`release`). Shows all other
/// threads the progress. Each of the two threads shares the job with the owner, because it may hang in the
/// driver. It then keeps the job and the mappings alive after the owner has gone. The locker and the registry
/// must outlive both threads.
class pin_job {
 public:
    /// The memory limits that apply to this process, and the text of /proc/self/maps. The thread asks for
    /// them once.
    struct machine_answers {
        memory_limits limits;
        std::string maps;
    };
    using ask_machine = machine_answers (*)();

    pin_job(std::vector<pin_range> ranges, page_locker& locker, pin_registry& registry,
            const pin_options& options, ask_machine ask);
    /// Makes a job that registers nothing, for this reason.
    pin_job(std::vector<pin_range> ranges, std::string reason);
    ~pin_job();
    pin_job(const pin_job&) = delete;
    pin_job& operator=(const pin_job&) = delete;

    // ---- for the two threads ----

    void run() noexcept;
    /// Unregisters what `run` has registered. Call it after `run` has returned.
    void release() noexcept;

    // ---- for its owner ----

    /// Ends the job with this reason if `run` could not be started.
    void refuse(std::string reason);
    /// Makes `run` return soon.
    void stop() noexcept { stop_.store(true, std::memory_order_relaxed); }
    /// Waits for `run`.
    /// @return false if `run` hangs. The thread must then be left alone.
    bool wait_for_run();
    /// Whether there is something to release. Only after `run` has returned.
    bool holds_pages() const noexcept { return !held_.empty() || !reserved_.empty(); }
    /// Waits for `release`.
    /// @return false if `release` hangs. The thread must then be left alone.
    bool wait_for_release();

    // ---- for everybody ----

    const pin_tracker& tracker() const noexcept { return tracker_; }
    void set_reader_position(const std::byte* data) noexcept { tracker_.set_reader_position(data); }
    bool finished() const noexcept {
        return finished_.load(std::memory_order_acquire) || watch_.has_given_up();
    }
    bool all_registered() const noexcept { return complete_.load(std::memory_order_acquire); }
    bool wait() const;
    bool wait_for(const std::byte* data, std::uint64_t size_bytes, std::chrono::nanoseconds timeout) const;
    pin_report report() const;

 private:
    /// A piece, and how its pages are mapped.
    struct judged_piece {
        pin_piece piece;
        bool read_only = false;
        bool shared = false;
    };
    /// The thread's current call, which may not return.
    struct current_call {
        const char* verb = "";  ///< "registering"
        pin_piece piece{};
        pin_clock::time_point began;
    };
    /// Why not everything is registered: the first failure, and the number of failures.
    struct shortfall {
        std::string reason;
        std::uint64_t count = 0;
        bool ends_early = false;  ///< too many refusals: the rest was not tried

        void add(std::string failure);
        std::string text() const;
    };

    void register_all();
    void judge(pin_order& order, const process_mappings& mappings);
    void reserve(pin_order& order, const pin_budget& budget);
    void register_pieces(pin_order& order);
    /// @return false if no other piece is worth trying.
    bool register_piece(const judged_piece& wanted);
    void begin_call(const char* verb, const pin_piece& piece);
    /// @return false if the call has been given up.
    bool end_call();
    std::string describe_call(const char* outcome) const;
    std::string summary(std::chrono::nanoseconds duration, const std::string& incomplete_reason) const;
    void finish();
    template <typename Condition>
    void wait_until(std::unique_lock<std::mutex>& lock, const call_watch& watch, pin_clock::time_point limit,
                    Condition condition) const;

    pin_tracker tracker_;
    page_locker* locker_ = nullptr;
    pin_registry* registry_ = nullptr;
    pin_options options_;
    ask_machine ask_ = nullptr;
    pin_clock::time_point start_ = pin_clock::now();

    std::atomic<bool> stop_ = false;
    std::atomic<bool> finished_ = false;
    std::atomic<bool> complete_ = false;
    std::atomic<bool> read_only_ = false;  ///< whether read-only pages are registered
    mutable call_watch watch_;             ///< of `run`
    mutable call_watch release_watch_;
    mutable std::mutex mutex_;  // guards the members below, down to released_
    mutable std::condition_variable changed_;
    current_call current_;
    std::string reason_;
    std::chrono::nanoseconds duration_{};
    bool failed_ = false;
    bool released_ = false;

    // used only by the thread in `run`, and after that by the thread in `release`
    std::vector<judged_piece> pieces_;
    shortfall shortfall_;
    bool leaves_out_ = false;                ///< some pieces are left unregistered by choice
    std::array<bool, 2> is_refused_kind_{};  ///< [0]: writable pages, [1]: read-only pages
    std::uint64_t refusal_count_ = 0;
    std::optional<pin_populator> populator_;
    pin_registry::holds held_;
    std::vector<std::span<const std::byte>> reserved_;
};

}  // namespace pinflow::detail
