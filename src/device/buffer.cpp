#include "pinflow/buffer.hpp"

#include <new>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "src/device/backend.hpp"

namespace pinflow {

device_buffer::device_buffer(std::uint64_t size_bytes, stream_view stream)
    : backend_(&stream.device().backend()),
      data_(size_bytes == 0 ? nullptr : backend_->allocate(size_bytes, stream.native_handle())),
      size_bytes_(size_bytes) {}

device_buffer::device_buffer(device_buffer&& other) noexcept
    : backend_(other.backend_),
      data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

device_buffer& device_buffer::operator=(device_buffer&& other) noexcept {
    if (this != &other) {
        const device_buffer old = std::move(*this);
        backend_ = other.backend_;
        data_ = std::exchange(other.data_, nullptr);
        size_bytes_ = std::exchange(other.size_bytes_, 0);
    }
    return *this;
}

device_buffer::~device_buffer() {
    if (data_ != nullptr) backend_->release(data_, size_bytes_);
}

namespace {

/// Waits on the calling thread, because enqueuing a release needs memory and none is left.
void wait_for(std::span<const event> events) noexcept {
    try {
        for (const event& event : events) {
            if (event.native_handle() != nullptr) event.synchronize();
        }
    } catch (const device_error&) {
        return;  // a failed device no longer reads memory
    }
}

}  // namespace

void device_buffer::release_after(std::span<const event> events) noexcept {
    if (data_ == nullptr) return;
    std::vector<void*> handles;
    try {
        handles.reserve(events.size());
        for (const event& event : events) {
            if (event.native_handle() != nullptr) handles.push_back(event.native_handle());
        }
    } catch (const std::bad_alloc&) {
        wait_for(events);
    }
    backend_->release_after(std::exchange(data_, nullptr), std::exchange(size_bytes_, 0), handles);
}

pinned_buffer::pinned_buffer(std::uint64_t size_bytes, pinflow::device device)
    : backend_(&device.backend()),
      data_(size_bytes == 0 ? nullptr : backend_->allocate_pinned(size_bytes)),
      size_bytes_(size_bytes) {}

pinned_buffer::pinned_buffer(pinned_buffer&& other) noexcept
    : backend_(other.backend_),
      data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

pinned_buffer& pinned_buffer::operator=(pinned_buffer&& other) noexcept {
    if (this != &other) {
        const pinned_buffer old = std::move(*this);
        backend_ = other.backend_;
        data_ = std::exchange(other.data_, nullptr);
        size_bytes_ = std::exchange(other.size_bytes_, 0);
    }
    return *this;
}

pinned_buffer::~pinned_buffer() {
    if (data_ != nullptr) backend_->release_pinned(data_, size_bytes_);
}

void copy_to_device_async(std::byte* destination, std::span<const std::byte> source, stream_view stream) {
    stream.device().backend().copy_to_device(destination, source, stream.native_handle());
}

void copy_to_host_async(std::span<std::byte> destination, const std::byte* source, stream_view stream) {
    stream.device().backend().copy_to_host(destination, source, stream.native_handle());
}

void copy_batch_to_device_async(std::span<const copy_range> ranges, stream_view stream) {
    stream.device().backend().copy_batch_to_device(ranges, stream.native_handle());
}

void copy_batch_to_host_async(std::span<const host_copy_range> ranges, stream_view stream) {
    stream.device().backend().copy_batch_to_host(ranges, stream.native_handle());
}

}  // namespace pinflow
