#include "pinflow/buffer.hpp"

#include <fmt/format.h>

#include <new>
#include <utility>

#include "pinflow/error.hpp"
#include "src/device/backend.hpp"

namespace pinflow {

device_buffer::device_buffer(std::uint64_t size_bytes, stream_view stream,
                             std::shared_ptr<memory_resource> resource)
    : size_bytes_(size_bytes), resource_(std::move(resource)) {
    set_stream(stream);  // the first one may be of any device
    if (size_bytes == 0) return;
    data_ = resource_ ? resource_->allocate(size_bytes, stream)
                      : stream.device().backend().allocate(size_bytes, stream.native_handle());
    if (data_ == nullptr) {
        throw device_error(
            fmt::format("cannot allocate {} bytes: the memory_resource returned a null pointer", size_bytes));
    }
}

device_buffer& device_buffer::operator=(device_buffer&& other) noexcept {
    if (this != &other) {
        release_after({});
        data_ = std::move(other.data_);
        size_bytes_ = std::move(other.size_bytes_);
        stream_ = other.stream_;
        kept_ = std::move(other.kept_);
        watched_ = std::move(other.watched_);
        resource_ = std::move(other.resource_);
    }
    return *this;
}

device_buffer::~device_buffer() {
    release_after({});
}

void device_buffer::set_stream(stream_view stream) {
    if (stream_ && stream.device() != stream_->device()) {
        throw invalid_argument(fmt::format("memory of {} cannot be released in the order of a stream of {}",
                                           stream_->device().name(), stream.device().name()));
    }
    std::shared_ptr<detail::shared_stream> owned;
    if (stream.owned_ != nullptr) owned = stream.owned_->shared_from_this();
    const bool is_kept = resource_ || stream.device().kind() != device_kind::host;
    stream_ = stream;
    watched_ = owned;
    kept_ = is_kept ? std::move(owned) : nullptr;
}

void device_buffer::release_after(std::span<const event> events) noexcept {
    if (data_ == nullptr) return;
    std::byte* const data = std::exchange(data_, nullptr);
    const std::uint64_t size_bytes = std::exchange(size_bytes_, 0);
    const stream_view stream = *stream_;
    const std::shared_ptr<detail::shared_stream> owned = watched_.lock();  // until the memory is released
    kept_.reset();
    if (!resource_) {
        const bool has_ended = stream.owned_ != nullptr && !owned;
        void* const handle = has_ended ? nullptr : stream.native_handle();
        return stream.device().backend().release(data, size_bytes, handle, events);
    }
    const auto wait_for_all = [&](auto wait) {
        for (const event& event : events) {
            if (event.native_handle() != nullptr) wait(event);
        }
    };
    try {
        try {
            wait_for_all([&](const event& event) { stream.wait(event); });
        } catch (const std::bad_alloc&) {
            wait_for_all([](const event& event) { event.synchronize(); });
        }
        resource_->deallocate(data, size_bytes, stream);
    } catch (...) {
        return;  // the device has failed: memory that may still be in use is leaked
    }
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
