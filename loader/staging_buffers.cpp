#include "loader/staging_buffers.hpp"

namespace pinflow::detail {

staging_buffers::staging_buffers(const pinflow::device& device, std::size_t count, std::uint64_t buffer_bytes)
    : buffer_bytes_(buffer_bytes), memory_(count * buffer_bytes, device), free_count_(count) {
    for (std::size_t i = 0; i < count; ++i)
        free_.push_back(&all_.emplace_back(memory_.data() + i * buffer_bytes, device));
}

staging_buffers::lease staging_buffers::take() {
    buffer* taken = nullptr;
    {
        std::unique_lock lock(mutex_);
        given_back_.wait(lock, [&] { return free_count_ > 0; });
        taken = free_[first_];
        first_ = (first_ + 1) % free_.size();
        --free_count_;
    }
    try {
        taken->copied.synchronize();
    } catch (...) {
        give_back(*taken);
        throw;
    }
    return {*this, *taken};
}

void staging_buffers::give_back(buffer& taken) noexcept {
    {
        const std::lock_guard lock(mutex_);
        free_[(first_ + free_count_) % free_.size()] = &taken;
        ++free_count_;
    }
    given_back_.notify_one();
}

}  // namespace pinflow::detail
