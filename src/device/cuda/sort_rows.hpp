#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace pinflow::detail::cuda {

/// Sorts indices, with their positions, by their lowest `bits` bits. The sort is stable. If `scratch` is
/// null, only `scratch_bytes` is set, to the required size. Only the layer of api.hpp calls it.
cudaError_t sort_pairs(void* scratch, std::size_t& scratch_bytes, const std::uint64_t* ids,
                       std::uint64_t* sorted_ids, const std::uint32_t* positions,
                       std::uint32_t* sorted_positions, std::uint64_t count, int bits, cudaStream_t stream);

}  // namespace pinflow::detail::cuda
