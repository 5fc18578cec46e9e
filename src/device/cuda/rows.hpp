#pragma once

#include <cstdint>

#include "src/device/row_work.hpp"

/// The kernels that gather and scatter rows, in the form that cudaLaunchKernel takes them: see rows.cu.
namespace pinflow::detail::cuda {

/// Threads in a block of each of the kernels,
inline constexpr unsigned row_threads = 256;
/// but of gather_rows: they mostly wait for the link, and the fewer multiprocessors they do that on, the more
/// are left to whoever computes meanwhile. Rows that are not aligned need more registers.
constexpr unsigned gather_threads(bool aligned) {
    return aligned ? 1024 : 512;
}

/// What a kernel is given. A group of `lanes` threads, a power of two up to 32, moves a row, 16 bytes a
/// thread at a time.
struct row_launch {
    row_transfer transfer;
    unsigned lanes = 32;
};

/// kernel(const std::uint64_t* ids, std::uint64_t count, std::uint64_t row_count, index_errors*)
const void* check_rows();
/// kernel(std::uint32_t* positions, std::uint64_t count): 0, 1, 2, ...
const void* number_rows();
/// kernel(const row_order, index_errors*): equal neighbours of a sorted order are errors.
const void* refuse_repeated_rows();
/// kernel(const std::uint64_t* ids, index_errors*), one thread: adds the indices at the positions found.
const void* record_wrong_ids();
/// kernel(row_launch): rows to their positions, of equal ones in a sorted order to the first only. `aligned`:
/// everything is a multiple of 16 bytes.
const void* gather_rows(bool aligned);
/// kernel(row_launch): what gather_rows of a sorted order left out, from where it brought the row to.
const void* repeat_rows(bool aligned);
/// kernel(row_launch): from the last of the positions of each row.
const void* scatter_rows(bool aligned);
/// kernel(row_launch): the sum over the positions of each row, in their order.
const void* scatter_sums(sum_type type);

}  // namespace pinflow::detail::cuda
