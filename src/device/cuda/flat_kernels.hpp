#pragma once

#include "src/device/cuda/api.hpp"
#include "src/device/flat_work.hpp"

/// Launches the kernels of flat.hpp on the current context.
namespace pinflow::detail::cuda {

/// Loads the kernels of one rule.
cudaError_t load_updates(rule_kind rule) noexcept;
cudaError_t check_gradients(const gradient_check& work, unsigned multiprocessors,
                            cudaStream_t stream) noexcept;
cudaError_t update_parameters(const flat_step& work, unsigned multiprocessors, cudaStream_t stream) noexcept;
cudaError_t set_number_of(double* destination, double value, cudaStream_t stream) noexcept;

}  // namespace pinflow::detail::cuda
