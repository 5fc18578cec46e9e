#include "src/rows/staging.hpp"

#include <algorithm>
#include <iterator>

#include "src/device/backend.hpp"

namespace pinflow::detail {

staging::staging(pinflow::device device, std::uint64_t slot_bytes, unsigned slots)
    : slot_bytes_(slot_bytes),
      cpu_{stream(device), stream(device)},
      copies_(device),
      begin_(device),
      end_(device) {
    slots_.reserve(slots);
    for (unsigned i = 0; i < slots; ++i) {
        const slot& added = slots_.emplace_back(device, slot_bytes, copies_, cpu_[i % cpu_.size()]);
        // what a scatter leaves out, equal rows or those of a refused call, is copied to the host too, though
        // nobody looks at it
        device.backend().fill_zero(added.on_device.data(), slot_bytes, copies().native_handle());
    }
}

void staging::begin_after(stream_view user) {
    begin_.record(user);
    cpu_waits_for(begin_);
    copies_.wait(begin_);
}

void staging::cpu_waits_for(const event& event) {
    for (const stream& each : cpu_)
        each.wait(event);
}

void staging::end_before(stream_view user) {
    for (const stream_view each : streams()) {
        end_.record(each);
        user.wait(end_);
    }
}

bool staging::done() const {
    return std::ranges::all_of(streams(), [](stream_view each) { return each.done(); });
}

staging& staging_lanes::take(stream_view stream) {
    const auto used_last = [&](const lane& each) { return each.stream == stream.native_handle(); };
    const auto unused = [](const lane& each) { return each.slots->done(); };
    auto found = std::ranges::find_if(lanes_, used_last);
    if (found == lanes_.end()) found = std::ranges::find_if(lanes_, unused);
    if (found == lanes_.end()) {
        lanes_.push_back({std::make_unique<staging>(device_, slot_bytes_, slots_), nullptr});
        found = std::prev(lanes_.end());
    }
    found->stream = stream.native_handle();
    return *found->slots;
}

}  // namespace pinflow::detail
