#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "loader/schedule.hpp"
#include "loader/state_origin.hpp"
#include "pinflow/array.hpp"
#include "pinflow/buffer.hpp"
#include "pinflow/device.hpp"
#include "pinflow/row_source.hpp"
#include "pinflow/stream.hpp"

namespace pinflow::detail {

/// What one batch cost on its way, in wall time.
struct batch_times {
    std::chrono::nanoseconds storage{};
    std::chrono::nanoseconds cpu{};
    std::chrono::nanoseconds link{};
};

/// The memory of one batch, reused for one batch after the other. Who may touch it changes hands with its
/// state, which the pool keeps: the pipeline while it is being filled, the consumer while it is leased, the
/// pool otherwise.
struct slot {
    explicit slot(const pinflow::device& device) : ready(device) {}

    pinned_buffer
        host_side;  ///< where the CPU gathers; empty when rows are gathered on the device side at once
    device_buffer device_side;  ///< what the consumer reads; empty when the consumer reads the mapping
    event ready;                ///< passed when the device side is complete
    /// Marks in the streams that read the batch; the first `passed_count` belong to the last lease.
    std::vector<event> passed;
    std::size_t passed_count = 0;

    // the batch that is in it
    std::vector<std::uint64_t> row_ids;
    std::vector<array_view> arrays;
    std::vector<copy_range> copies;  ///< that fill the device side
    detail::step step;
    std::uint64_t number = 0;  ///< of the batch, over all epochs
    bool last = false;         ///< nothing comes after it
    batch_times times;
    std::exception_ptr error;  ///< why it could not be filled

    std::uint64_t ready_before = 0;  ///< batches that lay ready when it was asked for
};

/// The slots of one loader and the queues between them. A slot goes round: free -> (taken by the pipeline) ->
/// delivered
/// -> leased -> free, where "free" may still have to wait for the consumer's streams. Shared by the loader
/// and the leases it has given out, so that a batch may outlive its loader. All members may be called from
/// any thread.
class slot_pool {
 public:
    /// `keep_alive` lives as long as the slots: what batches point into when they have no memory of their
    /// own.
    slot_pool(const pinflow::device& device, unsigned slot_count, std::uint64_t host_side_bytes,
              std::uint64_t device_side_bytes, std::vector<std::shared_ptr<const row_source>> keep_alive);
    slot_pool(const slot_pool&) = delete;
    slot_pool& operator=(const slot_pool&) = delete;
    /// Never waits for the consumer's streams.
    ~slot_pool();

    /// Whether this is a process forked after the pool was made: the pipeline's threads do not exist here,
    /// and locks may be held for ever, so that nothing may be touched.
    bool forked() const noexcept;

    // ---- the pipeline's side ----

    /// Waits until a slot can be filled: given back, and passed by the streams that read it; until `together`
    /// of them can, as long as the consumer has delivered ones to go on with. Only the pipeline's driver
    /// calls it, never a TBB thread, which might be the one that it waits for.
    /// @return whether there is one; false when the loader stops.
    bool wait_for_free(std::size_t together = 1);
    /// Takes a slot that can be filled at once, if there is one; never waits.
    slot* take_free();
    /// Hands a filled slot, or one with an error, to the consumer.
    void deliver(slot& filled);
    /// Nothing more will be delivered; `error`, if any, reaches the consumer once.
    void finish(std::exception_ptr error = nullptr);
    void stop() noexcept;
    bool stopped() const noexcept;
    /// Whether an error was delivered, so that filling further slots is in vain.
    bool failed() const noexcept;

    // ---- the consumer's side ----

    /// The next delivered slot, now leased; null at the end. `with_data`: once its data is there, as large
    /// ones on a GPU are given in any case. Throws the pipeline's error, once.
    /// @throws all_slots_leased when all are; device_error when the data cannot be waited for: the slot comes
    /// the next time.
    slot* lease(bool with_data = false);
    /// Ends a lease whose last uses are marked in slot.passed.
    void end_lease(slot& leased) noexcept;
    /// Makes a leased slot that no stream has seen come again, before all that follow it.
    void undo_lease(slot& leased);

    const pinflow::device& device() const noexcept { return device_; }
    /// Keeps what batches point into, when that is not memory of their slots, until `stream` has come here.
    void keep_sources_on(stream_view stream) const;
    std::size_t slot_count() const noexcept { return slots_.size(); }

    struct statistics {
        batch_times waits;                         ///< of `lease`, by what the awaited batch had waited for
        std::chrono::nanoseconds consumer_wait{};  ///< of `wait_for_free`, and for the last batch to be taken
        std::chrono::nanoseconds wall{};           ///< from the first `lease` to the one that gave nothing
        std::uint64_t batches = 0;
        std::uint64_t rows = 0;
        std::uint64_t ready = 0;  ///< batches that lay ready, summed over the calls of `lease` that gave one
        std::uint64_t most_ready = 0;  ///< at one of these calls, or of those that were undone
        /// The end of the furthest slot that was leased; where slots come again, the begin of the first.
        std::optional<place> reached;
        bool ended = false;  ///< `lease` has said that all is delivered
    };
    statistics collected() const;

 private:
    /// Time from `before` to `until` in which the consumer could have been waited for: not before it began to
    /// ask. Under the lock.
    std::chrono::nanoseconds since_asked(std::chrono::steady_clock::time_point before,
                                         std::chrono::steady_clock::time_point until) const;
    /// A point in time, and how long consumers, one of them at least, had waited until then for data that was
    /// on its way.
    struct moment {
        std::chrono::steady_clock::time_point at;
        std::chrono::nanoseconds data_awaited{};
    };
    /// Under the lock, as the two below.
    moment now() const;
    /// As since_asked, less the time in which consumers waited for data: then nobody waits for them.
    std::chrono::nanoseconds consumer_time(const moment& before, const moment& until) const;
    /// Whether batches are delivered that nobody has taken or waits for.
    bool consumer_has_some() const noexcept { return ready_.size() > data_waiters_; }
    /// Waits for `ready`, a while at most; releases the lock while it waits. @return how long.
    /// @throws device_error.
    std::chrono::nanoseconds await_data(std::unique_lock<std::mutex>& lock, const event& ready);
    /// Batches that lie ready: delivered, and where consumers wait for data with theirs. Under the lock.
    std::uint64_t count_ready() const;
    /// Waits until `freed_` was told of something that makes `ready` true, as time of the consumer's.
    template <typename Ready>
    void await_consumer(std::unique_lock<std::mutex>& lock, Ready ready);
    /// The consumer is awaited no longer. Under the lock.
    void end_wait_for_consumer();
    /// All time of the consumer's, that of a wait that lasts included. Under the lock.
    std::chrono::nanoseconds consumer_wait(const moment& until) const;
    /// Adds `waited`, the time a consumer waited, to the statistics in the proportion of `costs`.
    void blame(const batch_times& costs, std::chrono::nanoseconds waited);

    pinflow::device device_;
    const ::pid_t owner_;
    std::vector<std::shared_ptr<const row_source>> keep_alive_;
    bool views_sources_;  ///< batches are views of the sources
    bool awaits_data_;    ///< slots are so large, on a GPU, that consumers' threads wait for data
    std::vector<std::unique_ptr<slot>> slots_;

    mutable std::mutex mutex_;
    std::condition_variable freed_;      // for the driver
    std::condition_variable delivered_;  // for consumers
    std::deque<slot*> free_;
    std::deque<slot*> ready_;
    std::size_t leased_ = 0;
    bool stopped_ = false;
    bool finished_ = false;
    bool failed_ = false;
    std::exception_ptr error_;
    statistics statistics_;
    std::optional<std::chrono::steady_clock::time_point> first_asked_;  ///< when the consumer began
    std::optional<std::chrono::steady_clock::time_point> ended_at_;     ///< when it was told the end
    std::optional<moment> consumer_awaited_since_;
    std::size_t data_waiters_ = 0;
    std::chrono::steady_clock::time_point data_awaited_since_;  ///< where there are such
    std::chrono::nanoseconds data_awaited_{};                   ///< before that
    std::chrono::nanoseconds link_waited_{};                    ///< by the driver, for the slot it takes next
};

/// What a batch holds: one leased slot, and the streams that use it.
class slot_lease {
 public:
    /// `origin` makes the states of the batch; without it there are none.
    slot_lease(std::shared_ptr<slot_pool> pool, slot& leased,
               std::shared_ptr<const state_origin> origin = nullptr) noexcept
        : pool_(std::move(pool)), origin_(std::move(origin)), slot_(&leased) {}
    slot_lease(const slot_lease&) = delete;
    slot_lease& operator=(const slot_lease&) = delete;
    /// Marks the streams and gives the slot back; does not wait.
    ~slot_lease();

    /// `stream` waits for the data; the slot will wait for it.
    void use_on(stream_view stream);
    /// Ends a lease that nobody has used, so that the batch comes again.
    void undo();

    /// Where to go on after the batch. @throws as batch::state.
    loader_state state() const;

    const slot& held() const noexcept { return *slot_; }
    slot_pool& pool() const noexcept { return *pool_; }

 private:
    std::shared_ptr<slot_pool> pool_;
    std::shared_ptr<const state_origin> origin_;
    slot* slot_;  ///< null when the lease was undone
    std::vector<stream_view> streams_;
};

}  // namespace pinflow::detail
