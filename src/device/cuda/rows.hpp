#pragma once

#include <cstdint>

#include "src/device/row_work.hpp"

/// The kernels that gather and scatter rows, as pointers for cudaLaunchKernel: see rows.cu and row_sums.cu.
namespace pinflow::detail::cuda {

/// Threads per block, for all kernels of this file except gather_rows.
inline constexpr unsigned row_threads = 256;
/// Threads per block of gather_rows. These threads mostly wait for the link: large blocks occupy fewer SMs
/// and leave more of them to other kernels. Unaligned rows need more registers, so their blocks are smaller.
/// With blocks of 1024, gathers beside scatters are slower: samples/bench/NOTEBOOK.md, "Blocks".
constexpr unsigned gather_threads(bool aligned) {
    return aligned ? 896 : 512;
}

/// Rows, or pieces of rows, that a group of threads has in flight.
inline constexpr unsigned rows_at_once = 4;

/// How a gather and a scatter of one table keep pace while both run. Each takes rows in the order of their
/// addresses. While they are close together, they share the GPU's translations of addresses, which limit
/// small rows of large tables. So the one that leads waits before it begins more rows. Sums of rows, and
/// kernels that move pieces, do not keep pace.
struct row_pace {
    static constexpr unsigned nap_ns = 250;

    std::uint64_t min_rows = 0;  ///< a kernel that moves fewer rows does not keep pace
    /// A kernel waits if it leads by this many rows, or by 1/256 of the rows that it moves if that is more.
    std::uint64_t min_lead_rows = 0;
    /// The table's size. A kernel that leads by more than a third of it does not wait: that would take too
    /// long.
    std::uint64_t table_bytes = 0;
    unsigned max_naps = 0;  ///< the most naps of one wait; 0: the kernel does not keep pace
};

/// Arguments of a kernel. A group of `lanes` threads moves a row, or a piece of one, 16 bytes per thread at a
/// time. `lanes` is a power of two up to 32.
struct row_launch {
    row_transfer transfer;
    unsigned lanes = 32;
    row_pace pace;
    std::uint64_t piece_bytes = 0;  ///< of all pieces but the last one of a row; unused if there is one
    unsigned pieces_of_row = 1;
};

/// kernel(const std::uint64_t* ids, std::uint64_t count, std::uint64_t row_count, error_memory)
const void* check_rows();
/// kernel(row_order, const std::uint64_t* ids, error_memory): counts equal neighbours of a sorted order as
/// errors.
const void* refuse_repeated_rows();
/// kernel(row_launch): copies rows to their positions. In a sorted order, equal indices are copied to the
/// first position only. `aligned`: all addresses and sizes are multiples of 16 bytes. `in_pieces`: each group
/// of threads moves pieces of rows, for few long rows; does not keep pace.
const void* gather_rows(bool aligned, bool in_pieces);
/// kernel(row_launch): copies the rows that gather_rows of a sorted order left out, from their first
/// position.
const void* repeat_rows(bool aligned);
/// kernel(row_launch): writes each row from the last of its positions. Otherwise as gather_rows.
const void* scatter_rows(bool aligned, bool in_pieces);
/// kernel(row_launch): writes the sum over the positions of each row, in their order.
const void* scatter_sums(sum_type type);

}  // namespace pinflow::detail::cuda
