#pragma once

#include "src/device/cuda/api.hpp"

namespace pinflow::detail::cuda {

/// One device's primary context, and the way to work in it without touching what the calling thread has made
/// current: the context is pushed and popped, so that not even a thread without a context is left with one.
class context {
 public:
    /// @throws device_error when the device cannot be used.
    explicit context(int device);

    int device() const noexcept { return device_; }

    /// Calls `function` with the device current. @return its status, or why the device could not be made
    /// current.
    template <typename Function>
    [[nodiscard]] cudaError_t run(Function function) const noexcept {
        const scope current(handle_);
        return current.status() == cudaSuccess ? function() : current.status();
    }

 private:
    class scope {
     public:
        explicit scope(CUcontext handle) noexcept;
        ~scope();
        scope(const scope&) = delete;
        scope& operator=(const scope&) = delete;
        cudaError_t status() const noexcept { return status_; }

     private:
        cudaError_t status_ = cudaSuccess;
        bool pushed_ = false;
    };

    int device_;
    CUcontext handle_ = nullptr;
};

}  // namespace pinflow::detail::cuda
