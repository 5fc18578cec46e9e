#pragma once

#include <cuda/atomic>

#include <cstdint>

#include "src/device/cuda/row_words.cuh"
#include "src/device/cuda/rows.hpp"

/// How a gather and a scatter of one table keep pace while both run: see row_pace. For rows.cu only.
namespace pinflow::detail::cuda {

enum class direction : std::uint8_t { gather, scatter };

/// For each direction, the address of a row that its latest kernel has begun; 0 once the kernel's first block
/// has ended. Kernels only use it to wait for a limited time, so it does not matter if several write it.
static __device__ unsigned long long begun_rows[2];

using begun_row = ::cuda::atomic_ref<unsigned long long, ::cuda::thread_scope_device>;

/// How far a kernel that moves `row_count` rows leads the other direction when it begins to wait, in bytes
/// between the addresses of rows. 0: it does not keep pace.
inline __device__ std::uint64_t min_lead_bytes(const row_pace& pace, std::uint64_t row_count) {
    if (pace.max_naps == 0 || row_count < pace.min_rows) return 0;
    constexpr std::uint64_t lead_share = 256;  // of the kernel's rows
    const std::uint64_t rows = max(row_count / lead_share, pace.min_lead_rows);
    return static_cast<std::uint64_t>(static_cast<double>(pace.table_bytes) / static_cast<double>(row_count) *
                                      static_cast<double>(rows));
}

/// Publishes `row`, then waits while this kernel leads the other direction by `min_lead_bytes` or more.
inline __device__ void publish_and_wait(const row_launch& launch, direction own, const unsigned char* row,
                                        std::uint64_t min_lead_bytes) {
    constexpr auto relaxed = ::cuda::memory_order_relaxed;
    const auto at = reinterpret_cast<std::uintptr_t>(row);
    const auto index = static_cast<unsigned>(own);
    if (blockIdx.x == 0) begun_row(begun_rows[index]).store(at, relaxed);
    const begun_row other(begun_rows[1 - index]);
    for (unsigned naps = 0; naps < launch.pace.max_naps; ++naps) {
        const std::uint64_t other_at = other.load(relaxed);
        const bool leads = other_at >= reinterpret_cast<std::uintptr_t>(launch.transfer.table.rows) &&
                           other_at + min_lead_bytes <= at;
        if (!leads || at - other_at > launch.pace.table_bytes / 3) return;
        __nanosleep(row_pace::nap_ns);
    }
}

/// Called by the threads of a group before they begin with the row at `row` of the table.
inline __device__ void keep_pace(const row_launch& launch, direction own, unsigned lane,
                                 const unsigned char* row, std::uint64_t min_lead_bytes) {
    if (lane == 0) publish_and_wait(launch, own, row, min_lead_bytes);
    const unsigned group_in_warp = threadIdx.x % warpSize - lane;
    __syncwarp((~0U >> (warpSize - launch.lanes)) << group_in_warp);
}

/// Called by all threads of the first block, once they have begun their last rows.
inline __device__ void end_pace(direction own) {
    __syncthreads();
    if (threadIdx.x == 0)
        begun_row(begun_rows[static_cast<unsigned>(own)]).store(0, ::cuda::memory_order_relaxed);
}

}  // namespace pinflow::detail::cuda
