#include "src/rows/scratch.hpp"

#include <algorithm>
#include <bit>

namespace pinflow::detail {

pinned_scratch::~pinned_scratch() {
    for (const block& each : blocks_) {
        try {
            each.used_.synchronize();
        } catch (...) {
            return;  // a failed device runs nothing any more
        }
    }
}

pinned_scratch::block* pinned_scratch::find(std::uint64_t size_bytes) {
    block* best = nullptr;  // the smallest that fits, to keep large blocks for later
    for (block& each : blocks_) {
        if (each.memory_.size_bytes() < size_bytes || each.taken_.load(std::memory_order_acquire)) continue;
        if (best != nullptr && best->memory_.size_bytes() <= each.memory_.size_bytes()) continue;
        if (each.passed()) best = &each;
    }
    if (best != nullptr) best->taken_.store(true, std::memory_order_relaxed);
    return best;
}

pinned_scratch::block& pinned_scratch::take(std::uint64_t size_bytes) {
    constexpr std::uint64_t min_bytes = 4096;
    {
        const std::lock_guard lock(mutex_);
        if (block* const found = find(size_bytes)) return *found;
    }
    std::list<block> allocated;
    allocated.emplace_back(device_, std::bit_ceil(std::max(size_bytes, min_bytes)));
    const std::lock_guard lock(mutex_);
    blocks_.splice(blocks_.end(), allocated);
    return blocks_.back();
}

std::size_t device_scratch::add(std::uint64_t size_bytes) {
    constexpr std::uint64_t alignment = 256;
    offsets_.push_back(size_bytes_);
    size_bytes_ += (size_bytes + alignment - 1) / alignment * alignment;
    return offsets_.size() - 1;
}

void device_scratch::allocate(stream_view stream) {
    memory_ = device_buffer(size_bytes_, stream);
}

void device_scratch::release(stream_view stream) noexcept {
    if (memory_.data() == nullptr) return;
    memory_.set_stream(stream);
    memory_ = {};
}

}  // namespace pinflow::detail
