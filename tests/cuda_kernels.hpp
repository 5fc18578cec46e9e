#pragma once

#include <cuda_runtime_api.h>

/// Kernels for the tests of the CUDA device.

/// Occupies the stream until *flag, in pinned host memory, is not 0; gives up after some seconds, so that a
/// failed test does not hang.
void launch_spin(const volatile int* flag, cudaStream_t stream);
/// Writes `value` to *address in device memory.
void launch_store(unsigned* address, unsigned value, cudaStream_t stream);
/// Lets the next kernel of the stream start, and writes `value` to *address a third of a millisecond later.
/// Before compute capability 9.0, the value is written at once.
void launch_late_store(float* address, float value, cudaStream_t stream);
/// Writes to an invalid address: an error that CUDA does not recover from.
void launch_fault(cudaStream_t stream);
