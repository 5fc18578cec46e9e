#pragma once

#include <chrono>
#include <cstddef>
#include <optional>

namespace pinflow::detail {

/// What one batch cost on its way, in wall time.
struct batch_times {
    std::chrono::nanoseconds storage{};  ///< reads
    std::chrono::nanoseconds files{};    ///< opening and checking files
    std::chrono::nanoseconds cpu{};
    std::chrono::nanoseconds link{};

    batch_times& operator+=(const batch_times& other) noexcept;
    std::chrono::nanoseconds sum() const noexcept { return storage + files + cpu + link; }
};

/// Who waited for whom: consumers for batches and their data, the loader for consumers. A point in time is
/// read once for everything that is computed from it, because a thread may be held up between two readings.
/// For one thread at a time.
class wait_times {
 public:
    using clock = std::chrono::steady_clock;

    /// A point in time, and how long consumers, at least one of them, had waited until then for data that was
    /// on its way.
    struct moment {
        clock::time_point at;
        std::chrono::nanoseconds data_awaited{};
    };
    moment now() const;

    // ---- consumers

    /// A consumer asks for a batch.
    void ask(const moment& at) noexcept;
    /// A consumer has been told that there are no more; `undo_end`: there are, after all.
    void end() noexcept;
    void undo_end() noexcept { ended_at_.reset(); }
    /// A consumer waits for data.
    void begin_data_wait(clock::time_point at) noexcept;
    void end_data_wait(clock::time_point at) noexcept;
    std::size_t data_waiters() const noexcept { return data_waiters_; }
    /// A consumer has waited: `for_data` for data of a batch, otherwise in the proportion of what the batch
    /// cost.
    void add_wait(const batch_times& costs, std::chrono::nanoseconds waited,
                  std::chrono::nanoseconds for_data);

    // ---- the loader

    /// It waits for the consumer from now on, or no longer.
    void begin_consumer_wait() { awaited_since_ = now(); }
    void end_consumer_wait();
    /// It has waited for the consumer's streams, or for its own copies.
    void add_consumer_wait(const moment& from, const moment& to);
    void add_link_wait(const moment& from, const moment& to);
    /// What it has waited for its own copies since this was asked last.
    std::chrono::nanoseconds take_link_wait() noexcept;

    // ---- sums

    const batch_times& waits() const noexcept { return waits_; }
    /// All time that the loader waited for the consumer until then; a wait that lasts counts.
    std::chrono::nanoseconds consumer_wait(const moment& until) const;
    /// From the first question to the end, or until then.
    std::chrono::nanoseconds wall(const moment& until) const;

 private:
    /// Time in which the consumer could have been waited for: not before it began to ask.
    std::chrono::nanoseconds since_asked(clock::time_point from, clock::time_point to) const;
    /// The same without the time in which consumers waited for data: nobody waits for them then.
    std::chrono::nanoseconds consumer_time(const moment& from, const moment& to) const;

    batch_times waits_;
    std::chrono::nanoseconds consumer_wait_{};
    std::optional<clock::time_point> first_asked_;
    std::optional<clock::time_point> ended_at_;
    std::optional<moment> awaited_since_;
    std::size_t data_waiters_ = 0;
    clock::time_point data_awaited_since_;     ///< if there are data waiters
    std::chrono::nanoseconds data_awaited_{};  ///< before that
    std::chrono::nanoseconds link_waited_{};
};

}  // namespace pinflow::detail
