#include "src/device/cuda/digest_kernels.hpp"

#include <algorithm>

#include "src/device/cuda/blocks_for.hpp"
#include "src/device/cuda/digest.hpp"

namespace pinflow::detail::cuda {

namespace {

constexpr std::uint64_t warps_of_block = digest_threads / 32;

unsigned digest_blocks(std::uint64_t units, std::uint64_t units_of_block,
                       const digest_device& device) noexcept {
    return blocks_for(units, units_of_block, std::uint64_t{device.multiprocessors} * 32);
}

/// Adds the digest with one launch, because for small batches a launch costs as much as everything else.
cudaError_t add_at_once(std::span<const digest_array> arrays, std::uint64_t sample_bytes,
                        std::uint64_t row_count, std::uint64_t* sum, const digest_device& device,
                        cudaStream_t stream) noexcept {
    digest_sample work;
    for (const digest_array& array : arrays) {
        work.arrays[work.array_count++] = {reinterpret_cast<const unsigned char*>(array.rows),
                                           array.row_size_bytes};
    }
    const bool by_block = sample_bytes > digest_warp_sample_bytes;
    void* arguments[] = {&work, &row_count, &sum};
    return launch(digest_whole_samples(by_block),
                  digest_blocks(row_count, by_block ? 1 : warps_of_block, device), digest_threads, arguments,
                  stream);
}

cudaError_t hash_rows(const digest_array& array, std::uint64_t first, std::uint64_t rows,
                      unsigned long long* hashes, const digest_device& device, cudaStream_t stream) noexcept {
    digest_rows work;
    work.rows = reinterpret_cast<const unsigned char*>(array.rows) + first * array.row_size_bytes;
    work.row_size_bytes = array.row_size_bytes;
    work.row_count = rows;
    void* arguments[] = {&work, &hashes};
    if (array.row_size_bytes <= digest_thread_row_bytes) {
        return launch(digest_rows_by_thread(), digest_blocks(rows, digest_threads, device), digest_threads,
                      arguments, stream);
    }
    // parts are small enough for a batch to occupy every SM, and large enough to need few atomics
    constexpr std::uint64_t min_part_bytes = 4096;
    constexpr std::uint64_t max_part_bytes = 65536;
    const std::uint64_t even = rows * array.row_size_bytes / (std::uint64_t{device.multiprocessors} * 64);
    work.part_bytes = std::clamp(even / 16 * 16, min_part_bytes, max_part_bytes);
    work.parts = (array.row_size_bytes + work.part_bytes - 1) / work.part_bytes;
    if (work.parts > 1) {
        const cudaError_t status = fill_zero(hashes, rows * sizeof(std::uint64_t), stream);
        if (status != cudaSuccess) return status;
    }
    return launch(digest_rows_by_warp(), digest_blocks(rows * work.parts, warps_of_block, device),
                  digest_threads, arguments, stream);
}

/// Adds the samples of rows first ... first + rows - 1 to *sum. The rows' hashes are written to scratch
/// memory first.
cudaError_t add_by_hashes(std::span<const digest_array> arrays, std::uint64_t first, std::uint64_t rows,
                          std::uint64_t* sum, const digest_device& device, cudaStream_t stream) noexcept {
    const std::uint64_t hashes_bytes =
        std::max<std::uint64_t>(arrays.size() * rows, 1) * sizeof(std::uint64_t);
    void* scratch = nullptr;
    cudaError_t status = allocate(scratch, hashes_bytes, device.pool, stream);
    if (status != cudaSuccess) return status;
    auto* const hashes = static_cast<unsigned long long*>(scratch);
    for (std::size_t i = 0; i < arrays.size() && status == cudaSuccess; ++i)
        status = hash_rows(arrays[i], first, rows, hashes + i * rows, device, stream);
    if (status == cudaSuccess) {
        std::uint64_t array_count = arrays.size();
        void* arguments[] = {&scratch, &array_count, &rows, &sum};
        status = launch(digest_samples(), digest_blocks(rows, digest_threads, device), digest_threads,
                        arguments, stream);
    }
    const cudaError_t freed = free(scratch, stream);
    return status == cudaSuccess ? freed : status;
}

}  // namespace

cudaError_t add_digest(std::span<const digest_array> arrays, std::uint64_t row_count, std::uint64_t* sum,
                       const digest_device& device, cudaStream_t stream) noexcept {
    std::uint64_t sample_bytes = 0;
    for (const digest_array& array : arrays)
        sample_bytes += array.row_size_bytes;
    if (arrays.size() <= digest_sample::max_arrays && sample_bytes <= digest_block_sample_bytes)
        return add_at_once(arrays, sample_bytes, row_count, sum, device, stream);
    // in chunks, so that the hashes of many rows take little memory
    constexpr std::uint64_t max_hashes = std::uint64_t{1} << 21;
    const std::uint64_t chunk_rows =
        std::max(max_hashes / std::max<std::uint64_t>(arrays.size(), 1), std::uint64_t{1});
    for (std::uint64_t first = 0; first < row_count; first += chunk_rows) {
        const std::uint64_t rows = std::min(chunk_rows, row_count - first);
        if (const cudaError_t status = add_by_hashes(arrays, first, rows, sum, device, stream);
            status != cudaSuccess)
            return status;
    }
    return cudaSuccess;
}

}  // namespace pinflow::detail::cuda
