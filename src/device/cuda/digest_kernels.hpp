#pragma once

#include <cstdint>
#include <span>

#include "src/device/backend.hpp"
#include "src/device/cuda/api.hpp"

/// Launches the kernels of digest.hpp on the current context.
namespace pinflow::detail::cuda {

/// What launches depend on.
struct digest_device {
    unsigned multiprocessors = 1;
    cudaMemPool_t pool = nullptr;  ///< for the hashes of rows
};

/// As device_backend::add_digest, for at least one sample.
cudaError_t add_digest(std::span<const digest_array> arrays, std::uint64_t row_count, std::uint64_t* sum,
                       const digest_device& device, cudaStream_t stream) noexcept;

}  // namespace pinflow::detail::cuda
