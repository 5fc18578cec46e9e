#pragma once

#include <cstddef>
#include <vector>

#include "src/device/cuda/api.hpp"

namespace pinflow::detail::cuda {

/// Copies between the host and a device that are enqueued together.
class copy_list {
 public:
    explicit copy_list(std::size_t count);

    void add(void* destination, const void* source, std::size_t size_bytes);
    /// Enqueues all copies on the current context: in batches, or one by one on the legacy default stream and
    /// if the driver has no batches.
    cudaError_t enqueue(cudaMemcpyKind kind, cudaStream_t stream) noexcept;

 private:
    cudaError_t enqueue_batches(cudaStream_t stream) noexcept;
    cudaError_t enqueue_one_by_one(cudaMemcpyKind kind, cudaStream_t stream) const noexcept;

    std::vector<void*> destinations_;
    std::vector<const void*> sources_;
    std::vector<std::size_t> sizes_;
};

}  // namespace pinflow::detail::cuda
