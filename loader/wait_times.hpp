#pragma once

#include <chrono>
#include <cstddef>
#include <optional>

namespace pinflow::detail {

/// The wall time that one batch spent in each part of the pipeline. The time to sample and gather rows of a
/// group is divided equally among its batches, and so is the time to enqueue copies from shared staging
/// buffers. What the stage deliver enqueues counts for the first batch of the group.
struct batch_times {
    std::chrono::nanoseconds storage{};  ///< waiting for reads
    std::chrono::nanoseconds files{};    ///< reopening and checking files
    std::chrono::nanoseconds cpu{};      ///< sampling row ids, listing copies, gathering and decoding rows
    std::chrono::nanoseconds link{};     ///< enqueueing copies, and waiting for earlier copies

    batch_times& operator+=(const batch_times& other) noexcept;
    std::chrono::nanoseconds sum() const noexcept { return storage + files + cpu + link; }
};

/// Records the waits of consumers for batches and data, and of the loader for consumers. Each computation
/// reads the clock once, because a thread may be preempted between two readings. For one thread at a time.
class wait_times {
 public:
    using clock = std::chrono::steady_clock;

    /// A point in time, and the total time until then in which at least one consumer waited for data in
    /// flight.
    struct moment {
        clock::time_point at;
        std::chrono::nanoseconds data_awaited{};
    };
    moment now() const;

    // ---- consumers

    /// A consumer asks for a batch.
    void ask(const moment& at) noexcept;
    /// A consumer has received the end or the pipeline's error. `undo_end` takes this back if a batch is
    /// delivered again.
    void end() noexcept;
    void undo_end() noexcept { ended_at_.reset(); }
    /// A consumer waits for data.
    void begin_data_wait(clock::time_point at) noexcept;
    void end_data_wait(clock::time_point at) noexcept;
    std::size_t data_waiters() const noexcept { return data_waiters_; }
    /// Adds a consumer's wait: `for_data` counts as link time, `waited` is divided in proportion to the costs
    /// of the batch. Without costs it is time of the CPU.
    void add_wait(const batch_times& costs, std::chrono::nanoseconds waited,
                  std::chrono::nanoseconds for_data);

    // ---- the loader; its waits count from the first `ask` on

    /// The loader begins or ends a wait for the consumer.
    void begin_consumer_wait() { awaited_since_ = now(); }
    void end_consumer_wait();
    /// Adds a wait of the loader for the consumer's streams, or for its own copies.
    void add_consumer_wait(const moment& from, const moment& to);
    void add_link_wait(const moment& from, const moment& to);
    /// The time that the loader waited for its own copies since the last call.
    std::chrono::nanoseconds take_link_wait() noexcept;

    // ---- sums

    const batch_times& waits() const noexcept { return waits_; }
    /// The total time that the loader waited for the consumer, including a wait in progress.
    std::chrono::nanoseconds consumer_wait(const moment& until) const;
    /// The time from the first `ask` to `end`, or to `until` if there is no end yet.
    std::chrono::nanoseconds wall(const moment& until) const;

 private:
    /// The part of the interval after the consumer's first `ask`.
    std::chrono::nanoseconds since_asked(clock::time_point from, clock::time_point to) const;
    /// The same without the time in which consumers waited for data, because the loader does not wait for
    /// them then.
    std::chrono::nanoseconds consumer_time(const moment& from, const moment& to) const;

    batch_times waits_;
    std::chrono::nanoseconds consumer_wait_{};
    std::optional<clock::time_point> first_asked_;
    std::optional<clock::time_point> ended_at_;
    std::optional<moment> awaited_since_;
    std::size_t data_waiters_ = 0;
    clock::time_point data_awaited_since_;     ///< valid if there are data waiters
    std::chrono::nanoseconds data_awaited_{};  ///< total before data_awaited_since_
    std::chrono::nanoseconds link_waited_{};
};

}  // namespace pinflow::detail
