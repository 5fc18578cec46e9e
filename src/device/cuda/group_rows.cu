#include "src/device/cuda/group_rows.hpp"

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

// The first index of each group counts as 1, all others as 0. The sum of these numbers up to an index, minus
// one, is the number of its group.
namespace pinflow::detail::cuda {

namespace {

constexpr unsigned ids_of_thread = row_grouping::tile / group_threads;

using block_scan = cub::BlockScan<std::uint32_t, group_threads>;
using block_reduce = cub::BlockReduce<std::uint32_t, group_threads>;

__device__ bool has_errors(const row_grouping& work) {
    return work.errors != nullptr && (work.errors->outside_count != 0 || work.errors->repeated_count != 0);
}

/// Whether an index of the order is the first, or differs from the one before.
__device__ bool begins_group(const row_order& sorted, std::uint64_t i) {
    return i < sorted.count && (i == 0 || sorted.ids[i - 1] != sorted.ids[i]);
}

__device__ std::uint64_t first_of_thread() {
    return std::uint64_t{blockIdx.x} * row_grouping::tile + threadIdx.x * ids_of_thread;
}

__global__ void __launch_bounds__(group_threads) count_ids(const __grid_constant__ row_grouping work) {
    __shared__ block_reduce::TempStorage shared;
    std::uint32_t count = 0;
    for (unsigned k = 0; k < ids_of_thread; ++k)
        count += begins_group(work.sorted, first_of_thread() + k) ? 1 : 0;
    count = block_reduce(shared).Sum(count);
    if (threadIdx.x == 0) work.tile_counts[blockIdx.x] = count;
}

/// Returns to all threads of the block how many groups begin in earlier tiles.
__device__ std::uint32_t count_before(const row_grouping& work) {
    __shared__ block_reduce::TempStorage shared;
    __shared__ std::uint32_t sum;
    std::uint32_t own = 0;
    for (unsigned tile = threadIdx.x; tile < blockIdx.x; tile += blockDim.x)
        own += work.tile_counts[tile];
    own = block_reduce(shared).Sum(own);
    if (threadIdx.x == 0) sum = own;
    __syncthreads();
    return sum;
}

/// Writes the ends of the lists, for `count` groups of `end` indices.
__device__ void write_ends(const row_grouping& work, std::uint32_t count, std::uint64_t end) {
    work.starts[count] = static_cast<std::uint32_t>(end);
    *work.id_count = count;
    *work.reported_count = count;
    work.ranges[0].begin = 0;
    work.ranges[1].end = count;
}

/// Writes where the ranges meet: the first `below` groups have ids below split_id.
__device__ void write_split(const row_grouping& work, std::uint32_t below) {
    work.ranges[0].end = below;
    work.ranges[1].begin = below;
}

__global__ void __launch_bounds__(group_threads) write_groups(const __grid_constant__ row_grouping work) {
    __shared__ block_scan::TempStorage shared;
    const row_order& sorted = work.sorted;
    const std::uint64_t first = first_of_thread();
    if (has_errors(work)) {
        for (unsigned k = 0; k < ids_of_thread; ++k) {
            if (first + k < sorted.count) work.groups[sorted.positions[first + k]] = 0;
        }
        if (first == 0) {
            write_ends(work, 0, 0);
            write_split(work, 0);
        }
        return;
    }
    std::uint32_t counts[ids_of_thread];
    for (unsigned k = 0; k < ids_of_thread; ++k)
        counts[k] = begins_group(sorted, first + k) ? 1 : 0;
    block_scan(shared).InclusiveSum(counts, counts);
    const std::uint32_t before = count_before(work);
    for (unsigned k = 0; k < ids_of_thread; ++k) {
        const std::uint64_t i = first + k;
        if (i >= sorted.count) break;
        const std::uint32_t group = before + counts[k] - 1;
        const std::uint64_t id = sorted.ids[i];
        work.groups[sorted.positions[i]] = group;
        if (begins_group(sorted, i)) {
            work.ids[group] = id;
            work.starts[group] = static_cast<std::uint32_t>(i);
            if (id >= work.split_id && (i == 0 || sorted.ids[i - 1] < work.split_id))
                write_split(work, group);
        }
        if (i + 1 == sorted.count) {
            write_ends(work, group + 1, sorted.count);
            if (id < work.split_id) write_split(work, group + 1);
        }
    }
}

}  // namespace

const void* count_ids_kernel() {
    return reinterpret_cast<const void*>(&count_ids);
}

const void* write_groups_kernel() {
    return reinterpret_cast<const void*>(&write_groups);
}

}  // namespace pinflow::detail::cuda
