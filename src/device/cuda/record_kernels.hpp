#pragma once

#include "src/device/cuda/api.hpp"
#include "src/device/record_work.hpp"

/// Launches the kernels of records.hpp on the current context.
namespace pinflow::detail::cuda {

/// Loads the kernels of one rule.
cudaError_t load_records(rule_kind rule) noexcept;
cudaError_t patch_records(const record_patch& work, unsigned multiprocessors, cudaStream_t stream) noexcept;
cudaError_t update_records(const record_update& work, unsigned multiprocessors, cudaStream_t stream) noexcept;

}  // namespace pinflow::detail::cuda
