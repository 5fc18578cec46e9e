#pragma once

#include "src/device/cuda/api.hpp"

namespace pinflow::detail::cuda {

/// One device's primary context, and the way to work in it without touching what the calling thread has made
/// current: the context is pushed and popped, so that not even a thread without a context is left with one.
class context {
 public:
    /// @throws device_error when the device cannot be used.
    explicit context(int device);

    /// The context in which host memory is registered for `device`: not the primary one, because while memory
    /// is registered in a context nobody can use it, not even to enqueue a copy, and unregistering waits for
    /// all work in it. What is registered is known in every context. Made at the first call, which takes a
    /// tenth of a second and some 500 MiB of device memory: the primary context serves, from then on, where
    /// that is more than a twentieth of the device's or half of what is free, or cannot be had. @throws
    /// device_error when the device cannot be used.
    static const context& for_host_memory(int device);

    int device() const noexcept { return device_; }
    bool is_primary() const noexcept { return primary_; }

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
    bool primary_ = true;
};

}  // namespace pinflow::detail::cuda
