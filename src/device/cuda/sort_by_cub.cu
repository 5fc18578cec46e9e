#include <cub/device/device_radix_sort.cuh>

#include "src/device/cuda/sort_rows.hpp"

namespace pinflow::detail::cuda {

namespace {

__global__ void number(std::uint32_t* positions, std::uint64_t count) {
    const std::uint64_t threads = std::uint64_t{gridDim.x} * blockDim.x;
    for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += threads)
        positions[i] = static_cast<std::uint32_t>(i);
}

}  // namespace

const void* number_rows() {
    return reinterpret_cast<const void*>(&number);
}

cudaError_t sort_pairs(void* scratch, std::size_t& scratch_bytes, const std::uint64_t* ids,
                       std::uint64_t* sorted_ids, const std::uint32_t* positions,
                       std::uint32_t* sorted_positions, std::uint64_t count, int bits, cudaStream_t stream) {
    return cub::DeviceRadixSort::SortPairs(scratch, scratch_bytes, ids, sorted_ids, positions,
                                           sorted_positions, count, 0, bits, stream);
}

}  // namespace pinflow::detail::cuda
