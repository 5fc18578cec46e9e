#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "pinflow/buffer.hpp"

/// Counts what it allocates; the memory is the device's own.
class counting_resource final : public pinflow::memory_resource {
 public:
    std::byte* allocate(std::uint64_t size_bytes, pinflow::stream_view stream) override {
        pinflow::device_buffer memory(size_bytes, stream);
        std::byte* const data = memory.data();
        const std::lock_guard lock(mutex_);
        memory_.push_back(std::move(memory));
        ++allocated;
        return data;
    }
    void deallocate(std::byte* data, std::uint64_t size_bytes,
                    pinflow::stream_view stream) noexcept override {
        const std::lock_guard lock(mutex_);
        const auto found = std::ranges::find(memory_, data, &pinflow::device_buffer::data);
        if (found == memory_.end() || found->size_bytes() != size_bytes) return;
        found->set_stream(stream);
        memory_.erase(found);
        ++deallocated;
    }

    std::atomic<int> allocated = 0;
    std::atomic<int> deallocated = 0;

 private:
    std::mutex mutex_;
    std::vector<pinflow::device_buffer> memory_;
};
