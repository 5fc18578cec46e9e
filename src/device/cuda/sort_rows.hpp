#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "src/device/row_work.hpp"

/// Two ways to sort indices: with one kernel (sort_rows.cu), or with CUB, which launches several
/// (sort_by_cub.cu).
namespace pinflow::detail::cuda {

inline constexpr unsigned sort_threads = 512;  ///< per block
/// The indices that a block handles at a time.
inline constexpr unsigned ids_of_sort_tile = 4096;
inline constexpr unsigned sort_digit_bits = 8;
inline constexpr unsigned sort_digits = 1U << sort_digit_bits;

/// Arguments of the kernel, which splits its scratch memory into lists.
struct sort_launch {
    row_sort sort;
    int bits = 0;                              ///< how many of the lowest bits are compared; at least 1
    std::uint64_t* other_ids = nullptr;        ///< `sort.count` of them
    std::uint32_t* other_positions = nullptr;  ///< `sort.count` of them
    std::uint32_t* digit_counts = nullptr;     ///< sort_digits for each block
};

/// kernel(sort_launch): sorts a list, and checks its indices if `sort.errors` is given. Needs a cooperative
/// launch of blocks of sort_threads.
const void* sort_rows();

/// kernel(std::uint32_t* positions, std::uint64_t count): writes 0, 1, 2, ...
const void* number_rows();

/// Enqueues CUB's sort of a list of any length. If `scratch` is null, only `scratch_bytes` is set, to the
/// required size. Only the layer of api.hpp calls it.
cudaError_t sort_pairs(void* scratch, std::size_t& scratch_bytes, const std::uint64_t* ids,
                       std::uint64_t* sorted_ids, const std::uint32_t* positions,
                       std::uint32_t* sorted_positions, std::uint64_t count, int bits, cudaStream_t stream);

}  // namespace pinflow::detail::cuda
