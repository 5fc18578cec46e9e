#pragma once

#include <cstdint>

/// The digest's kernels, in the form that cudaLaunchKernel takes them: see digest.cu.
namespace pinflow::detail::cuda {

/// One array of some samples, cut into parts for the kernel.
struct digest_rows {
    const unsigned char* rows = nullptr;  ///< row_count rows, one after the other, with any alignment
    std::uint64_t row_size_bytes = 0;
    std::uint64_t row_count = 0;
    std::uint64_t part_bytes = 0;  ///< a multiple of 16; what one group of threads reads at a time
    std::uint64_t parts = 1;       ///< parts of a row; at least 1
};

/// The arrays of some samples, for the kernel that takes whole samples.
struct digest_sample {
    static constexpr unsigned max_arrays = 8;

    struct array {
        const unsigned char* rows = nullptr;  ///< one after the other, with any alignment
        std::uint64_t row_size_bytes = 0;
    };
    array arrays[max_arrays] = {};
    unsigned array_count = 0;
};

/// Threads in a block of each of the kernels.
inline constexpr unsigned digest_threads = 256;
/// Up to this many bytes a row is read by one thread, above by warps.
inline constexpr std::uint64_t digest_thread_row_bytes = 32;

/// Up to this many bytes a sample is read by a warp, up to so many by a block.
inline constexpr std::uint64_t digest_warp_sample_bytes = 1 << 10;
inline constexpr std::uint64_t digest_block_sample_bytes = 1 << 20;

/// kernel(digest_sample, std::uint64_t row_count, unsigned long long* sum): adds the samples to *sum, in one
/// launch. A block takes a sample at a time, or each of its warps does.
const void* digest_whole_samples(bool by_block);
/// For larger samples, and more arrays: kernel(digest_rows, unsigned long long* hashes): H(row) of every row,
/// a thread a row; stores.
const void* digest_rows_by_thread();
/// The same, a warp for each part: stores when a row is one part, otherwise adds to `hashes`, which must be
/// zero.
const void* digest_rows_by_warp();
/// kernel(const unsigned long long* hashes, std::uint64_t arrays, std::uint64_t row_count, unsigned long
/// long* sum): adds the samples to *sum; the hashes of array a begin at a * row_count.
const void* digest_samples();

}  // namespace pinflow::detail::cuda
