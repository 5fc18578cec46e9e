#include "src/device/cuda/row_kernels.hpp"

#include <algorithm>
#include <bit>
#include <span>

#include "src/core/checked.hpp"
#include "src/device/cuda/blocks_for.hpp"
#include "src/device/cuda/held_rows.hpp"
#include "src/device/cuda/sort_rows.hpp"

namespace pinflow::detail::cuda {

namespace {

/// The maximum number of blocks of a kernel that checks indices or repeats rows, and of a held gather for
/// each of its tables. This many are faster than the link, and leave room for other kernels.
constexpr unsigned max_local_blocks = 64;

/// Threads that move one row.
unsigned lanes_for(std::uint64_t row_size_bytes) noexcept {
    constexpr std::uint64_t word_bytes = 16;
    constexpr std::uint64_t max_lanes = 32;  // a warp
    return static_cast<unsigned>(
        std::min(std::bit_ceil((row_size_bytes + word_bytes - 1) / word_bytes), max_lanes));
}

/// If a call has fewer rows than this many times those that its threads can have in flight, long rows are
/// moved in pieces, by several groups of threads. With one row for each group, and a few left for the next
/// turn, most groups would wait for the last ones.
constexpr std::uint64_t min_waves = 8;
constexpr std::uint64_t min_piece_bytes = 1024;  ///< rows up to this size are moved whole
/// The size of pieces is a multiple of it: what a group moves at a time.
constexpr std::uint64_t piece_alignment = 512;

/// The maximum number of blocks of a sort by one kernel. If no block has more than one tile of indices, the
/// kernel is as fast as CUB. With two tiles a block, CUB is faster by a third to a half (an H200).
constexpr unsigned max_sort_blocks = 64;
constexpr std::uint64_t max_short_list = std::uint64_t{max_sort_blocks} * ids_of_sort_tile;

/// The bits that a sort compares: enough for every index of the table.
int bits_of(std::uint64_t row_count) noexcept {
    return std::max(1, static_cast<int>(std::bit_width(row_count - std::min<std::uint64_t>(row_count, 1))));
}

std::uint64_t aligned(std::uint64_t size_bytes) noexcept {
    return rounded_up(size_bytes, 256);
}

bool by_one_kernel(std::uint64_t count, sort_kernels kernels) noexcept {
    return kernels == sort_kernels::one && count <= max_short_list;
}

/// The first part of the scratch memory of a sort by one kernel: a second list of indices.
std::uint64_t other_ids_bytes(std::uint64_t count) noexcept {
    return aligned(count * sizeof(std::uint64_t));
}

/// The first part of the scratch memory of CUB's sort: the numbers 0, 1, 2, ...
std::uint64_t numbers_bytes(std::uint64_t count) noexcept {
    return aligned(count * sizeof(std::uint32_t));
}

/// How a kernel with this number of rows in flight keeps pace. Kernels of fewer rows, and those that stay
/// within device memory, do not. The limits were measured on an H200: samples/bench/NOTEBOOK.md, "gathers and
/// scatters at the same time".
row_pace pace_of(const row_transfer& transfer, unsigned lanes, std::uint64_t rows_in_flight) noexcept {
    const bool stays_on_device = transfer.blocks == 0;
    const bool is_ascending = transfer.order.sorted || transfer.is_ascending;
    if (!is_ascending || transfer.table.by_address || stays_on_device) return {};
    constexpr std::uint64_t min_turns = 16;
    const std::uint64_t gather_rows = std::uint64_t{8} * gather_threads(true) / lanes * rows_at_once;
    const std::uint64_t min_rows = min_turns * gather_rows;
    if (transfer.end - transfer.begin < min_rows) return {};
    // each time about as long as the rows in flight take at 50 GB/s
    constexpr std::uint64_t bytes_of_ns = 50;
    const std::uint64_t max_ns = rows_in_flight * transfer.table.row_size_bytes / bytes_of_ns;
    // A kernel publishes where its first block is. With less than half of a gather's rows in flight as the
    // lead, both could wait for each other.
    return {min_rows, std::max(gather_rows, rows_in_flight) / 2,
            transfer.table.row_count * transfer.table.row_size_bytes,
            static_cast<unsigned>(max_ns / row_pace::nap_ns + 1)};
}

}  // namespace

unsigned row_kernels::blocks_for(std::uint64_t threads, unsigned block_threads) const noexcept {
    return cuda::blocks_for(threads, block_threads, std::uint64_t{multiprocessors_} * 16);
}

cudaError_t row_kernels::load(cudaMemPool_t pool, cudaStream_t stream) noexcept {
    for (const void* const kernel : {cuda::check_rows(),
                                     number_rows(),
                                     cuda::sort_rows(),
                                     cuda::refuse_repeated_rows(),
                                     cuda::gather_rows(true, false),
                                     cuda::gather_rows(false, false),
                                     cuda::gather_rows(true, true),
                                     cuda::gather_rows(false, true),
                                     cuda::gather_held(),
                                     cuda::repeat_rows(true),
                                     cuda::repeat_rows(false),
                                     cuda::scatter_rows(true, false),
                                     cuda::scatter_rows(false, false),
                                     cuda::scatter_rows(true, true),
                                     cuda::scatter_rows(false, true),
                                     scatter_sums(sum_type::float16),
                                     scatter_sums(sum_type::bfloat16),
                                     scatter_sums(sum_type::float32),
                                     scatter_sums(sum_type::float64),
                                     scatter_sums(sum_type::int32),
                                     scatter_sums(sum_type::int64)}) {
        if (const cudaError_t status = load_kernel(kernel); status != cudaSuccess) return status;
    }
    gathers_in_pairs_ = runs_in_pairs(cuda::gather_rows(true, false), gather_threads(true)) &&
                        runs_in_pairs(cuda::gather_rows(true, true), gather_threads(true));
    int sorting = 0;
    const cudaError_t status = resident_blocks(sorting, cuda::sort_rows(), sort_threads);
    if (status != cudaSuccess) return status;
    // half of the device at most, so that a sort can begin beside other kernels
    sort_blocks_ = std::clamp(static_cast<unsigned>(sorting) * multiprocessors_ / 2, 1U, max_sort_blocks);
    cudaError_t sorted = load_sort(1, sort_kernels::one, pool, stream);
    // CUB has a kernel of its own for few indices
    for (const std::uint64_t count : {std::uint64_t{1}, max_short_list}) {
        if (sorted == cudaSuccess) sorted = load_sort(count, sort_kernels::several, pool, stream);
    }
    if (sorted != cudaSuccess) return sorted;
    return synchronize_stream(stream);
}

/// Enqueues a sort of `count` indices, so that CUDA loads its kernels, and what a cooperative launch needs.
cudaError_t row_kernels::load_sort(std::uint64_t count, sort_kernels kernels, cudaMemPool_t pool,
                                   cudaStream_t stream) const noexcept {
    row_sort sort;
    sort.count = count;
    sort.row_count = ~std::uint64_t{0};
    sort.kernels = kernels;
    const std::uint64_t lists_bytes = aligned(3 * sort.count * sizeof(std::uint64_t));
    void* memory = nullptr;
    cudaError_t status = sort_scratch_bytes(sort.scratch_bytes, sort.count, sort.row_count, kernels);
    if (status == cudaSuccess) status = allocate(memory, lists_bytes + sort.scratch_bytes, pool, stream);
    if (status != cudaSuccess) return status;
    auto* const ids = static_cast<std::uint64_t*>(memory);
    sort.ids = ids;
    sort.sorted_ids = ids + sort.count;
    sort.positions = reinterpret_cast<std::uint32_t*>(ids + 2 * sort.count);
    sort.scratch = static_cast<std::byte*>(memory) + lists_bytes;
    status = fill_zero(ids, sort.count * sizeof(std::uint64_t), stream);
    if (status == cudaSuccess) status = sort_rows(sort, stream);
    const cudaError_t freed = free(memory, stream);
    return status == cudaSuccess ? freed : status;
}

cudaError_t row_kernels::check_rows(const std::uint64_t* ids, std::uint64_t count, std::uint64_t row_count,
                                    const error_memory& errors, cudaStream_t stream) const noexcept {
    error_memory copy = errors;
    void* arguments[] = {&ids, &count, &row_count, &copy};
    return launch(cuda::check_rows(), std::min(blocks_for(count), max_local_blocks), row_threads, arguments,
                  stream);
}

cudaError_t row_kernels::sort_scratch_bytes(std::uint64_t& size_bytes, std::uint64_t count,
                                            std::uint64_t row_count, sort_kernels kernels) noexcept {
    size_bytes = 0;
    if (kernels == sort_kernels::one) {
        // a longer list may take less with CUB, but the memory must also do for shorter ones
        const std::uint64_t short_count = std::min(count, max_short_list);
        size_bytes = other_ids_bytes(short_count) + aligned(short_count * sizeof(std::uint32_t)) +
                     sizeof(std::uint32_t) * sort_digits * max_sort_blocks;
        if (count <= max_short_list) return cudaSuccess;
    }
    std::size_t sort_bytes = 0;
    const cudaError_t status =
        sort_ids(nullptr, sort_bytes, nullptr, nullptr, nullptr, nullptr, count, bits_of(row_count), nullptr);
    size_bytes = std::max(size_bytes, numbers_bytes(count) + sort_bytes);
    return status;
}

cudaError_t row_kernels::sort_rows(const row_sort& sort, cudaStream_t stream) const noexcept {
    return by_one_kernel(sort.count, sort.kernels) ? sort_by_one(sort, stream)
                                                   : sort_by_several(sort, stream);
}

/// Sorts with one kernel, which also checks the indices.
cudaError_t row_kernels::sort_by_one(const row_sort& sort, cudaStream_t stream) const noexcept {
    std::byte* const positions = sort.scratch + other_ids_bytes(sort.count);
    std::byte* const counts = positions + aligned(sort.count * sizeof(std::uint32_t));
    sort_launch work{sort, bits_of(sort.row_count), reinterpret_cast<std::uint64_t*>(sort.scratch),
                     reinterpret_cast<std::uint32_t*>(positions), reinterpret_cast<std::uint32_t*>(counts)};
    const std::uint64_t tiles = (sort.count + ids_of_sort_tile - 1) / ids_of_sort_tile;
    auto blocks = static_cast<unsigned>(std::min<std::uint64_t>(tiles, sort_blocks_));
    void* arguments[] = {&work};
    for (;;) {
        const cudaError_t status =
            launch_together(cuda::sort_rows(), blocks, sort_threads, arguments, stream);
        // a caller's stream may have only some of the multiprocessors
        if (status != cudaErrorCooperativeLaunchTooLarge || blocks == 1) return status;
        blocks /= 2;
    }
}

/// Sorts with CUB, in several kernels.
cudaError_t row_kernels::sort_by_several(const row_sort& sort, cudaStream_t stream) const noexcept {
    if (sort.errors.found != nullptr) {
        const cudaError_t status = check_rows(sort.ids, sort.count, sort.row_count, sort.errors, stream);
        if (status != cudaSuccess) return status;
    }
    auto* numbers = reinterpret_cast<std::uint32_t*>(sort.scratch);
    std::uint64_t count = sort.count;
    void* arguments[] = {static_cast<void*>(&numbers), &count};
    const cudaError_t status = launch(number_rows(), blocks_for(count), row_threads, arguments, stream);
    if (status != cudaSuccess) return status;
    std::size_t sort_bytes = sort.scratch_bytes - numbers_bytes(count);
    return sort_ids(sort.scratch + numbers_bytes(count), sort_bytes, sort.ids, sort.sorted_ids, numbers,
                    sort.positions, count, bits_of(sort.row_count), stream);
}

cudaError_t row_kernels::refuse_repeated_rows(const row_order& order, const std::uint64_t* ids,
                                              const error_memory& errors,
                                              cudaStream_t stream) const noexcept {
    row_order order_copy = order;
    error_memory errors_copy = errors;
    void* arguments[] = {&order_copy, &ids, &errors_copy};
    return launch(cuda::refuse_repeated_rows(), std::min(blocks_for(order.count), max_local_blocks),
                  row_threads, arguments, stream);
}

row_kernels::moving_launch row_kernels::moving(const row_transfer& transfer,
                                               unsigned threads) const noexcept {
    moving_launch made{.work = {transfer, lanes_for(transfer.table.row_size_bytes), {}}};
    row_launch& work = made.work;
    const std::uint64_t count = transfer.end - transfer.begin;
    const std::uint64_t row_bytes = transfer.table.row_size_bytes;
    if (transfer.blocks != 0 && row_bytes > min_piece_bytes) {
        const std::uint64_t rows_in_flight =
            std::uint64_t{transfer.blocks} * threads / work.lanes * rows_at_once;
        const std::uint64_t pieces =
            std::max<std::uint64_t>(min_waves * rows_in_flight / std::max<std::uint64_t>(count, 1), 1);
        work.piece_bytes = rounded_up(std::max(row_bytes / pieces, min_piece_bytes), piece_alignment);
        work.pieces_of_row = static_cast<unsigned>((row_bytes - 1) / work.piece_bytes + 1);
        made.is_in_pieces = work.pieces_of_row > 1;
    }
    const unsigned max_blocks = blocks_for(count * work.pieces_of_row * work.lanes, threads);
    made.blocks = transfer.blocks == 0 ? max_blocks : std::min(max_blocks, transfer.blocks);
    if (!made.is_in_pieces)
        work.pace =
            pace_of(transfer, work.lanes, std::uint64_t{made.blocks} * threads / work.lanes * rows_at_once);
    return made;
}

cudaError_t row_kernels::gather_rows(const row_transfer& transfer, cudaStream_t stream) const noexcept {
    const bool aligned = is_aligned(transfer);
    // A consumer's kernel may use clusters, which need pairs of free SMs. Blocks launched in pairs leave more
    // of these pairs free (measured: samples/bench/RESULTS.md). Transfers with blocks == 0 stay within device
    // memory and take the whole device for a moment, so they are not paired.
    const bool pairs = gathers_in_pairs_ && aligned && transfer.blocks != 0;
    const unsigned threads = gather_threads(aligned);
    moving_launch made = moving(transfer, threads);
    const void* const kernel = cuda::gather_rows(aligned, made.is_in_pieces);
    void* arguments[] = {&made.work};
    return pairs && made.blocks % 2 == 0 ? launch_pairs(kernel, made.blocks, threads, arguments, stream)
                                         : launch(kernel, made.blocks, threads, arguments, stream);
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
    row_launch work{transfer, lanes_for(transfer.table.row_size_bytes), {}};
    const unsigned max_blocks = blocks_for((transfer.end - transfer.begin) * work.lanes);
    const unsigned blocks = std::min(max_blocks, max_local_blocks);
    void* arguments[] = {&work};
    return launch(cuda::repeat_rows(is_aligned(transfer)), blocks, row_threads, arguments, stream);
}

cudaError_t row_kernels::scatter_rows(const row_transfer& transfer, repeated_rows repeated, sum_type type,
                                      cudaStream_t stream) const noexcept {
    const bool sums = repeated == repeated_rows::sum;
    moving_launch made = moving(transfer, row_threads);
    const void* const kernel =
        sums ? scatter_sums(type) : cuda::scatter_rows(is_aligned(transfer), made.is_in_pieces);
    void* arguments[] = {&made.work};
    return launch(kernel, made.blocks, row_threads, arguments, stream);
}

}  // namespace pinflow::detail::cuda
