#include "src/rows/staging.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

#include "src/device/backend.hpp"

namespace pinflow::detail {

staging_ring::staging_ring(pinflow::device device, std::uint64_t buffer_bytes, unsigned buffers,
                           const std::shared_ptr<memory_resource>& resource)
    : buffer_bytes_(buffer_bytes),
      cpu_{stream(device), stream(device)},
      copies_(device),
      begin_(device),
      copied_(device),
      end_(device) {
    buffers_.reserve(buffers);
    for (unsigned i = 0; i < buffers; ++i) {
        const buffer& added =
            buffers_.emplace_back(device, buffer_bytes, copies_, cpu_[i % cpu_.size()], resource);
        // zeroed, because a scatter also copies unwritten rows to the host: equal rows, and rows of a refused
        // call
        device.backend().fill_zero(added.on_device.data(), buffer_bytes, copies().native_handle());
    }
}

void staging_ring::begin_after(stream_view user) {
    begin_.record(user);
    for (const stream_view each : streams())
        each.wait(begin_);
}

void staging_ring::cpu_waits_for_copies() {
    copied_.record(copies_);
    for (const stream& each : cpu_)
        each.wait(copied_);
}

void staging_ring::end_before(stream_view user) {
    for (const stream_view each : streams()) {
        end_.record(each);
        user.wait(end_);
    }
}

bool staging_ring::done() const {
    return std::ranges::all_of(streams(), [](stream_view each) { return each.done(); });
}

void staging_rings::reserve(pinflow::device device, std::uint64_t buffer_bytes, unsigned buffers,
                            const std::shared_ptr<memory_resource>& resource) {
    if (has_some()) return;
    std::list<ring> made;
    for (unsigned i = 0; i < ring_count; ++i)
        made.emplace_back(device, buffer_bytes, buffers, resource);
    const std::lock_guard lock(mutex_);
    if (rings_.empty()) rings_.splice(rings_.end(), made);
}

bool staging_rings::has_some() const {
    const std::lock_guard lock(mutex_);
    return !rings_.empty();
}

staging_rings::ring* staging_rings::find(void* stream) {
    const auto used_last = [&](const ring& each) { return !each.is_taken && each.stream == stream; };
    const auto idle = [](const ring& each) { return !each.is_taken && each.buffers.done(); };
    auto found = std::ranges::find_if(rings_, used_last);
    if (found == rings_.end()) found = std::ranges::find_if(rings_, idle);
    return found == rings_.end() ? nullptr : &*found;
}

staging_rings::taken_ring staging_rings::take(stream_view stream) {
    constexpr std::chrono::microseconds pause{50};
    for (;;) {
        {
            const std::lock_guard lock(mutex_);
            if (ring* const found = find(stream.native_handle())) {
                found->is_taken = true;
                found->stream = stream.native_handle();
                return {*this, found->buffers};
            }
        }
        std::this_thread::sleep_for(pause);
    }
}

void staging_rings::give_back(const staging_ring& taken) noexcept {
    const std::lock_guard lock(mutex_);
    std::ranges::find(rings_, &taken, [](const ring& each) { return &each.buffers; })->is_taken = false;
}

}  // namespace pinflow::detail
