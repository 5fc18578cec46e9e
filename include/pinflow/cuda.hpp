#pragma once

#include <cuda_runtime_api.h>

#include "pinflow/error.hpp"
#include "pinflow/stream.hpp"

/// Converts between cudaStream_t and stream_view. The only header that needs CUDA's headers; it needs no CUDA
/// library to link.
namespace pinflow {

/// Makes a view of an existing stream of CUDA device `device`: PyTorch's, the legacy default stream (a null
/// handle), cudaStreamPerThread. The stream must outlive the view, device_buffers that use it (see
/// device_buffer::set_stream), and leases of batches that it reads. Other functions say how long they need
/// their stream.
/// @throws as device::cuda.
inline stream_view from_cuda(cudaStream_t stream, int device) {
    return {device::cuda(device), stream};
}

/// The CUDA stream behind a view, for launching kernels on it. @throws invalid_argument for a stream of the
/// host device.
inline cudaStream_t to_cuda(stream_view stream) {
    if (stream.device().kind() != device_kind::cuda) {
        throw invalid_argument("the stream belongs to the host device and has no CUDA stream");
    }
    return static_cast<cudaStream_t>(stream.native_handle());
}

}  // namespace pinflow
