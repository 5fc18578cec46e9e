#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace pinflow {

namespace detail {
class device_backend;
}

enum class device_kind { host, cuda };

/// The device that consumes batches: `host`, which is always available, or one CUDA device. A small value;
/// pinflow does not depend on the calling thread's current CUDA device, and leaves it unchanged. Thread-safe.
class device {
 public:
    /// The host device: each stream is an ordered queue with its own thread, and device memory is host
    /// memory.
    static device host();
    /// CUDA device number `index`. The first call for a device may create its primary context.
    /// @throws unsupported if this build has no CUDA.
    /// @throws device_error if `cuda_count` is 0 in a build with CUDA, if there is no device of this number,
    /// or if this build has no code for its compute capability.
    static device cuda(int index);
    /// The number of CUDA devices. 0 if this build has no CUDA, if no driver supports its CUDA toolkit, or if
    /// cuda:0 has a compute capability below 8.0. Other devices are not checked.
    static int cuda_count() noexcept;
    /// cuda:0 if `cuda_count` is above 0, otherwise the host.
    /// @throws as `cuda`.
    static device best();
    /// Reads "auto" (as `best`), "host", "cuda" or "cuda:N".
    /// @throws invalid_argument for another name, and as `cuda`.
    static device parse(std::string_view name);
    /// The host first, then every CUDA device.
    /// @throws as `cuda`, for any of them.
    static std::vector<device> all();
    /// Empty if `cuda_count` is above 0; otherwise one sentence that says why it is not.
    static std::string no_cuda_reason();

    device_kind kind() const noexcept;
    /// The CUDA device's number; 0 for the host.
    int index() const noexcept;
    /// "host" or "cuda:0", as `parse` reads it.
    std::string name() const;
    /// The model name of the processor or the GPU.
    std::string model() const;
    /// The memory of the device, in bytes: total, and free at the moment.
    struct memory_sizes {
        std::uint64_t total_bytes = 0;
        std::uint64_t free_bytes = 0;
    };
    memory_sizes memory() const;

    friend bool operator==(const device& a, const device& b) noexcept { return a.backend_ == b.backend_; }

    /// For pinflow's own layers.
    detail::device_backend& backend() const noexcept { return *backend_; }

 private:
    explicit device(detail::device_backend& backend) noexcept : backend_(&backend) {}

    detail::device_backend* backend_;
};

}  // namespace pinflow
