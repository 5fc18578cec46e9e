#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

/// A consumer: reads `count` floats in device memory on every multiprocessor, and computes on them for as
/// long as `rounds` says; `sink`, one float in device memory, keeps the compiler from leaving it out. Returns
/// what the launch returned.
cudaError_t launch_busy(const float* data, std::size_t count, unsigned rounds, float* sink,
                        cudaStream_t stream);
