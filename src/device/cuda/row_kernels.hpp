#pragma once

#include <cstdint>

#include "src/device/cuda/api.hpp"
#include "src/device/cuda/rows.hpp"
#include "src/device/row_work.hpp"

namespace pinflow::detail::cuda {

/// Launches the kernels of rows.hpp and sorts indices, on one device. The device's context must be current.
class row_kernels {
 public:
    /// Scratch memory is allocated from `pool`, in stream order.
    row_kernels(cudaMemPool_t pool, unsigned multiprocessors) noexcept
        : pool_(pool), multiprocessors_(multiprocessors) {}

    /// Loads all kernels and waits for `stream`. Must be called before the other functions.
    cudaError_t load(cudaStream_t stream) noexcept;
    cudaError_t check_rows(const std::uint64_t* ids, std::uint64_t count, std::uint64_t row_count,
                           index_errors* errors, cudaStream_t stream) const noexcept;
    cudaError_t sort_rows(const std::uint64_t* ids, std::uint64_t count, std::uint64_t row_count,
                          std::uint64_t* sorted_ids, std::uint32_t* positions,
                          cudaStream_t stream) const noexcept;
    cudaError_t refuse_repeated_rows(const row_order& order, index_errors* errors,
                                     cudaStream_t stream) const noexcept;
    cudaError_t record_wrong_ids(const std::uint64_t* ids, index_errors* errors,
                                 cudaStream_t stream) const noexcept;
    cudaError_t gather_rows(const row_transfer& transfer, cudaStream_t stream) const noexcept;
    cudaError_t gather_held(const held_gather& gather, cudaStream_t stream) const noexcept;
    cudaError_t repeat_rows(const row_transfer& transfer, cudaStream_t stream) const noexcept;
    cudaError_t scatter_rows(const row_transfer& transfer, repeated_rows repeated, sum_type type,
                             cudaStream_t stream) const noexcept;

 private:
    unsigned blocks_for(std::uint64_t threads, unsigned block_threads = row_threads) const noexcept;
    /// `pairs`: launch the blocks in pairs if their number is even.
    cudaError_t launch_moving(const void* kernel, unsigned threads, bool pairs, const row_transfer& transfer,
                              cudaStream_t stream) const noexcept;

    cudaMemPool_t pool_;
    unsigned multiprocessors_;
    bool gathers_in_pairs_ = false;
};

}  // namespace pinflow::detail::cuda
