#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

/// A consumer on every SM: reads `count` floats in device memory, each once, then computes for `rounds`
/// rounds in each thread. `sink`, one float in device memory, keeps the compiler from removing the work.
/// Returns the launch's status.
cudaError_t launch_busy(const float* data, std::size_t count, unsigned rounds, float* sink,
                        cudaStream_t stream);
