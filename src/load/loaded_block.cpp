#include <algorithm>
#include <new>

#include "src/device/backend.hpp"
#include "src/load/load_plan.hpp"

namespace pinflow::detail {

void loaded_block::use_on(stream_view stream) {
    if (is_mapped()) return;
    const std::scoped_lock lock(mutex_);
    const bool is_known = std::ranges::any_of(
        streams_, [&](const stream_view& other) { return other.native_handle() == stream.native_handle(); });
    if (is_known) return;
    events_.emplace_back(stream.device());
    streams_.push_back(stream);
}

loaded_block::~loaded_block() {
    bool is_known_unused = ::getpid() == process_;
    try {
        for (std::size_t i = 0; is_known_unused && i < streams_.size(); ++i) {
            device_backend& backend = streams_[i].device().backend();
            void* const handle = backend.stream_for_marks(streams_[i].native_handle());
            // the event would become a part of the graph
            is_known_unused = !backend.is_capturing(handle);
            if (is_known_unused) events_[i].record({streams_[i].device(), handle});
        }
    } catch (...) {
        is_known_unused = false;  // the device has failed, memory is short, or the process ends
    }
    if (is_known_unused) {
        memory_.release_after(events_);
    } else {
        static_cast<void>(new (std::nothrow) device_buffer(std::move(memory_)));  // leaked
    }
}

}  // namespace pinflow::detail
