#include "src/rows/staging.hpp"

#include <algorithm>
#include <iterator>

#include "src/device/backend.hpp"

namespace pinflow::detail {

staging_ring::staging_ring(pinflow::device device, std::uint64_t buffer_bytes, unsigned buffers)
    : buffer_bytes_(buffer_bytes),
      cpu_{stream(device), stream(device)},
      copies_(device),
      begin_(device),
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
    cpu_waits_for(begin_);
    copies_.wait(begin_);
}

void staging_ring::cpu_waits_for(const event& event) {
    for (const stream& each : cpu_)
        each.wait(event);
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

staging_ring& staging_rings::take(stream_view stream) {
    const auto used_last = [&](const ring& each) { return each.stream == stream.native_handle(); };
    const auto unused = [](const ring& each) { return each.buffers->done(); };
    auto found = std::ranges::find_if(rings_, used_last);
    if (found == rings_.end()) found = std::ranges::find_if(rings_, unused);
    if (found == rings_.end()) {
        rings_.push_back({std::make_unique<staging_ring>(device_, buffer_bytes_, buffers_), nullptr});
        found = std::prev(rings_.end());
    }
    found->stream = stream.native_handle();
    return *found->buffers;
}

}  // namespace pinflow::detail
