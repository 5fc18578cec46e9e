#include "src/device/cuda/sort_rows.hpp"

#include <cub/device/device_radix_sort.cuh>

namespace pinflow::detail::cuda {

cudaError_t sort_pairs(void* scratch, std::size_t& scratch_bytes, const std::uint64_t* ids,
                       std::uint64_t* sorted_ids, const std::uint32_t* positions,
                       std::uint32_t* sorted_positions, std::uint64_t count, int bits, cudaStream_t stream) {
    return cub::DeviceRadixSort::SortPairs(scratch, scratch_bytes, ids, sorted_ids, positions,
                                           sorted_positions, count, 0, bits, stream);
}

}  // namespace pinflow::detail::cuda
