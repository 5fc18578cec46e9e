#pragma once

#include "src/device/record_work.hpp"

/// The kernels of embedding tables, as pointers for cudaLaunchKernel: see records.cu.
namespace pinflow::detail::cuda {

inline constexpr unsigned record_threads = 256;

/// kernel(record_patch): launch blocks of record_threads. A warp works on one row at a time.
const void* patch_records_kernel();
/// kernel(record_update), one for each rule: the same.
const void* update_records_kernel(rule_kind rule);

}  // namespace pinflow::detail::cuda
