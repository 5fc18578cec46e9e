#pragma once

#include <cstdint>

#include "src/device/cuda/api.hpp"
#include "src/device/cuda/rows.hpp"
#include "src/device/row_work.hpp"

namespace pinflow::detail::cuda {

/// Launches the kernels of rows.hpp, held_rows.hpp and sort_rows.hpp on one device, whose context must be
/// current.
class row_kernels {
 public:
    explicit row_kernels(unsigned multiprocessors) noexcept : multiprocessors_(multiprocessors) {}

    /// Loads all kernels, with memory of `pool`, and waits for `stream`. Must be called before the other
    /// functions, except before sort_scratch_bytes.
    cudaError_t load(cudaMemPool_t pool, cudaStream_t stream) noexcept;
    cudaError_t check_rows(const std::uint64_t* ids, std::uint64_t count, std::uint64_t row_count,
                           const error_memory& errors, cudaStream_t stream) const noexcept;
    static cudaError_t sort_scratch_bytes(std::uint64_t& size_bytes, std::uint64_t count,
                                          std::uint64_t row_count, sort_kernels kernels) noexcept;
    cudaError_t sort_rows(const row_sort& sort, cudaStream_t stream) const noexcept;
    cudaError_t refuse_repeated_rows(const row_order& order, const std::uint64_t* ids,
                                     const error_memory& errors, cudaStream_t stream) const noexcept;
    cudaError_t gather_rows(const row_transfer& transfer, cudaStream_t stream) const noexcept;
    cudaError_t gather_held(const held_gather& gather, cudaStream_t stream) const noexcept;
    cudaError_t repeat_rows(const row_transfer& transfer, cudaStream_t stream) const noexcept;
    cudaError_t scatter_rows(const row_transfer& transfer, repeated_rows repeated, sum_type type,
                             cudaStream_t stream) const noexcept;

 private:
    unsigned blocks_for(std::uint64_t threads, unsigned block_threads = row_threads) const noexcept;
    /// A launch of the kernel that moves the rows of `transfer` with blocks of `threads`.
    struct moving_launch {
        row_launch work;
        unsigned blocks = 0;
        bool is_in_pieces = false;
    };
    moving_launch moving(const row_transfer& transfer, unsigned threads) const noexcept;

    cudaError_t load_sort(std::uint64_t count, sort_kernels kernels, cudaMemPool_t pool,
                          cudaStream_t stream) const noexcept;
    cudaError_t sort_by_one(const row_sort& sort, cudaStream_t stream) const noexcept;
    cudaError_t sort_by_several(const row_sort& sort, cudaStream_t stream) const noexcept;

    unsigned multiprocessors_;
    unsigned sort_blocks_ = 0;  ///< of a sort by one kernel: no more than can be resident
    bool gathers_in_pairs_ = false;
};

}  // namespace pinflow::detail::cuda
