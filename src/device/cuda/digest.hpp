#pragma once

#include <cstdint>

/// The digest's kernels as pointers for cudaLaunchKernel: see digest.cu.
namespace pinflow::detail::cuda {

/// One array of some samples, cut into parts for the kernel.
struct digest_rows {
    const unsigned char* rows = nullptr;  ///< row_count rows, contiguous, with any alignment
    std::uint64_t row_size_bytes = 0;
    std::uint64_t row_count = 0;
    std::uint64_t part_bytes = 0;  ///< read by a warp at a time; a multiple of 16
    std::uint64_t parts = 1;       ///< parts of a row; at least 1
};

/// The arrays of some samples, for the kernel that takes whole samples.
struct digest_sample {
    static constexpr unsigned max_arrays = 8;

    struct array {
        const unsigned char* rows = nullptr;  ///< contiguous, with any alignment
        std::uint64_t row_size_bytes = 0;
    };
    array arrays[max_arrays] = {};
    unsigned array_count = 0;
};

/// Threads per block, for all kernels.
inline constexpr unsigned digest_threads = 256;
/// Of samples that digest_whole_samples does not take, rows up to this size are read by one thread, larger
/// rows by warps.
inline constexpr std::uint64_t digest_thread_row_bytes = 32;

/// Samples up to the first size are read by a warp, samples up to the second size by a block.
inline constexpr std::uint64_t digest_warp_sample_bytes = 1 << 10;
inline constexpr std::uint64_t digest_block_sample_bytes = 1 << 20;

/// kernel(digest_sample, std::uint64_t row_count, unsigned long long* sum): adds the samples to *sum, in one
/// launch. `by_block`: each block reads a sample at a time; otherwise each warp does.
const void* digest_whole_samples(bool by_block);
/// For larger samples and more arrays: kernel(digest_rows, unsigned long long* hashes): stores H(row) of
/// every row. Each thread reads a row.
const void* digest_rows_by_thread();
/// The same with a warp for each part. If rows have several parts, it adds to `hashes`, which must be zero.
const void* digest_rows_by_warp();
/// kernel(const unsigned long long* hashes, std::uint64_t arrays, std::uint64_t row_count, unsigned long
/// long* sum): adds the samples to *sum. The hashes of array a begin at a * row_count.
const void* digest_samples();

}  // namespace pinflow::detail::cuda
