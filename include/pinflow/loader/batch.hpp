#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "pinflow/array.hpp"
#include "pinflow/device.hpp"
#include "pinflow/loader/state.hpp"
#include "pinflow/stream.hpp"

namespace pinflow {

class batch;

namespace detail {
class slot_lease;
/// The lease of a batch; null once it has been released. For pinflow's own layers.
const std::shared_ptr<slot_lease>& lease_of(const batch& batch) noexcept;
}  // namespace detail

/// Some samples on a device, leased: the memory is not reused until the lease has ended and the consumer's
/// streams have passed it. Move-only; may be handed to another thread and may outlive its loader. The lease
/// ends once the batch and every tensor that `to_dlpack` made of it have been released or destroyed. The
/// loader reuses the slot only after the streams given to `loader::next`, `used_on` and `to_dlpack` have
/// passed the work that was enqueued when the lease ended. These streams must live until the lease ends.
///
/// The end of a lease does not wait for a stream, with two exceptions on CUDA: it blocks while a stream's
/// queue is full; and if pinflow has no context of its own for page-locked memory (see class loader), the
/// last lease that ends after the loader was destroyed waits, too. If no event can be recorded in a stream,
/// because it is being captured into a CUDA graph, the device has failed, or memory is exhausted, the loader
/// does not use the slot again. The memory of all its slots, and the sources, are then kept until the process
/// ends.
class batch {
 public:
    batch(batch&&) noexcept;
    batch& operator=(batch&&) noexcept;
    batch(const batch&) = delete;
    batch& operator=(const batch&) = delete;
    ~batch();

    /// Samples in this batch: the loader's batch size, or less at the end of an epoch. All counts are 0 once
    /// released.
    std::uint64_t row_count() const noexcept;
    /// The number of arrays in a sample.
    std::size_t array_count() const noexcept;
    /// The rows of array `index`: C order, little-endian, shape (row_count, ...), at addresses of the
    /// loader's device. The first row is aligned to 256 bytes, except in views of a mapping (route::direct on
    /// the host). Valid while the lease lasts.
    /// @throws invalid_argument if there is no such array.
    const array_view& operator[](std::size_t index) const;
    /// The elements of array `index`, row after row, for the CPU to read. Only for batches on the host
    /// device. After `next()` they can be read at once. After `next(stream)`, wait for the stream first.
    /// Valid while the lease lasts.
    /// @throws invalid_argument for a batch on a GPU (its addresses are device addresses), if T is not the
    /// element type, if there is no such array, and if the rows are not aligned for T. Only views of a
    /// mapping can be unaligned: see route::direct.
    template <typename T>
    std::span<const T> on_host(std::size_t index) const {
        check_on_host(index);
        return {(*this)[index].template as<T>(), (*this)[index].size()};
    }
    /// The indices of the rows in the sources, in the order of the samples; in host memory. Valid while the
    /// lease lasts.
    std::span<const std::uint64_t> row_ids() const noexcept;
    /// The epoch, counted from 0.
    std::uint64_t epoch() const noexcept;
    /// The number of this batch within its epoch, from 0. After a resume within an epoch, batches count as if
    /// the whole epoch had been delivered in batches of this size.
    std::uint64_t index() const noexcept;
    /// Whether this is the rank's last batch of the whole epoch. `max_batches` can end the loader before it.
    bool last_of_epoch() const noexcept;
    /// The state from which to resume once all ranks have processed this batch and all before it. It is the
    /// same on all ranks at the same step, that is, at the same epoch and index. A rank without a part of the
    /// tail has no batch in that step.
    /// The first call on a loader reads some rows, to compute the data's fingerprint.
    /// @throws invalid_argument once released; data_changed, system_failure when those rows cannot be read;
    /// device_error in a process forked later.
    loader_state state() const;

    /// Names a further stream that reads this batch. The stream waits for the data, and the slot is not
    /// reused before the stream has passed the end of the lease. The stream must outlive the lease. `owner`,
    /// if not null, is kept until the lease ends, to keep the stream alive. It is then destroyed on any
    /// thread, so its destructor must not wait. For a pinflow::stream, pass `stream::share()`. Thread-safe.
    /// @throws invalid_argument for a stream of another device, and once released.
    /// @throws unsupported for a stream that is being captured into a CUDA graph; device_error.
    void used_on(stream_view stream, std::shared_ptr<const void> owner = nullptr);
    /// Ends the lease, unless tensors of the batch still hold it. The batch is empty afterwards.
    void release() noexcept;

    /// For pinflow's own layers.
    explicit batch(std::shared_ptr<detail::slot_lease> lease) noexcept;

 private:
    void check_on_host(std::size_t index) const;

    friend const std::shared_ptr<detail::slot_lease>& detail::lease_of(const batch& batch) noexcept;

    std::shared_ptr<detail::slot_lease> lease_;
};

}  // namespace pinflow
