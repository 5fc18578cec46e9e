#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "src/device/cuda/context.hpp"
#include "src/device/pin_registry.hpp"

namespace pinflow::detail {

namespace cuda {
namespace {

/// Whether the failure concerns the device, the driver or the process, and not the pages.
bool is_same_for_others(cudaError_t status) noexcept {
    return is_fatal(status) || status == cudaErrorNotSupported || status == cudaErrorInitializationError ||
           status == cudaErrorCudartUnloading;
}

/// Registers pages with cudaHostRegister for all devices, in one device's context for host memory.
class locker final : public page_locker {
 public:
    explicit locker(int device) : primary_(device), context_(context::for_host_memory(device)) {
        int supported = 0;
        check(device_attribute(supported, cudaDevAttrHostRegisterReadOnlySupported, device),
              "cannot ask whether cuda:{} can register read-only pages", device);
        read_only_supported_ = supported != 0;
    }

    std::optional<pin_refusal> lock(std::span<const std::byte> pages, bool read_only) override {
        if (read_only && !read_only_supported_)
            return pin_refusal{"the device cannot register pages that are mapped for reading only", true};
        void* const data = const_cast<std::byte*>(pages.data());
        void* device_pointer = nullptr;
        bool registered = false;
        cudaError_t status = context_.run([&] { return host_register(data, pages.size(), read_only); });
        if (status == cudaSuccess) {
            registered = true;
            // asked in the context in which copies and kernels use them
            status = primary_.run([&] { return host_device_pointer(device_pointer, data); });
        }
        if (status == cudaSuccess && device_pointer == data) return {};
        // cudaHostRegister returns these for memory that is registered, and for memory of cudaHostAlloc. A
        // registration of read-only pages, such as those of a file, does not count: it may end before the
        // file is closed.
        const bool may_be_locked_by_others =
            status == cudaErrorHostMemoryAlreadyRegistered || status == cudaErrorInvalidValue;
        if (may_be_locked_by_others && !read_only && !registered && are_locked_by_others(pages)) {
            const std::lock_guard guard(mutex_);
            locked_by_others_.insert(data);
            return {};
        }
        const bool may_be_locked = registered && !unlock(pages);
        if (status != cudaSuccess)
            return pin_refusal{cause(status), is_same_for_others(status), may_be_locked};
        return pin_refusal{"the device would see the pages at other addresses than the host", true,
                           may_be_locked};
    }

    bool unlock(std::span<const std::byte> pages) noexcept override {
        {
            const std::lock_guard guard(mutex_);
            if (locked_by_others_.erase(pages.data()) != 0) return true;
        }
        const cudaError_t status =
            context_.run([&] { return host_unregister(const_cast<std::byte*>(pages.data())); });
        return status == cudaSuccess || status == cudaErrorCudartUnloading;
    }

    void yield_driver() noexcept override {
        // the lock of a context is unfair: this pause lets waiting threads wake up and take it
        if (context_.is_primary()) std::this_thread::sleep_for(std::chrono::microseconds(200));
    }

 private:
    /// Whether other code has page-locked all of these pages, in one allocation or registration, at the same
    /// addresses: such as a tensor that PyTorch has pinned.
    bool are_locked_by_others(std::span<const std::byte> pages) const {
        const std::byte* const begin = pages.data();
        cudaPointerAttributes attributes{};
        std::span<const std::byte> range;
        cudaError_t status = primary_.run([&] { return pointer_attributes(attributes, begin); });
        if (status == cudaSuccess) status = primary_.run([&] { return pointer_range(range, begin); });
        return status == cudaSuccess && attributes.type == cudaMemoryTypeHost &&
               attributes.devicePointer == begin && range.data() <= begin &&
               std::to_address(pages.end()) <= std::to_address(range.end());
    }

    context primary_;
    const context& context_;
    bool read_only_supported_ = false;
    std::mutex mutex_;
    std::set<const void*> locked_by_others_;  ///< the addresses of pages that `unlock` leaves locked
};

}  // namespace
}  // namespace cuda

page_locker& cuda_page_locker(int index) {
    // never destroyed: pages may be held by static objects
    static std::mutex& mutex = *new std::mutex;
    static auto& lockers = *new std::map<int, std::unique_ptr<cuda::locker>>;
    const std::lock_guard lock(mutex);
    std::unique_ptr<cuda::locker>& locker = lockers[index];
    if (!locker) locker = std::make_unique<cuda::locker>(index);
    return *locker;
}

}  // namespace pinflow::detail
