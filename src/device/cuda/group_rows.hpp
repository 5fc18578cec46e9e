#pragma once

#include "src/device/row_work.hpp"

/// The kernels that group equal indices of a sorted order: see group_rows.cu.
namespace pinflow::detail::cuda {

inline constexpr unsigned group_threads = 256;

/// kernel(row_grouping): counts the different indices of each tile. A block for each tile.
const void* count_ids_kernel();
/// kernel(row_grouping): writes the groups. A block for each tile.
const void* write_groups_kernel();

}  // namespace pinflow::detail::cuda
