#pragma once

#include "src/device/cuda/api.hpp"
#include "src/device/record_work.hpp"
#include "src/device/row_work.hpp"

/// Launches the kernels of records.hpp and group_rows.hpp on the current context.
namespace pinflow::detail::cuda {

/// Loads the kernels of one rule, and those that group rows.
cudaError_t load_records(rule_kind rule) noexcept;
cudaError_t group_rows(const row_grouping& work, cudaStream_t stream) noexcept;
cudaError_t patch_records(const record_patch& work, unsigned multiprocessors, cudaStream_t stream) noexcept;
cudaError_t update_records(const record_update& work, unsigned multiprocessors, cudaStream_t stream) noexcept;

}  // namespace pinflow::detail::cuda
