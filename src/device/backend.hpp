#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "pinflow/buffer.hpp"
#include "pinflow/device.hpp"
#include "src/device/row_work.hpp"

namespace pinflow::detail {

class page_locker;

/// One array of a batch as the digest reads it: `row_count` rows of `row_size_bytes`, one after the other.
struct digest_array {
    const std::byte* rows = nullptr;
    std::uint64_t row_size_bytes = 0;
};

/// What a device has to be able to do; the public classes of device.hpp, stream.hpp and buffer.hpp are thin
/// owners over it. One object for each device, alive until the process ends; every member may be called from
/// any thread. Streams and events are opaque pointers that the backend made (or, for streams, foreign handles
/// of its kind).
class device_backend {
 public:
    virtual ~device_backend() = default;

    virtual device_kind kind() const noexcept = 0;
    virtual int index() const noexcept = 0;
    virtual std::string model() const = 0;
    virtual device::memory_sizes memory() const = 0;

    virtual void* create_stream() = 0;
    /// Waits for what is enqueued, then destroys.
    virtual void destroy_stream(void* stream) noexcept = 0;
    virtual void synchronize_stream(void* stream) = 0;
    virtual bool stream_done(void* stream) = 0;
    virtual void enqueue_host_function(void* stream, std::function<void()> work) = 0;

    virtual void* create_event() = 0;
    virtual void destroy_event(void* event) noexcept = 0;
    virtual void record_event(void* event, void* stream) = 0;
    virtual void stream_wait_event(void* stream, void* event) = 0;
    /// Waits at most `timeout`; @return whether the event has passed.
    virtual bool synchronize_event_for(void* event, std::chrono::microseconds timeout) = 0;
    virtual void synchronize_event(void* event) = 0;
    virtual bool event_done(void* event) = 0;

    virtual std::byte* allocate(std::uint64_t size_bytes, void* stream) = 0;
    virtual void release(std::byte* data, std::uint64_t size_bytes) noexcept = 0;
    virtual void release_after(std::byte* data, std::uint64_t size_bytes,
                               std::span<void* const> events) noexcept = 0;
    virtual std::byte* allocate_pinned(std::uint64_t size_bytes) = 0;
    virtual void release_pinned(std::byte* data, std::uint64_t size_bytes) noexcept = 0;

    virtual void copy_to_device(std::byte* destination, std::span<const std::byte> source, void* stream) = 0;
    virtual void copy_to_host(std::span<std::byte> destination, const std::byte* source, void* stream) = 0;
    virtual void copy_batch_to_device(std::span<const copy_range> ranges, void* stream) = 0;

    /// Enqueues the digest of `row_count` samples (see pinflow/loader/digest.hpp) and adds it to the 64-bit
    /// word at `sum` in device memory. `arrays` is read before the call returns.
    virtual void add_digest(std::span<const digest_array> arrays, std::uint64_t row_count, std::uint64_t* sum,
                            void* stream) = 0;

    virtual void copy_batch_to_host(std::span<const host_copy_range> ranges, void* stream) = 0;
    virtual void copy_on_device(std::byte* destination, const std::byte* source, std::uint64_t size_bytes,
                                void* stream) = 0;
    virtual void fill_zero(std::byte* data, std::uint64_t size_bytes, void* stream) = 0;
    /// What page-locks host memory where it lies, for this device; null if the device reads it in any case.
    virtual page_locker* locker() = 0;
    /// Whether the device can read `size_bytes` of host memory at `data` under its host address, for as long
    /// as its owner keeps it allocated or registered. On CUDA, false for pages that pinflow has registered:
    /// their holder may release them. Hold such pages through pinned_pages.
    virtual bool reaches(const std::byte* data, std::uint64_t size_bytes) = 0;

    // Rows by index. Everything that the following work on is in device memory but for the rows of tables,
    // and stays valid until the stream has passed; structures are read before the call returns.

    /// Loads the kernels that the functions below launch. Otherwise CUDA loads a kernel at its first launch,
    /// and waits for all streams then. If a stream is held back until that launch returns, neither ever ends.
    virtual void prepare_rows() = 0;
    /// Counts the indices that are not below `row_count` in *errors.
    virtual void check_rows(const std::uint64_t* ids, std::uint64_t count, std::uint64_t row_count,
                            index_errors* errors, void* stream) = 0;
    /// Writes the indices in ascending order, equal ones in that of their positions, and their positions.
    /// `count` is below 2^32.
    virtual void sort_rows(const std::uint64_t* ids, std::uint64_t count, std::uint64_t row_count,
                           std::uint64_t* sorted_ids, std::uint32_t* positions, void* stream) = 0;
    /// Counts the indices of a sorted order that occurred before in *errors.
    virtual void refuse_repeated_rows(const row_order& order, index_errors* errors, void* stream) = 0;
    /// Adds the indices at the positions that were found, from the unsorted `ids`.
    virtual void record_wrong_ids(const std::uint64_t* ids, index_errors* errors, void* stream) = 0;
    /// From the table to the batches: each row to its position; of a sorted order, to the first one only.
    virtual void gather_rows(const row_transfer& transfer, void* stream) = 0;
    /// From tables in device memory to the batches.
    virtual void gather_held(const held_gather& gather, void* stream) = 0;
    /// After the gathers of all parts of a sorted order: to the other positions, from the first.
    virtual void repeat_rows(const row_transfer& transfer, void* stream) = 0;
    /// From the batches to the table. The order is sorted. `type` is that of a sum's elements, to whose size
    /// everything is aligned then.
    virtual void scatter_rows(const row_transfer& transfer, repeated_rows repeated, sum_type type,
                              void* stream) = 0;
};

/// The host's backend.
device_backend& host_backend();

/// The backend of CUDA device `index`. @throws device_error when there is none. Only in builds with CUDA.
device_backend& cuda_backend(int index);
/// How many CUDA devices can be used, and if none, why. Only in builds with CUDA.
int cuda_device_count(std::string* none_reason) noexcept;

}  // namespace pinflow::detail
