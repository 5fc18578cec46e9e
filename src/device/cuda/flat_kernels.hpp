#pragma once

#include "src/device/cuda/api.hpp"
#include "src/device/flat_work.hpp"

/// Launches the kernels of flat.hpp on the current context.
namespace pinflow::detail::cuda {

/// What launches depend on.
struct flat_device {
    unsigned multiprocessors = 1;
    bool starts_early = false;  ///< the kernels were compiled for 9.0 or higher: see launch_early
};

/// Loads the kernels of one rule.
cudaError_t load_updates(rule_kind rule) noexcept;
cudaError_t check_gradients(const gradient_check& work, const flat_device& device,
                            cudaStream_t stream) noexcept;
cudaError_t update_parameters(const flat_step& work, const flat_device& device, cudaStream_t stream) noexcept;
cudaError_t set_number_of(double* destination, double value, cudaStream_t stream) noexcept;

}  // namespace pinflow::detail::cuda
