#pragma once

#include <cuda_runtime_api.h>

#include "pinflow/error.hpp"
#include "pinflow/stream.hpp"

/// CUDA's own streams in and out; the only header that needs CUDA's headers, and nothing of it needs linking.
namespace pinflow {

/// Names a stream of CUDA device `device` that somebody else made: PyTorch's, the legacy default stream (a
/// null handle), cudaStreamPerThread. The stream must outlive whatever the view is given to.
/// @throws device_error when there is no such device.
inline stream_view from_cuda(cudaStream_t stream, int device) {
    return {device::cuda(device), stream};
}

/// The CUDA stream behind a view, for launching kernels on it. @throws invalid_argument when it is the
/// host's.
inline cudaStream_t to_cuda(stream_view stream) {
    if (stream.device().kind() != device_kind::cuda) {
        throw invalid_argument("a stream of the host device is no CUDA stream");
    }
    return static_cast<cudaStream_t>(stream.native_handle());
}

}  // namespace pinflow
