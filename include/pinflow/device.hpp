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

/// Where batches are consumed: `host`, which is complete and always there, or one CUDA device. A small value
/// that names a device; nothing is ever taken from a process-wide "current device". Thread-safe.
class device {
 public:
    /// The host: streams are ordered queues with a thread each, device memory is host memory.
    static device host();
    /// CUDA device number `index`. @throws unsupported when this build has no CUDA, device_error when the
    /// machine has no such device.
    static device cuda(int index);
    /// How many CUDA devices can be used; 0 without CUDA, a driver or a device.
    static int cuda_count() noexcept;
    /// cuda:0 when there is one, otherwise the host.
    static device best();
    /// "auto" (as `best`), "host", "cuda" or "cuda:N". @throws invalid_argument for another name, and as
    /// `cuda`.
    static device parse(std::string_view name);
    /// The host first, then every CUDA device.
    static std::vector<device> all();
    /// Empty when CUDA devices can be used; otherwise one sentence that says why not.
    static std::string no_cuda_reason();

    device_kind kind() const noexcept;
    /// The CUDA device's number; 0 for the host.
    int index() const noexcept;
    /// "host" or "cuda:0", as `parse` reads it.
    std::string name() const;
    /// What the machine calls it: the processor's or the GPU's model.
    std::string model() const;
    /// Memory that batches would live in, in bytes; free is what is available now.
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
