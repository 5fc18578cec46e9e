#include "pinflow/stream.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "pinflow/error.hpp"
#include "src/device/backend.hpp"

namespace pinflow {

void stream_view::wait(const event& event) const {
    // as in CUDA, a stream can wait for an event of another device of the same kind
    if (event.device().kind() != device_.kind()) {
        throw invalid_argument(fmt::format("a stream of {} cannot wait for an event of {}", device_.name(),
                                           event.device().name()));
    }
    device_.backend().stream_wait_event(native_handle_, event.valid_handle());
}

void stream_view::synchronize() const {
    device_.backend().synchronize_stream(native_handle_);
}

bool stream_view::done() const {
    return device_.backend().stream_done(native_handle_);
}

void stream_view::host_function_async(std::function<void()> work) const {
    if (!work) throw invalid_argument("an empty function cannot be enqueued in a stream");
    device_.backend().enqueue_host_function(native_handle_, std::move(work));
}

detail::shared_stream::shared_stream(pinflow::device device, void* native_handle) noexcept
    : device_(device), native_handle_(native_handle) {}

detail::shared_stream::~shared_stream() {
    device_.backend().destroy_stream(native_handle_);
}

namespace {

/// Owns a stream that the device's backend has made.
std::shared_ptr<detail::shared_stream> owner_of(const device& device, void* handle) {
    try {
        return std::make_shared<detail::shared_stream>(device, handle);
    } catch (...) {
        device.backend().destroy_stream(handle);
        throw;
    }
}

}  // namespace

stream::stream(pinflow::device device) : stream(owner_of(device, device.backend().create_stream())) {}

stream::stream(std::shared_ptr<detail::shared_stream> owned) noexcept
    : device_(owned->device()), owned_(std::move(owned)) {}

stream detail::synchronous_stream(pinflow::device device) {
    return stream(owner_of(device, device.backend().create_synchronous_stream()));
}

stream& stream::operator=(stream&& other) noexcept {
    if (this != &other) {
        const stream old = std::move(*this);
        device_ = other.device_;
        owned_ = std::move(other.owned_);
    }
    return *this;
}

void stream::refuse_moved_from() {
    throw invalid_argument("cannot use a moved-from stream");
}

stream::~stream() {
    if (owned_) device_.backend().finish_stream(owned_->native_handle());
}

event::event(pinflow::device device) : device_(device), native_handle_(device.backend().create_event()) {}

event::event(event&& other) noexcept
    : device_(other.device_), native_handle_(std::exchange(other.native_handle_, nullptr)) {}

event& event::operator=(event&& other) noexcept {
    if (this != &other) {
        const event old = std::move(*this);
        device_ = other.device_;
        native_handle_ = std::exchange(other.native_handle_, nullptr);
    }
    return *this;
}

event::~event() {
    if (native_handle_ != nullptr) device_.backend().destroy_event(native_handle_);
}

void* event::valid_handle() const {
    if (native_handle_ == nullptr) throw invalid_argument("cannot use a moved-from event");
    return native_handle_;
}

void event::record(stream_view stream) {
    if (stream.device() != device_) {
        throw invalid_argument(fmt::format("an event of {} cannot be recorded in a stream of {}",
                                           device_.name(), stream.device().name()));
    }
    device_.backend().record_event(valid_handle(), stream.native_handle());
}

void event::synchronize() const {
    device_.backend().synchronize_event(valid_handle());
}

bool event::synchronize_for(std::chrono::microseconds timeout) const {
    // clocks count in nanoseconds, of which 64 bits hold 292 years
    constexpr std::chrono::microseconds longest = std::chrono::years(100);
    return device_.backend().synchronize_event_for(valid_handle(), std::min(timeout, longest));
}

bool event::done() const {
    return device_.backend().event_done(valid_handle());
}

}  // namespace pinflow
