#include "src/rows/device_scratch.hpp"

#include <utility>

#include "src/core/checked.hpp"

namespace pinflow::detail {

std::size_t device_scratch::add(std::uint64_t size_bytes) {
    constexpr std::uint64_t alignment = 256;
    offsets_.push_back(size_bytes_);
    size_bytes_ += rounded_up(size_bytes, alignment);
    return offsets_.size() - 1;
}

void device_scratch::allocate(std::span<std::byte> reserved, stream_view stream,
                              std::shared_ptr<memory_resource> resource) {
    if (size_bytes_ == 0) return;
    data_ = reserved.data();
    if (size_bytes_ <= reserved.size()) return;
    memory_ = device_buffer(size_bytes_, stream, std::move(resource));
    data_ = memory_.data();
}

void device_scratch::release(stream_view stream) noexcept {
    data_ = nullptr;
    if (memory_.data() == nullptr) return;
    memory_.set_stream(stream);
    memory_ = {};
}

}  // namespace pinflow::detail
