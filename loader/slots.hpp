#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "loader/data_mark.hpp"
#include "loader/schedule.hpp"
#include "loader/wait_times.hpp"
#include "pinflow/array.hpp"
#include "pinflow/buffer.hpp"
#include "pinflow/device.hpp"
#include "pinflow/row_source.hpp"
#include "pinflow/stream.hpp"

namespace pinflow::detail {

/// The memory of one batch, reused for one batch after another. The pool keeps its state, which decides who
/// may access it: the pipeline while it is being filled, the consumer while it is leased, the pool otherwise.
struct slot {
    std::size_t index = 0;             ///< among the slots of the pool
    std::byte* host_side = nullptr;    ///< pinned staging memory; null if no rows are staged in slots
    std::byte* device_side = nullptr;  ///< read by the consumer; null for views, and for rows of 0 bytes
    /// Passed when the device side is complete; null: it is complete when delivered.
    std::shared_ptr<const detail::data_mark> data_mark;
    /// Marks in the streams that read the batch; the first `use_count` belong to the last lease.
    std::vector<event> uses;
    std::size_t use_count = 0;
    /// Known: the data is complete and all reading streams have passed. Written by wait_for_free and
    /// take_free only, which never run at the same time.
    bool has_passed = false;
    bool taken = false;  ///< by the pipeline, but still in the list of free slots

    // the current batch
    std::vector<std::uint64_t> row_ids;
    std::vector<array_view> arrays;
    rank_batch scheduled;      ///< its positions in the order
    std::uint64_t number = 0;  ///< number of the batch, over all epochs
    bool last = false;         ///< the last batch of the loader
    batch_times times;
    std::exception_ptr error;  ///< of the first stage that failed

    std::uint64_t ready_before = 0;   ///< batches that were ready when it was leased
    bool is_held_by_tensors = false;  ///< leased, and the batch has been released
};

/// The number of slots and the sizes of their sides.
struct slot_sizes {
    unsigned count = 2;
    std::uint64_t host_side_bytes = 0;
    std::uint64_t device_side_bytes = 0;
    unsigned max_group_slots = 1;  ///< the most slots filled and announced together
    /// As loader_report::slots_reason.
    std::string reason = {};  // NOLINT(readability-redundant-member-init): g++ wants it
};

/// When a batch can be leased.
enum class lease_when : std::uint8_t {
    delivered,  ///< its data may be incomplete, but work on a stream can wait for it
    complete,   ///< its data is complete
};

/// Where a loader's device memory comes from.
struct device_allocator {
    stream_view stream;  ///< once it is synchronised, any stream may use the memory
    std::shared_ptr<memory_resource> resource = nullptr;  ///< null: the device's pool

    device_buffer allocate(std::uint64_t size_bytes) const { return {size_bytes, stream, resource}; }
};

/// The slots of one loader, and the queues between its pipeline and the consumer. The states of a slot are
/// free -> (taken by the pipeline) -> delivered -> leased -> free. A free slot may still be in use by the
/// consumer's streams. If nothing tells when these have passed, the slot is lost. Shared by the loader and
/// its leases, so that a batch may outlive its loader. Any thread may call any member, unless stated
/// otherwise. Never calls the device while its lock is held.
class slot_pool {
 public:
    /// `keep_alive` lives as long as the slots. Batches without their own memory point into it.
    slot_pool(const slot_sizes& sizes, std::vector<std::shared_ptr<const row_source>> keep_alive,
              const device_allocator& allocator);
    slot_pool(const slot_pool&) = delete;
    slot_pool& operator=(const slot_pool&) = delete;
    /// Does not wait for the consumer's streams, unless memory runs out: then it waits for all of them. See
    /// also device_buffer::release_after.
    ~slot_pool();

    /// Whether this process was forked after the pool was made. In the child, the pipeline's threads do not
    /// exist and locks may be held for ever, so nothing may be accessed.
    bool forked() const noexcept;

    // ---- the pipeline's side ----

    /// Waits until `together` slots are ready to be filled: given back, and no longer read by any stream.
    /// Fewer are enough if the consumer has nothing left and the other slots are not ready soon.
    /// Only the pipeline's driver calls it: a TBB thread might wait for itself.
    /// @return how many can be taken; 0 if the loader stops.
    /// @throws device_error.
    std::size_t wait_for_free(std::size_t together = 1);
    /// Takes `count` slots that are ready to be filled, or none. Does not wait for slots. For one thread at a
    /// time, and not during wait_for_free.
    /// @throws device_error.
    std::vector<slot*> take_free(std::size_t count = 1);
    /// Hands the slots before the first error to the consumer, in this order, and keeps that error for
    /// `lease`. The slot with the error and those after it are free again; all are, once the loader stops.
    void deliver(std::span<slot* const> filled);
    /// Ends the delivery. `error`, if any, reaches the consumer once, unless a slot's error came before it.
    void finish(std::exception_ptr error = nullptr);
    /// Ends all waits for slots. Batches that were delivered can still be leased.
    void stop() noexcept;
    bool stopped() const noexcept;
    /// Whether an error was delivered, so that filling more slots is useless.
    bool failed() const noexcept;

    // ---- the consumer's side ----

    /// Leases the next delivered slot. Throws the pipeline's error, once.
    /// @param when to return; on a GPU, always when the data is complete if the slots of a full group total
    /// 8 MiB or more (see next_waits_for_data)
    /// @return null at the end.
    /// @throws all_slots_leased if all slots are leased.
    /// @throws device_error if asking or waiting for data fails. The next call returns this slot.
    slot* lease(lease_when when = lease_when::delivered);
    /// Waits until `lease` has a slot, the end or an error, but no longer than `timeout`. Returns whether it
    /// has.
    bool wait_for_next(std::chrono::nanoseconds timeout);
    /// Ends a lease. The events in slot.uses mark its last uses.
    void end_lease(slot& leased) noexcept;
    /// Ends a lease whose last uses could not be marked. Nothing tells when streams have stopped reading the
    /// slot, so it is never filled again, and the pool, `self`, and its memory are kept for ever.
    void lose(slot& leased, std::shared_ptr<slot_pool> self) noexcept;
    /// Notes that a batch has been released, and that tensors of it go on holding its slot.
    void leave_to_tensors(slot& leased) noexcept;
    /// Undoes the lease of a slot on which no work has been enqueued. The slot is delivered again, before
    /// later batches.
    void undo_lease(slot& leased);

    const pinflow::device& device() const noexcept { return device_; }
    /// The sources that batches are views of; empty if batches have their own memory.
    std::span<const std::shared_ptr<const row_source>> viewed_sources() const noexcept {
        return views_sources_ ? keep_alive_ : std::span<const std::shared_ptr<const row_source>>();
    }
    /// Keeps viewed sources alive until `stream` has completed the work enqueued so far.
    void keep_sources_on(stream_view stream) const;
    std::size_t slot_count() const noexcept { return slots_.size(); }

    struct statistics {
        batch_times waits;  ///< in `lease` and `wait_for_next`, split by what delayed the awaited batch
        /// Time the loader waited for the consumer: in `wait_for_free`, and at the end for the last lease.
        std::chrono::nanoseconds consumer_wait{};
        /// From the first `lease`, or the first `wait_for_next` that had to wait, to the `lease` that
        /// returned null or threw the pipeline's error. Before that, up to the call of `collected`.
        std::chrono::nanoseconds wall{};
        std::uint64_t batches = 0;    ///< leased; undone leases are not counted
        std::uint64_t rows = 0;       ///< in these batches
        std::uint64_t ready_sum = 0;  ///< ready batches at each of these leases, summed
        std::uint64_t max_ready = 0;  ///< the most at any lease, including undone leases
        /// The end of the furthest slot leased; if slots are delivered again, the beginning of the first of
        /// them.
        std::optional<epoch_position> reached;
        std::size_t lost_slots = 0;
        bool ended = false;  ///< `lease` has returned null after the last batch
    };
    statistics collected() const;

 private:
    // the functions below need the lock

    /// Whether there are more delivered batches than consumers that wait for the data of one.
    bool has_unclaimed_batches() const noexcept { return delivered_.size() > times_.data_waiters(); }
    /// Whether no batch is left for the consumer, and none is being filled.
    bool consumer_starves() const noexcept { return !has_unclaimed_batches() && filling_ == 0; }
    /// Whether `lease` need not wait for a slot.
    bool has_next() const noexcept { return !delivered_.empty() || finished_ || leased_ == slots_.size(); }
    /// Free slots in the order in which they are filled.
    std::vector<slot*> candidates() const;
    /// Wakes the driver if its condition is met.
    void wake_driver() noexcept;
    /// Waits until `is_met` is true or the loader stops, and counts the time as waiting for the consumer.
    /// `wanted` is the number of free slots at which wake_driver wakes the driver.
    template <typename Condition>
    void await_consumer(std::unique_lock<std::mutex>& lock, std::size_t wanted, Condition is_met);
    /// Waits for `mark`, for a limited time. Releases the lock while it waits.
    /// @return the time waited.
    /// @throws device_error.
    std::chrono::nanoseconds await_data(std::unique_lock<std::mutex>& lock, const data_mark& mark);
    /// The number of ready batches: delivered, and with complete data if consumers wait for data. May release
    /// the lock meanwhile.
    /// @throws device_error.
    std::uint64_t count_ready(std::unique_lock<std::mutex>& lock);

    // unchanged after construction
    pinflow::device device_;
    const ::pid_t owner_;
    std::vector<std::shared_ptr<const row_source>> keep_alive_;
    bool views_sources_;  ///< batches are views of the sources, or have no bytes
    bool awaits_data_;    ///< consumers wait for data on their threads
    bool takes_last_;     ///< the slot that was given back last is filled first
    pinned_buffer host_sides_;
    device_buffer device_sides_;
    std::vector<std::unique_ptr<slot>> slots_;

    mutable std::mutex mutex_;                // guards the members below
    std::condition_variable slot_freed_;      // for the driver
    std::condition_variable slot_delivered_;  // for consumers
    std::deque<slot*> free_;
    std::deque<slot*> delivered_;  ///< not leased yet; their data may still be incomplete
    /// Slots at the front of `delivered_` whose data is known to be complete.
    std::size_t complete_count_ = 0;
    std::size_t filling_ = 0;          ///< slots taken and not yet delivered
    std::size_t leased_ = 0;           ///< includes lost slots
    std::size_t held_by_tensors_ = 0;  ///< leased slots whose batches have been released
    std::size_t lost_ = 0;
    std::chrono::nanoseconds early_wait_{};  ///< in wait_for_next, not yet charged to a batch
    bool had_to_wait_ = false;               ///< the last wait_for_next
    std::shared_ptr<slot_pool> kept_;        ///< this pool, once a slot is lost
    slot_pool* next_kept_ = nullptr;         ///< the next in the list of such pools
    std::optional<std::size_t> wanted_;      ///< free slots that the driver waits for
    bool stopped_ = false;
    bool finished_ = false;
    bool failed_ = false;
    std::exception_ptr error_;
    statistics statistics_;
    wait_times times_;
};

}  // namespace pinflow::detail
