#include "src/rows/staging.hpp"

#include <algorithm>

#include "src/device/backend.hpp"

namespace pinflow::detail {

staging_ring::staging_ring(pinflow::device device, std::uint64_t buffer_bytes, unsigned buffers)
    : buffer_bytes_(buffer_bytes),
      cpu_{stream(device), stream(device)},
      copies_(device),
      begin_(device),
      copied_(device),
      end_(device) {
    buffers_.reserve(buffers);
    for (unsigned i = 0; i < buffers; ++i) {
        const buffer& added = buffers_.emplace_back(device, buffer_bytes, copies_, cpu_[i % cpu_.size()]);
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

staging_rings::ring* staging_rings::find(void* stream) {
    const auto used_last = [&](const ring& each) { return !each.is_taken && each.stream == stream; };
    const auto idle = [](const ring& each) { return !each.is_taken && each.buffers.done(); };
    auto found = std::ranges::find_if(rings_, used_last);
    if (found == rings_.end()) found = std::ranges::find_if(rings_, idle);
    return found == rings_.end() ? nullptr : &*found;
}

staging_rings::taken_ring staging_rings::take(stream_view stream) {
    {
        const std::lock_guard lock(mutex_);
        if (ring* const found = find(stream.native_handle())) {
            found->is_taken = true;
            found->stream = stream.native_handle();
            return {*this, *found};
        }
    }
    std::list<ring> made;  // without the lock, because this allocates
    made.emplace_back(*this).stream = stream.native_handle();
    const std::lock_guard lock(mutex_);
    rings_.splice(rings_.end(), made);
    return {*this, rings_.back()};
}

void staging_rings::give_back(ring& taken) noexcept {
    const std::lock_guard lock(mutex_);
    taken.is_taken = false;
}

}  // namespace pinflow::detail
