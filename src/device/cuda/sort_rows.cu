#include <cooperative_groups.h>

#include <cub/block/block_scan.cuh>

#include "src/device/cuda/row_errors.cuh"
#include "src/device/cuda/sort_rows.hpp"

// A stable radix sort, digit by digit from the lowest. It is one kernel, whose blocks wait for each other.
// For lists of up to 262,144 indices, cub::DeviceRadixSort takes as long on the device, but makes nine
// CUDA calls. They cost the calling thread 35 to 50 us, and on the device, each kernel that they launch may
// have to wait for the end of another stream's kernel. The launch of this kernel costs 4 us.
namespace pinflow::detail::cuda {

namespace {

constexpr unsigned warp_threads = 32;
constexpr unsigned warps = sort_threads / warp_threads;
constexpr unsigned ids_of_thread = ids_of_sort_tile / sort_threads;
constexpr unsigned ids_of_warp = ids_of_sort_tile / warps;

using block_scan = cub::BlockScan<std::uint32_t, sort_threads>;

struct shared_memory {
    /// For each digit: the offset in the sorted list of the block's next index with this digit. While digits
    /// are counted: how many of the block's indices have it.
    std::uint32_t next[sort_digits];
    /// For each warp and digit: how many of the warp's indices of a tile have this digit. Then the offset in
    /// the sorted list of the first of them.
    std::uint32_t by_warp[warps][sort_digits];
    block_scan::TempStorage scan;
};

/// A list of indices with their positions.
struct id_list {
    std::uint64_t* ids;
    std::uint32_t* positions;  ///< null: the i-th index is at position i
};

/// One digit of all indices.
struct digit {
    int first_bit;
    std::uint64_t mask;

    __device__ unsigned of(std::uint64_t id) const { return static_cast<unsigned>((id >> first_bit) & mask); }
};

/// The indices begin ... end - 1, which a block sorts. Whole tiles, except at the end of the list.
struct block_part {
    std::uint64_t begin;
    std::uint64_t end;
};

__device__ block_part part_of_block(std::uint64_t count) {
    const std::uint64_t tiles = (count + ids_of_sort_tile - 1) / ids_of_sort_tile;
    const std::uint64_t tiles_of_block = (tiles + gridDim.x - 1) / gridDim.x;
    const std::uint64_t begin = blockIdx.x * tiles_of_block * ids_of_sort_tile;
    const std::uint64_t end = begin + tiles_of_block * ids_of_sort_tile;
    return {begin < count ? begin : count, end < count ? end : count};
}

/// Counts the digits of the block's indices. With `errors`, also counts the indices outside the table.
__device__ void count_digits(const sort_launch& work, const std::uint64_t* ids, digit digit,
                             error_count* errors, shared_memory& shared) {
    for (unsigned i = threadIdx.x; i < sort_digits; i += blockDim.x)
        shared.next[i] = 0;
    __syncthreads();
    const block_part part = part_of_block(work.sort.count);
#pragma unroll 4
    for (std::uint64_t i = part.begin + threadIdx.x; i < part.end; i += blockDim.x) {
        const std::uint64_t id = ids[i];
        if (errors != nullptr && id >= work.sort.row_count) add(*errors, i);
        atomicAdd(&shared.next[digit.of(id)], 1U);
    }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < sort_digits; i += blockDim.x)
        work.digit_counts[blockIdx.x * sort_digits + i] = shared.next[i];
}

/// Finds the offset of the block's first index with each digit: behind all lower digits, and behind the same
/// digit in the blocks before this one. All blocks must have counted.
__device__ void find_offsets(const sort_launch& work, shared_memory& shared) {
    static_assert(sort_digits <= sort_threads);
    std::uint32_t in_all = 0;
    std::uint32_t in_blocks_before = 0;
    if (threadIdx.x < sort_digits) {
#pragma unroll 8
        for (unsigned block = 0; block < gridDim.x; ++block) {
            const std::uint32_t found = work.digit_counts[block * sort_digits + threadIdx.x];
            in_all += found;
            in_blocks_before += block < blockIdx.x ? found : 0;
        }
    }
    std::uint32_t lower = 0;
    block_scan(shared.scan).ExclusiveSum(in_all, lower);
    if (threadIdx.x < sort_digits) shared.next[threadIdx.x] = lower + in_blocks_before;
}

/// Moves a tile of indices to the offsets of their digits. Each warp takes neighbouring indices, 32 at a
/// time.
__device__ void move_tile(std::uint64_t begin, std::uint64_t end, id_list from, id_list to, digit digit,
                          shared_memory& shared) {
    const unsigned warp = threadIdx.x / warp_threads;
    const unsigned lane = threadIdx.x % warp_threads;
    for (unsigned i = threadIdx.x; i < warps * sort_digits; i += blockDim.x)
        (&shared.by_warp[0][0])[i] = 0;
    const std::uint64_t first = begin + warp * ids_of_warp + lane;
    std::uint64_t ids[ids_of_thread];
    std::uint32_t positions[ids_of_thread];
    std::uint32_t ranks[ids_of_thread];  // among the warp's indices with the same digit
#pragma unroll
    for (unsigned k = 0; k < ids_of_thread; ++k) {
        const std::uint64_t i = first + k * warp_threads;
        ids[k] = i < end ? from.ids[i] : 0;
        positions[k] = static_cast<std::uint32_t>(i);
        if (from.positions != nullptr && i < end) positions[k] = from.positions[i];
    }
    __syncthreads();
#pragma unroll
    for (unsigned k = 0; k < ids_of_thread; ++k) {
        const bool is_there = first + k * warp_threads < end;
        const unsigned own = is_there ? digit.of(ids[k]) : sort_digits;
        const unsigned equal = __match_any_sync(~0U, own);
        const unsigned before = __popc(equal & ((1U << lane) - 1));
        ranks[k] = is_there ? shared.by_warp[warp][own] + before : 0;
        __syncwarp();
        if (is_there && before == 0) shared.by_warp[warp][own] += __popc(equal);
        __syncwarp();
    }
    __syncthreads();
    if (threadIdx.x < sort_digits) {
        std::uint32_t next = shared.next[threadIdx.x];
#pragma unroll
        for (unsigned i = 0; i < warps; ++i) {
            const std::uint32_t found = shared.by_warp[i][threadIdx.x];
            shared.by_warp[i][threadIdx.x] = next;
            next += found;
        }
        shared.next[threadIdx.x] = next;
    }
    __syncthreads();
#pragma unroll
    for (unsigned k = 0; k < ids_of_thread; ++k) {
        if (first + k * warp_threads >= end) continue;
        const std::uint32_t offset = shared.by_warp[warp][digit.of(ids[k])] + ranks[k];
        to.ids[offset] = ids[k];
        to.positions[offset] = positions[k];
    }
    __syncthreads();  // before the next tile
}

__global__ void __launch_bounds__(sort_threads) sort(sort_launch work) {
    __shared__ shared_memory shared;
    const cooperative_groups::grid_group grid = cooperative_groups::this_grid();
    const error_memory& errors = work.sort.errors;
    const id_list sorted{work.sort.sorted_ids, work.sort.positions};
    const id_list other{work.other_ids, work.other_positions};
    const int digits =
        (work.bits + static_cast<int>(sort_digit_bits) - 1) / static_cast<int>(sort_digit_bits);
    id_list from{const_cast<std::uint64_t*>(work.sort.ids), nullptr};
    for (int i = 0; i < digits; ++i) {
        const int first_bit = i * static_cast<int>(sort_digit_bits);
        const int bits = min(work.bits - first_bit, static_cast<int>(sort_digit_bits));
        const digit digit{first_bit, (std::uint64_t{1} << bits) - 1};
        const id_list to = (digits - i) % 2 == 1 ? sorted : other;  // the last pass writes to `sorted`
        count_digits(work, from.ids, digit, i == 0 ? errors.counting : nullptr, shared);
        grid.sync();
        if (i == 0 && errors.counting != nullptr && blockIdx.x == 0 && threadIdx.x == 0)
            write_outside(take(*errors.counting), work.sort.ids, errors);
        find_offsets(work, shared);
        const block_part part = part_of_block(work.sort.count);
        for (std::uint64_t begin = part.begin; begin < part.end; begin += ids_of_sort_tile)
            move_tile(begin, part.end, from, to, digit, shared);
        if (i + 1 < digits) grid.sync();
        from = to;
    }
}

}  // namespace

const void* sort_rows() {
    return reinterpret_cast<const void*>(&sort);
}

}  // namespace pinflow::detail::cuda
