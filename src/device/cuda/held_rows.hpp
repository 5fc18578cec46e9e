#pragma once

#include "src/device/row_work.hpp"

namespace pinflow::detail::cuda {

inline constexpr unsigned held_threads = 256;

/// kernel(held_gather): blockIdx.y selects the table.
const void* gather_held();

}  // namespace pinflow::detail::cuda
