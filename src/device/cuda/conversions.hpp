#pragma once

#include "src/device/conversion_work.hpp"

/// The kernels that convert elements, as pointers for cudaLaunchKernel: see conversions.cu.
namespace pinflow::detail::cuda {

/// Threads per block.
inline constexpr unsigned conversion_threads = 256;
/// Bytes of the source that a thread reads at a time.
inline constexpr unsigned conversion_pack_bytes = 16;

/// kernel(device_conversion), for elements of these types.
const void* conversion_kernel(converted_type from, converted_type to);

}  // namespace pinflow::detail::cuda
