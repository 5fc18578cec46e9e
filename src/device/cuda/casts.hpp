#pragma once

#include "src/device/cast_work.hpp"

/// The kernels that cast elements, as pointers for cudaLaunchKernel: see casts.cu.
namespace pinflow::detail::cuda {

/// Threads per block.
inline constexpr unsigned cast_threads = 256;
/// Bytes of the source that a thread reads at a time.
inline constexpr unsigned cast_pack_bytes = 16;

/// kernel(device_cast), for elements of these types.
const void* cast_kernel(cast_type from, cast_type to);

}  // namespace pinflow::detail::cuda
