#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "loader/slots.hpp"
#include "loader/state_origin.hpp"
#include "pinflow/loader/state.hpp"
#include "pinflow/stream.hpp"

namespace pinflow::detail {

/// The lease of a batch: one slot and the streams that use it. The batch and its tensors share it. A tensor
/// only keeps it alive: its members are for the owner of the batch, in any thread.
class slot_lease {
 public:
    /// `origin` makes the states of the batch. If it is null, as in tests, `state` must not be called.
    slot_lease(std::shared_ptr<slot_pool> pool, slot& leased,
               std::shared_ptr<const state_origin> origin = nullptr) noexcept
        : pool_(std::move(pool)), origin_(std::move(origin)), slot_(&leased) {}
    slot_lease(const slot_lease&) = delete;
    slot_lease& operator=(const slot_lease&) = delete;
    /// Records an event in each stream and returns the slot. Does not wait for a stream: if no event can be
    /// recorded, for example because a stream is being captured, the slot is lost. In a forked process,
    /// neither records nor returns anything.
    ~slot_lease();

    /// Makes `stream` wait for the data. The slot is filled again only after `stream` has completed the work
    /// that is enqueued when the lease ends. `owner` lives as long as the lease.
    /// @throws invalid_argument for a stream of another device; unsupported for a stream that is being
    /// captured into a CUDA graph; device_error.
    void use_on(stream_view stream, std::shared_ptr<const void> owner = nullptr);
    /// Ends an unused lease, so that the batch is delivered again.
    void undo();

    /// Whether a stream uses the batch.
    bool is_used() const {
        const std::lock_guard lock(mutex_);
        return !streams_.empty();
    }

    /// The state after the batch, to resume from.
    /// @throws as batch::state.
    loader_state state() const;

    const slot& leased_slot() const noexcept { return *slot_; }
    slot_pool& pool() const noexcept { return *pool_; }

 private:
    friend void leave_to_tensors(const std::shared_ptr<slot_lease>& lease) noexcept;

    std::shared_ptr<slot_pool> pool_;
    std::shared_ptr<const state_origin> origin_;
    slot* slot_;                                       ///< null if the lease was undone
    mutable std::mutex mutex_;                         ///< of the members below
    std::vector<std::shared_ptr<const void>> owners_;  ///< of the streams
    std::vector<stream_view> streams_;
};

/// To be called before a batch gives up `lease`, which tensors may go on sharing.
void leave_to_tensors(const std::shared_ptr<slot_lease>& lease) noexcept;

}  // namespace pinflow::detail
