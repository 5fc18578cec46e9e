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

#include "loader/ready_mark.hpp"
#include "loader/schedule.hpp"
#include "loader/state_origin.hpp"
#include "loader/wait_times.hpp"
#include "pinflow/array.hpp"
#include "pinflow/buffer.hpp"
#include "pinflow/device.hpp"
#include "pinflow/row_source.hpp"
#include "pinflow/stream.hpp"

namespace pinflow::detail {

/// The memory of one batch, reused for one batch after the other. Who may touch it changes hands with its
/// state, which the pool keeps: the pipeline while it is being filled, the consumer while it is leased, the
/// pool otherwise.
struct slot {
    std::size_t index = 0;             ///< among the slots of the pool
    std::byte* host_side = nullptr;    ///< pinned staging memory; null if no rows are staged
    std::byte* device_side = nullptr;  ///< what the consumer reads; null if that is the mapping
    /// When the device side is complete; null: as soon as it is delivered.
    std::shared_ptr<const ready_mark> ready;
    /// Marks in the streams that read the batch; the first `passed_count` belong to the last lease.
    std::vector<event> passed;
    std::size_t passed_count = 0;
    bool has_passed = false;  ///< known by whoever takes free slots
    bool taken = false;       ///< by the pipeline, until the list of free slots knows it

    // the batch that is in it
    std::vector<std::uint64_t> row_ids;
    std::vector<array_view> arrays;
    detail::step step;
    std::uint64_t number = 0;  ///< of the batch, over all epochs
    bool last = false;         ///< nothing comes after it
    batch_times times;
    std::exception_ptr error;  ///< why it could not be filled

    std::uint64_t ready_before = 0;  ///< batches that were ready when it was asked for
};

/// How many slots there are, and the size of each of their sides.
struct slot_sizes {
    unsigned count = 2;
    std::uint64_t host_side_bytes = 0;
    std::uint64_t device_side_bytes = 0;
    unsigned max_group_slots = 1;  ///< filled and announced together, at most
    /// Why there are fewer than by default; empty if there are not.
    std::string reason = {};  // NOLINT(readability-redundant-member-init): g++ wants it
};

/// The slots of one loader and the queues between them. A slot goes round: free -> (taken by the pipeline) ->
/// delivered -> leased -> free, where "free" may still have to wait for the consumer's streams. Shared by the
/// loader and the leases it has given out, so that a batch may outlive its loader. All members may be called
/// from any thread. Never calls the device while its lock is held.
class slot_pool {
 public:
    /// `keep_alive` lives as long as the slots: what batches point into if they have no memory of their own.
    slot_pool(const pinflow::device& device, const slot_sizes& sizes,
              std::vector<std::shared_ptr<const row_source>> keep_alive);
    slot_pool(const slot_pool&) = delete;
    slot_pool& operator=(const slot_pool&) = delete;
    /// Never waits for the consumer's streams.
    ~slot_pool();

    /// Whether this is a process forked after the pool was made: the pipeline's threads do not exist here,
    /// and locks may be held for ever, so that nothing may be touched.
    bool forked() const noexcept;

    // ---- the pipeline's side ----

    /// Waits until `together` slots can be filled: given back, and no longer read by any stream.
    /// Fewer are enough if the consumer has nothing left and the other slots do not become free soon.
    /// Only the pipeline's driver calls it: a TBB thread might wait for itself.
    /// @return how many can be taken; 0 if the loader stops.
    std::size_t wait_for_free(std::size_t together = 1);
    /// Takes so many slots that can be filled at once, or none. Never waits. For one thread at a time.
    std::vector<slot*> take_free(std::size_t count = 1);
    /// Hands filled slots, or one with an error, to the consumer, in this order.
    void deliver(std::span<slot* const> filled);
    /// Nothing more will be delivered; `error`, if any, reaches the consumer once.
    void finish(std::exception_ptr error = nullptr);
    void stop() noexcept;
    bool stopped() const noexcept;
    /// Whether an error was delivered, so that filling further slots is in vain.
    bool failed() const noexcept;

    // ---- the consumer's side ----

    /// The next delivered slot, now leased; null at the end. `with_data`: only once its data is there; on a
    /// GPU, slots of large groups always come so. Throws the pipeline's error, once.
    /// @throws all_slots_leased if all are; device_error if the data cannot be waited for: the slot comes the
    /// next time.
    slot* lease(bool with_data = false);
    /// Ends a lease whose last uses are marked in slot.passed.
    void end_lease(slot& leased) noexcept;
    /// Makes a leased slot that no stream has seen come again, before all that follow it.
    void undo_lease(slot& leased);

    const pinflow::device& device() const noexcept { return device_; }
    /// What batches are views of; none if they have memory of their own.
    std::span<const std::shared_ptr<const row_source>> viewed_sources() const noexcept {
        return views_sources_ ? keep_alive_ : std::span<const std::shared_ptr<const row_source>>();
    }
    /// Keeps what batches point into, if that is not memory of their slots, until `stream` has come here.
    void keep_sources_on(stream_view stream) const;
    std::size_t slot_count() const noexcept { return slots_.size(); }

    struct statistics {
        batch_times waits;                         ///< in `lease`, split by what delayed the awaited batch
        std::chrono::nanoseconds consumer_wait{};  ///< time the loader waited in `wait_for_free`, and at the
                                                   ///< end for the last lease
        std::chrono::nanoseconds wall{};           ///< from the first `lease` to the one that returned null
        std::uint64_t batches = 0;
        std::uint64_t rows = 0;
        std::uint64_t ready = 0;  ///< batches that were ready, summed over the calls of `lease` that gave one
        std::uint64_t max_ready = 0;  ///< at one of these calls, or of those that were undone
        /// The end of the furthest slot that was leased; if slots come again, the begin of the first.
        std::optional<epoch_position> reached;
        bool ended = false;  ///< `lease` has said that all is delivered
    };
    statistics collected() const;

 private:
    // under the lock, as all that follows unless it says otherwise

    /// Whether batches are delivered that nobody has taken or waits for.
    bool consumer_has_some() const noexcept { return ready_.size() > times_.data_waiters(); }
    /// Whether the consumer waits, and nothing is on its way to it.
    bool consumer_starves() const noexcept { return !consumer_has_some() && filling_ == 0; }
    /// Free slots in the order in which they are filled.
    std::vector<slot*> candidates() const;
    /// Wakes the driver if what it waits for has come.
    void wake_driver() noexcept;
    /// Waits until `ready` is true, or there are `wanted` free slots; as time of the consumer's.
    template <typename Ready>
    void await_consumer(std::unique_lock<std::mutex>& lock, std::size_t wanted, Ready ready);
    /// Waits for `ready`, a while at most; releases the lock while it waits. @return how long.
    /// @throws device_error.
    std::chrono::nanoseconds await_data(std::unique_lock<std::mutex>& lock, const ready_mark& ready);
    /// Batches that are ready: delivered, and with their data if consumers wait for that. May release the
    /// lock meanwhile.
    std::uint64_t count_ready(std::unique_lock<std::mutex>& lock);

    pinflow::device device_;
    const ::pid_t owner_;
    std::vector<std::shared_ptr<const row_source>> keep_alive_;
    bool views_sources_;  ///< batches are views of the sources
    bool awaits_data_;    ///< consumers' threads wait for data
    bool takes_last_;     ///< the slot that was given back last is filled first
    pinned_buffer host_sides_;
    device_buffer device_sides_;
    std::vector<std::unique_ptr<slot>> slots_;

    mutable std::mutex mutex_;
    std::condition_variable freed_;      // for the driver
    std::condition_variable delivered_;  // for consumers
    std::deque<slot*> free_;
    std::deque<slot*> ready_;
    std::size_t complete_count_ = 0;  ///< slots at the front of `ready_` that are known to have their data
    std::size_t filling_ = 0;         ///< taken, and not delivered yet
    std::size_t leased_ = 0;
    std::optional<std::size_t> wanted_;  ///< free slots that the driver waits for
    bool stopped_ = false;
    bool finished_ = false;
    bool failed_ = false;
    std::exception_ptr error_;
    statistics statistics_;
    wait_times times_;
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

    /// Where to continue after the batch. @throws as batch::state.
    loader_state state() const;

    const slot& held() const noexcept { return *slot_; }
    slot_pool& pool() const noexcept { return *pool_; }

 private:
    std::shared_ptr<slot_pool> pool_;
    std::shared_ptr<const state_origin> origin_;
    slot* slot_;  ///< null if the lease was undone
    std::vector<stream_view> streams_;
};

}  // namespace pinflow::detail
