#pragma once

#include "src/device/flat_work.hpp"

/// The kernels that update flat parameters, as pointers for cudaLaunchKernel: see flat.cu.
namespace pinflow::detail::cuda {

/// Threads per block of `update_flat`, and the blocks that a multiprocessor runs at a time.
inline constexpr unsigned update_threads = 256;
constexpr unsigned update_blocks(bool doubles) {
    return doubles ? 2 : 3;
}

/// kernel(flat_step), one for each rule: launch blocks of update_threads. All thread blocks read
/// flat_control before the last one changes it. `doubles`: whether there are float64 parameters.
const void* update_flat(rule_kind rule, bool doubles);
/// kernel(gradient_check): launch blocks of norm_threads.
const void* check_flat();
/// kernel(double* destination, double value), with one thread.
const void* set_number();

}  // namespace pinflow::detail::cuda
