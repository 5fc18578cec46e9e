#pragma once

#include "src/device/record_work.hpp"

/// The kernels of embedding tables, as pointers for cudaLaunchKernel: see records.cu.
namespace pinflow::detail::cuda {

inline constexpr unsigned record_threads = 256;
inline constexpr unsigned sum_threads = 128;

/// kernel(record_patch): launch blocks of record_threads. A warp works on one row at a time.
const void* patch_records_kernel();
/// kernel(record_update): sums the gradients of frequent ids. Launch blocks of sum_threads, before the
/// update.
const void* sum_frequent_kernel();
/// kernel(record_update), one for each rule: as patch_records_kernel.
const void* update_records_kernel(rule_kind rule);

}  // namespace pinflow::detail::cuda
