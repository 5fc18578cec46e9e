#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "pinflow/memory.hpp"
#include "src/device/cuda/context.hpp"

namespace pinflow::detail::cuda {

/// Allocates page-locked memory for staging. Registered anonymous huge pages are preferred, because small
/// pieces are copied faster than with cudaHostAlloc, which is the fallback. Thread-safe.
class pinned_memory {
 public:
    explicit pinned_memory(int device) : device_(device) {}

    /// Allocates zero-filled memory, aligned to 4096 bytes.
    /// @throws device_error.
    std::byte* allocate(std::uint64_t size_bytes);
    void release(std::byte* data) noexcept;

 private:
    template <typename GiveBack>
    void remember(std::byte* data, memory_region region, GiveBack give_back);

    int device_;
    std::mutex mutex_;
    std::map<std::byte*, memory_region> registered_;  // an empty region stands for memory of cudaHostAlloc
};

}  // namespace pinflow::detail::cuda
