#pragma once

#include "src/device/cuda/api.hpp"

namespace pinflow::detail::cuda {

/// Runs functions in a context of one device, by default the primary one. The context is pushed and popped,
/// so that the calling thread's current context, or lack of one, does not change. The functions run in the
/// relaxed mode of stream capture: in another mode, some calls would end a capture of a CUDA graph in any
/// thread, although they do not touch the captured streams.
class context {
 public:
    /// @throws device_error if the device cannot be used.
    explicit context(int device);

    /// The context in which host memory is registered for `device`: a second context, not the primary one.
    /// While a registration runs in a context, all other calls in that context block, even enqueuing a copy.
    /// Unregistering waits for all work in that context. Registered memory is known in every context.
    /// The first call creates the context. That takes 0.1 s and some 520 MiB of device memory. If the device
    /// has less than 10 GiB in all or less than 1 GiB free, or if creation fails, the primary context is used
    /// from then on.
    /// @throws device_error if the device cannot be used.
    static const context& for_host_memory(int device);

    int device() const noexcept { return device_; }
    bool is_primary() const noexcept { return primary_; }

    /// Calls `function` with the device current.
    /// @return its status, or the status of the failure to make the device current.
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
        bool exchanged_ = false;
        CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;  ///< after the exchange, the thread's own
    };

    int device_;
    CUcontext handle_ = nullptr;
    bool primary_ = true;
};

}  // namespace pinflow::detail::cuda
