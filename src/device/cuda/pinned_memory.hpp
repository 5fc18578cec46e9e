#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "pinflow/memory.hpp"
#include "src/device/cuda/context.hpp"
#include "src/device/slab_pool.hpp"

namespace pinflow::detail::cuda {

/// Allocates page-locked memory. Small pieces share slabs, because each registration takes tens of
/// microseconds and waits for the driver. Large pieces are registered one by one. Registers anonymous huge
/// pages, because small pieces are copied faster from them than from memory of cudaHostAlloc, which is the
/// fallback. A slab that becomes empty is released, unless it is the only empty one. All of it counts towards
/// a pin budget that was set: see pin_registry::add_buffer. Thread-safe.
class pinned_memory {
 public:
    explicit pinned_memory(int device) : device_(device) {}

    /// Allocates zero-filled memory, aligned to 4096 bytes.
    /// @throws device_error.
    std::byte* allocate(std::uint64_t size_bytes);
    void release(std::byte* data) noexcept;

 private:
    std::byte* allocate_pages(std::uint64_t size_bytes);
    void release_pages(std::byte* data) noexcept;
    std::byte* allocate_small(std::uint64_t size_bytes);
    struct locked_pages {
        memory_region region;  ///< empty for memory of cudaHostAlloc
        std::uint64_t size_bytes = 0;
    };
    template <typename GiveBack>
    void remember(std::byte* data, locked_pages pages, GiveBack give_back);

    int device_;
    std::mutex mutex_;                               // for the members below
    std::map<std::byte*, locked_pages> registered_;  // by their addresses
    slab_pool slabs_;
};

}  // namespace pinflow::detail::cuda
