#include "src/device/cuda/row_kernels.hpp"

#include <algorithm>
#include <bit>
#include <span>

#include "src/device/cuda/held_rows.hpp"

namespace pinflow::detail::cuda {

namespace {

/// The most blocks of kernels that use device memory only. This many are faster than the link, and leave room
/// for other kernels.
constexpr unsigned max_local_blocks = 64;

/// Threads that move one row.
unsigned lanes_for(std::uint64_t row_size_bytes) noexcept {
    constexpr std::uint64_t word_bytes = 16;
    constexpr std::uint64_t max_lanes = 32;  // a warp
    return static_cast<unsigned>(
        std::min(std::bit_ceil((row_size_bytes + word_bytes - 1) / word_bytes), max_lanes));
}

}  // namespace

unsigned row_kernels::blocks_for(std::uint64_t threads, unsigned block_threads) const noexcept {
    const std::uint64_t needed = (threads + block_threads - 1) / block_threads;
    // no more than a few waves: the kernels loop over the rest
    return static_cast<unsigned>(std::clamp<std::uint64_t>(needed, 1, std::uint64_t{multiprocessors_} * 16));
}

cudaError_t row_kernels::load(cudaStream_t stream) noexcept {
    for (const void* const kernel :
         {cuda::check_rows(), number_rows(), cuda::refuse_repeated_rows(), cuda::record_wrong_ids(),
          cuda::gather_rows(true), cuda::gather_rows(false), cuda::gather_held(), cuda::repeat_rows(true),
          cuda::repeat_rows(false), cuda::scatter_rows(true), cuda::scatter_rows(false),
          scatter_sums(sum_type::float16), scatter_sums(sum_type::bfloat16), scatter_sums(sum_type::float32),
          scatter_sums(sum_type::float64), scatter_sums(sum_type::int32), scatter_sums(sum_type::int64)}) {
        if (const cudaError_t status = kernel_runs(kernel); status != cudaSuccess) return status;
    }
    gathers_in_pairs_ = runs_in_pairs(cuda::gather_rows(true), gather_threads(true));
    // loads the kernels of the sort: short and long lists use different ones
    for (const std::uint64_t count : {std::uint64_t{1}, std::uint64_t{1} << 17}) {
        const std::uint64_t ids_bytes = count * sizeof(std::uint64_t);
        void* memory = nullptr;
        cudaError_t status = allocate(memory, 2 * ids_bytes + count * sizeof(std::uint32_t), pool_, stream);
        if (status != cudaSuccess) return status;
        auto* const ids = static_cast<std::uint64_t*>(memory);
        status = fill_zero(ids, ids_bytes, stream);
        if (status == cudaSuccess) {
            status = sort_rows(ids, count, ~std::uint64_t{0}, ids + count,
                               reinterpret_cast<std::uint32_t*>(ids + 2 * count), stream);
        }
        const cudaError_t freed = free(memory, stream);
        if (status == cudaSuccess) status = freed;
        if (status != cudaSuccess) return status;
    }
    return synchronize_stream(stream);
}

cudaError_t row_kernels::check_rows(const std::uint64_t* ids, std::uint64_t count, std::uint64_t row_count,
                                    index_errors* errors, cudaStream_t stream) const noexcept {
    void* arguments[] = {&ids, &count, &row_count, &errors};
    return launch(cuda::check_rows(), blocks_for(count), row_threads, arguments, stream);
}

cudaError_t row_kernels::sort_rows(const std::uint64_t* ids, std::uint64_t count, std::uint64_t row_count,
                                   std::uint64_t* sorted_ids, std::uint32_t* positions,
                                   cudaStream_t stream) const noexcept {
    // too large indices are errors, so their position in the order does not matter
    const int bits = std::max(1, static_cast<int>(std::bit_width(row_count)));
    std::size_t scratch_bytes = 0;
    cudaError_t status =
        sort_ids(nullptr, scratch_bytes, ids, sorted_ids, positions, positions, count, bits, stream);
    if (status != cudaSuccess) return status;
    const std::size_t numbers_bytes = (count * sizeof(std::uint32_t) + 255) / 256 * 256;
    void* scratch = nullptr;
    status = allocate(scratch, numbers_bytes + std::max<std::size_t>(scratch_bytes, 1), pool_, stream);
    if (status != cudaSuccess) return status;
    auto* numbers = static_cast<std::uint32_t*>(scratch);
    void* arguments[] = {static_cast<void*>(&numbers), &count};
    status = launch(number_rows(), blocks_for(count), row_threads, arguments, stream);
    if (status == cudaSuccess) {
        status = sort_ids(static_cast<std::byte*>(scratch) + numbers_bytes, scratch_bytes, ids, sorted_ids,
                          numbers, positions, count, bits, stream);
    }
    const cudaError_t freed = free(scratch, stream);
    return status == cudaSuccess ? freed : status;
}

cudaError_t row_kernels::refuse_repeated_rows(const row_order& order, index_errors* errors,
                                              cudaStream_t stream) const noexcept {
    row_order copy = order;
    void* arguments[] = {&copy, &errors};
    return launch(cuda::refuse_repeated_rows(), blocks_for(order.count), row_threads, arguments, stream);
}

cudaError_t row_kernels::record_wrong_ids(const std::uint64_t* ids, index_errors* errors,
                                          cudaStream_t stream) const noexcept {
    void* arguments[] = {&ids, &errors};
    return launch(cuda::record_wrong_ids(), 1, 1, arguments, stream);
}

cudaError_t row_kernels::launch_moving(const void* kernel, unsigned threads, bool pairs,
                                       const row_transfer& transfer, cudaStream_t stream) const noexcept {
    row_launch work{transfer, lanes_for(transfer.table.row_size_bytes)};
    const unsigned max_blocks = blocks_for((transfer.end - transfer.begin) * work.lanes, threads);
    const unsigned blocks = transfer.blocks == 0 ? max_blocks : std::min(max_blocks, transfer.blocks);
    void* arguments[] = {&work};
    return pairs && blocks % 2 == 0 ? launch_pairs(kernel, blocks, threads, arguments, stream)
                                    : launch(kernel, blocks, threads, arguments, stream);
}

cudaError_t row_kernels::gather_rows(const row_transfer& transfer, cudaStream_t stream) const noexcept {
    const bool aligned = is_aligned(transfer);
    // A consumer's kernel may use clusters, which need pairs of free SMs. Blocks launched in pairs leave more
    // of these pairs free (measured: samples/bench/RESULTS.md). Transfers with blocks == 0 stay within device
    // memory and take the whole device for a moment, so they are not paired.
    const bool pairs = gathers_in_pairs_ && aligned && transfer.blocks != 0;
    return launch_moving(cuda::gather_rows(aligned), gather_threads(aligned), pairs, transfer, stream);
}

cudaError_t row_kernels::gather_held(const held_gather& gather, cudaStream_t stream) const noexcept {
    std::uint64_t max_bytes = 0;  // bytes of the largest table's rows
    for (const held_table& table : std::span(gather.tables, gather.table_count))
        max_bytes = std::max(max_bytes, gather.count * table.row_size_bytes);
    constexpr std::uint64_t bytes_of_thread = 16;
    const unsigned blocks = std::min(blocks_for(max_bytes / bytes_of_thread, held_threads), max_local_blocks);
    held_gather work = gather;
    void* arguments[] = {&work};
    return launch(cuda::gather_held(), dim3(blocks, gather.table_count), held_threads, arguments, stream);
}

cudaError_t row_kernels::repeat_rows(const row_transfer& transfer, cudaStream_t stream) const noexcept {
    row_launch work{transfer, lanes_for(transfer.table.row_size_bytes)};
    const unsigned max_blocks = blocks_for((transfer.end - transfer.begin) * work.lanes);
    const unsigned blocks = std::min(max_blocks, max_local_blocks);
    void* arguments[] = {&work};
    return launch(cuda::repeat_rows(is_aligned(transfer)), blocks, row_threads, arguments, stream);
}

cudaError_t row_kernels::scatter_rows(const row_transfer& transfer, repeated_rows repeated, sum_type type,
                                      cudaStream_t stream) const noexcept {
    const void* const kernel =
        repeated == repeated_rows::sum ? scatter_sums(type) : cuda::scatter_rows(is_aligned(transfer));
    return launch_moving(kernel, row_threads, false, transfer, stream);
}

}  // namespace pinflow::detail::cuda
