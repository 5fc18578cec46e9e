#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
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
    /// The size of all parts together.
    std::uint64_t size_bytes() const noexcept { return size_bytes_; }
    /// Takes the memory from `reserved`, device memory at a multiple of 256 bytes that no stream uses. It is
    /// borrowed until all work with the parts has finished. If it is too small, allocates memory in the order
    /// of `stream`, from `resource`, or, if that is null, from the device's pool.
    /// @throws what device_buffer throws.
    void allocate(std::span<std::byte> reserved, stream_view stream,
                  std::shared_ptr<memory_resource> resource);
    /// Part `number`, between `allocate` and `release`.
    std::byte* part(std::size_t number) const noexcept { return data_ + offsets_[number]; }
    template <typename Value>
    Value* part_as(std::size_t number) const noexcept {
        return reinterpret_cast<Value*>(part(number));
    }
    /// Frees memory that was allocated, once `stream` has completed the work enqueued so far.
    void release(stream_view stream) noexcept;

 private:
    std::vector<std::uint64_t> offsets_;
    std::uint64_t size_bytes_ = 0;
    std::byte* data_ = nullptr;
    device_buffer memory_;  ///< empty if the reserved memory is used
};

}  // namespace pinflow::detail
