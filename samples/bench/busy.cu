#include "samples/bench/busy.hpp"

namespace {

__global__ void busy(const float* data, std::size_t count, unsigned rounds, float* sink) {
    float sum = 0;
    for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        sum += data[i];
    for (unsigned i = 0; i < rounds; ++i)
        sum = sum * 0.999F + 0.5F;
    if (sum == 12345.0F) *sink = sum;
}

}  // namespace

cudaError_t launch_busy(const float* data, std::size_t count, unsigned rounds, float* sink,
                        cudaStream_t stream) {
    busy<<<264, 256, 0, stream>>>(data, count, rounds, sink);
    return cudaGetLastError();
}
