#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/stream.hpp"

namespace pinflow::detail {

/// One piece of device memory, cut into parts for one call.
class device_scratch {
 public:
    /// Adds a part of `size_bytes`, aligned to 256 bytes. Must be called before `allocate`.
    /// @return its number.
    std::size_t add(std::uint64_t size_bytes);
    /// Allocates the memory in the order of `stream`, from `resource`, or, if that is null, from the device's
    /// pool.
    /// @throws what device_buffer throws.
    void allocate(stream_view stream, std::shared_ptr<memory_resource> resource);
    std::byte* part(std::size_t number) const noexcept { return memory_.data() + offsets_[number]; }
    template <typename Value>
    Value* part_as(std::size_t number) const noexcept {
        return reinterpret_cast<Value*>(part(number));
    }
    /// Frees the memory once `stream` has completed the work enqueued so far.
    void release(stream_view stream) noexcept;

 private:
    std::vector<std::uint64_t> offsets_;
    std::uint64_t size_bytes_ = 0;
    device_buffer memory_;
};

}  // namespace pinflow::detail
