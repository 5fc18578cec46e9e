#include "src/load/unit_queue.hpp"

#include <algorithm>

namespace pinflow::detail {

void unit_queue::start(load_route route) {
    const std::scoped_lock lock(mutex_);
    copies_ = route != load_route::staged;
    stages_ = route != load_route::copy;
}

const load_unit* unit_queue::front() const {
    const std::scoped_lock lock(mutex_);
    return copies_ && front_ < end_ ? &plan_.copyable[front_] : nullptr;
}

bool unit_queue::take_front() {
    const std::scoped_lock lock(mutex_);
    if (!copies_ || front_ >= end_) return false;
    ++front_;
    return true;
}

const load_unit* unit_queue::take_for_thread() {
    const std::scoped_lock lock(mutex_);
    if (next_other_ < plan_.others.size()) return &plan_.others[next_other_++];
    if (!stages_ || front_ >= end_) return nullptr;
    // disks are read from the front
    if (!copies_) return &plan_.copyable[front_++];
    return &plan_.copyable[--end_];
}

std::size_t unit_queue::count_decoded() const {
    const std::scoped_lock lock(mutex_);
    return plan_.decoded_count - std::min(next_other_, plan_.decoded_count);  // they come first
}

bool unit_queue::is_empty() const {
    const std::scoped_lock lock(mutex_);
    return next_other_ == plan_.others.size() && front_ >= end_;
}

void unit_queue::stop_copies() {
    const std::scoped_lock lock(mutex_);
    copies_ = false;
    stages_ = true;
}

}  // namespace pinflow::detail
