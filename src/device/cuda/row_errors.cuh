#pragma once

#include <cstdint>

#include "src/device/row_work.hpp"

/// How kernels count wrong indices and report them.
namespace pinflow::detail::cuda {

/// Counts the wrong index at `position`.
inline __device__ void add(error_count& to, std::uint64_t position) {
    atomicAdd(&to.count, 1ULL);
    atomicMax(&to.complement, ~static_cast<unsigned long long>(position));
}

/// Returns the counts of all blocks, and sets them to zero. Called by one thread, after all blocks have
/// counted.
inline __device__ error_count take(error_count& from) {
    error_count taken;
    taken.count = atomicExch(&from.count, 0ULL);
    taken.complement = atomicExch(&from.complement, 0ULL);
    return taken;
}

/// Ends the counting of a block. Called by all of its threads.
/// @return true in one thread of the last block, which takes what all blocks have counted.
inline __device__ bool take_counts(error_count& from, error_count& taken) {
    __syncthreads();
    if (threadIdx.x != 0) return false;
    __threadfence();
    // the last block sets it to 0 again
    if (atomicInc(&from.finished_blocks, gridDim.x - 1) != gridDim.x - 1) return false;
    __threadfence();
    taken = take(from);
    return true;
}

/// Writes to `report` how many indices are outside the table, and the first of them. There must be some.
/// `ids` are in the order of the call.
inline __device__ void report_outside(const error_count& outside, const std::uint64_t* ids,
                                      index_errors& report) {
    report.outside_count = outside.count;
    report.outside_position = ~outside.complement;
    report.outside_id = ids[report.outside_position];
}

/// Overwrites *errors.found with the indices outside the table, and reports them if there are any.
inline __device__ void write_outside(const error_count& outside, const std::uint64_t* ids,
                                     const error_memory& errors) {
    *errors.found = {};
    if (outside.count == 0) return;
    report_outside(outside, ids, *errors.found);
    *errors.report = *errors.found;
}

}  // namespace pinflow::detail::cuda
