#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "pinflow/device.hpp"
#include "pinflow/empty_on_move.hpp"
#include "pinflow/stream.hpp"

namespace pinflow {

/// Allocates device memory in place of pinflow's pool, for example from a framework's caching allocator. Both
/// members are called from several threads at once.
class memory_resource {
 public:
    virtual ~memory_resource() = default;

    /// Allocates `size_bytes`, at least 1. An implementation must not wait. Exceptions reach the caller of
    /// pinflow, and a null pointer becomes a device_error.
    /// @return device memory aligned to 256 bytes that can be used in `stream`'s order.
    virtual std::byte* allocate(std::uint64_t size_bytes, stream_view stream) = 0;
    /// Releases memory of `allocate` in the order of `stream`, which may be another one than that of
    /// `allocate` (see device_buffer::set_stream). All work that uses the memory has finished, or comes
    /// before this call in that order. It may still be running, also on the host device, so an implementation
    /// must not free the memory at once: it enqueues that on `stream`, for example with host_function_async.
    virtual void deallocate(std::byte* data, std::uint64_t size_bytes, stream_view stream) noexcept = 0;
};

/// Memory on a device, which is allocated and released in the order of a stream: work that is enqueued on
/// that stream may still use it when the buffer is destroyed. Move-only. On CUDA the host must not touch it.
///
/// The stream need not outlive the buffer, unless it is foreign (a stream_view of a native handle). With
/// cudaStreamPerThread, whose handle means another stream on each thread, the buffer must be released on the
/// thread that made it.
class device_buffer {
 public:
    device_buffer() noexcept = default;
    /// Allocates uninitialised memory, aligned to 256 bytes. It can be used in `stream`'s order at once, and
    /// on other streams once `stream` has reached this point. Does not wait. The memory comes from
    /// `resource`, or, if that is null, from the device's stream-ordered pool.
    /// @throws device_error if a GPU is out of memory; system_failure if the host device is; what `resource`
    /// throws.
    device_buffer(std::uint64_t size_bytes, stream_view stream,
                  std::shared_ptr<memory_resource> resource = nullptr);
    device_buffer(device_buffer&& other) noexcept = default;
    device_buffer& operator=(device_buffer&& other) noexcept;
    device_buffer(const device_buffer&) = delete;
    device_buffer& operator=(const device_buffer&) = delete;
    /// Releases the memory once the buffer's stream has completed the work enqueued so far. Does not wait,
    /// unless host memory is exhausted or the stream's queue is full.
    /// Work on other streams must have finished, or the buffer's stream must wait for it.
    ~device_buffer();

    std::byte* data() const noexcept { return data_; }
    std::uint64_t size_bytes() const noexcept { return size_bytes_; }

    /// Makes `stream` the stream in whose order the memory is released. Work on the previous stream must have
    /// finished, or `stream` must wait for it.
    /// @throws invalid_argument for a stream of another device.
    void set_stream(stream_view stream);
    /// Gives up the memory. It is released once the buffer's stream has completed the work enqueued so far
    /// and all `events` have passed. The buffer is empty afterwards, and the events may be destroyed. Waits
    /// only if the destructor would.
    void release_after(std::span<const event> events) noexcept;

 private:
    detail::empty_on_move<std::byte*> data_ = nullptr;
    detail::empty_on_move<std::uint64_t> size_bytes_ = 0;
    std::optional<stream_view> stream_;
    /// Keeps the stream alive until the memory is released. Null for a foreign stream. Also null on the host
    /// without a resource: there `watched_` suffices, and keeping the stream would keep its thread.
    std::shared_ptr<detail::shared_stream> kept_;
    std::weak_ptr<detail::shared_stream> watched_;
    std::shared_ptr<memory_resource> resource_;
};

/// Page-locked host memory that `device` copies from and to at the full rate of the link. On the host device
/// it is plain memory. Move-only.
///
/// The first pinned_buffer or pinned_pages of a CUDA device takes a tenth of a second and some 520 MiB of
/// device memory: pinflow creates a second CUDA context and registers host memory there. Registering in the
/// primary context would block all other users of it. The primary context is used instead if the device has
/// less than 10 GiB in all or less than 1 GiB free, or if the second context cannot be created.
class pinned_buffer {
 public:
    pinned_buffer() noexcept = default;
    /// Allocates zero-filled memory, aligned to 4096 bytes.
    /// @throws device_error if that much cannot be page-locked for a GPU.
    /// @throws system_failure if the host device is out of memory.
    pinned_buffer(std::uint64_t size_bytes, pinflow::device device);
    pinned_buffer(pinned_buffer&& other) noexcept;
    pinned_buffer& operator=(pinned_buffer&& other) noexcept;
    pinned_buffer(const pinned_buffer&) = delete;
    pinned_buffer& operator=(const pinned_buffer&) = delete;
    /// Releases the memory at once: all copies from and to it must have finished.
    ~pinned_buffer();

    std::byte* data() const noexcept { return data_; }
    std::uint64_t size_bytes() const noexcept { return size_bytes_; }
    std::span<std::byte> bytes() const noexcept { return {data_, size_bytes_}; }

 private:
    detail::device_backend* backend_ = nullptr;
    std::byte* data_ = nullptr;
    std::uint64_t size_bytes_ = 0;
};

/// Enqueues a copy of `source`, in host memory, to device memory at `destination`. Both must stay valid, and
/// the source unchanged, until the stream has passed the copy. Does not wait for the copy, but CUDA may block
/// the calling thread if the host memory is not pinned or registered.
/// @throws device_error.
void copy_to_device_async(std::byte* destination, std::span<const std::byte> source, stream_view stream);

/// Enqueues a copy of device memory at `source` to `destination` in host memory. Lifetimes and blocking are
/// as above.
/// @throws device_error.
void copy_to_host_async(std::span<std::byte> destination, const std::byte* source, stream_view stream);

/// One piece of a batch of copies.
struct copy_range {
    std::byte* destination;   ///< device memory
    const std::byte* source;  ///< host memory, pinned or registered
    std::uint64_t size_bytes;
};

/// Enqueues many copies to the device together. They run in no particular order; the destinations
/// must not overlap. `ranges` itself is read before the call returns. Lifetimes and blocking are as above.
/// @throws device_error.
void copy_batch_to_device_async(std::span<const copy_range> ranges, stream_view stream);

/// One piece of a batch of copies to the host.
struct host_copy_range {
    std::byte* destination;   ///< host memory, pinned or registered
    const std::byte* source;  ///< device memory
    std::uint64_t size_bytes;
};

/// The same from the device to the host.
/// @throws device_error.
void copy_batch_to_host_async(std::span<const host_copy_range> ranges, stream_view stream);

}  // namespace pinflow
