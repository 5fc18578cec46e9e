#include "loader/slot_lease.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <utility>

#include "pinflow/error.hpp"
#include "src/device/backend.hpp"

namespace pinflow::detail {

slot_lease::~slot_lease() {
    if (pool_->forked()) {
        /// What belongs to the parent: destroying it might call CUDA, or wait for a lock.
        struct parents {
            std::shared_ptr<slot_pool> pool;
            std::shared_ptr<const state_origin> origin;
            std::vector<std::shared_ptr<const void>> owners;
        };
        auto* const leaked = new (std::nothrow) parents;
        if (leaked != nullptr) *leaked = {std::move(pool_), std::move(origin_), std::move(owners_)};
        return;
    }
    if (slot_ == nullptr) return;
    device_backend& backend = pool_->device().backend();
    try {
        for (const stream_view& stream : streams_) {
            void* const handle = backend.stream_for_marks(stream.native_handle());
            // the event would become a part of the graph, and nobody could ask it
            if (backend.is_capturing(handle))
                throw unsupported("no event can be recorded in a stream that is being captured");
            pool_->keep_sources_on(stream);
            slot_->uses[slot_->use_count].record({stream.device(), handle});
            ++slot_->use_count;
        }
    } catch (...) {
        // The device has failed, memory is exhausted, or a stream is being captured. Waiting for the stream
        // might never end, and this may run wherever a tensor is destroyed.
        pool_->lose(*slot_, pool_);
        return;
    }
    pool_->end_lease(*slot_);
}

void slot_lease::use_on(stream_view stream, std::shared_ptr<const void> owner) {
    if (stream.device() != pool_->device()) {
        throw invalid_argument(fmt::format("a batch on {} cannot be used on a stream of {}",
                                           pool_->device().name(), stream.device().name()));
    }
    // on a GPU it is the legacy default stream
    if (stream.native_handle() == nullptr && pool_->device().kind() == device_kind::host)
        throw invalid_argument("a null handle is no stream of the host device");
    device_backend& backend = pool_->device().backend();
    if (backend.is_capturing(stream.native_handle())) {
        throw unsupported(
            "a batch cannot be used on a stream that is being captured into a CUDA graph: its memory is "
            "reused for later batches. Copy the batch to memory of your own before the capture begins");
    }
    const std::lock_guard lock(mutex_);
    const bool is_kept = std::ranges::any_of(owners_, [&](const auto& other) { return other == owner; });
    if (owner && !is_kept) owners_.push_back(std::move(owner));
    const bool known = std::ranges::any_of(
        streams_, [&](const stream_view& other) { return other.native_handle() == stream.native_handle(); });
    // the event is made before the stream can read the batch, so that the end of the lease only records it
    if (!known && slot_->uses.size() == streams_.size()) slot_->uses.emplace_back(pool_->device());
    // a known stream already waits for the data, unless each thread has a stream of this handle
    const bool is_one_stream = backend.stream_for_marks(stream.native_handle()) == stream.native_handle();
    if (known && is_one_stream) return;
    if (slot_->data_mark != nullptr && !slot_->data_mark->known_done()) slot_->data_mark->hold_up(stream);
    if (!known) streams_.push_back(stream);
}

void slot_lease::undo() {
    pool_->undo_lease(*slot_);
    slot_ = nullptr;
}

loader_state slot_lease::state() const {
    if (pool_->forked()) {
        throw device_error(
            "the state of a batch is not available in a forked process: the loader belongs to the parent");
    }
    return origin_->state_at(slot_->scheduled.end);
}

void leave_to_tensors(const std::shared_ptr<slot_lease>& lease) noexcept {
    // Tensors are made only through the batch. So if the batch is the only owner here, no tensor can be added
    // meanwhile. In a forked process the pool's lock may be held for ever.
    if (lease.use_count() > 1 && !lease->pool_->forked()) lease->pool_->leave_to_tensors(*lease->slot_);
}

}  // namespace pinflow::detail
