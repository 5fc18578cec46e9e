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
        if (each.taken_ || each.memory_.size_bytes() < size_bytes) continue;
        if (best != nullptr && best->memory_.size_bytes() <= each.memory_.size_bytes()) continue;
        if (each.used_.done()) best = &each;
    }
    if (best != nullptr) best->taken_ = true;
    return best;
}

std::list<pinned_scratch::block> pinned_scratch::allocate(std::uint64_t size_bytes) const {
    constexpr std::uint64_t min_bytes = 4096;
    std::list<block> allocated;
    allocated.emplace_back(device_, std::bit_ceil(std::max(size_bytes, min_bytes))).taken_ = true;
    return allocated;
}

pinned_scratch::block& pinned_scratch::add(std::list<block> allocated) noexcept {
    blocks_.splice(blocks_.end(), allocated);
    return blocks_.back();
}

pinned_scratch::block& pinned_scratch::take(std::uint64_t size_bytes) {
    if (block* const found = find(size_bytes)) return *found;
    return add(allocate(size_bytes));
}

void pinned_scratch::give_back(block& used, stream_view stream) {
    mark(used, stream);
    give_back(used);
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
