#include "tests/cuda_kernels.hpp"

namespace {

__global__ void spin(const volatile int* flag) {
    const long long start = clock64();
    constexpr long long some_seconds = 20'000'000'000;
    while (*flag == 0 && clock64() - start < some_seconds) {
    }
}

__global__ void store(unsigned* address, unsigned value) {
    *address = value;
}

__global__ void store_late(float* address, float value) {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
    for (int i = 0; i < 32; ++i)
        __nanosleep(10'000);
#endif
    *address = value;
}

}  // namespace

void launch_spin(const volatile int* flag, cudaStream_t stream) {
    spin<<<1, 1, 0, stream>>>(flag);
}

void launch_store(unsigned* address, unsigned value, cudaStream_t stream) {
    store<<<1, 1, 0, stream>>>(address, value);
}

void launch_late_store(float* address, float value, cudaStream_t stream) {
    store_late<<<1, 1, 0, stream>>>(address, value);
}

void launch_fault(cudaStream_t stream) {
    store<<<1, 1, 0, stream>>>(reinterpret_cast<unsigned*>(8), 1);
}
