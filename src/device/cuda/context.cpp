#include "src/device/cuda/context.hpp"

#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace pinflow::detail::cuda {

context::context(int device) : device_(device) {
    check(retain_primary_context(handle_, device), "cannot use the device cuda:{}", device);
}

const context& context::for_host_memory(int device) {
    // never destroyed: memory may be held by static objects
    static std::mutex& mutex = *new std::mutex;
    static auto& contexts = *new std::map<int, std::unique_ptr<const context>>;
    const std::lock_guard lock(mutex);
    std::unique_ptr<const context>& known = contexts[device];
    if (known) return *known;
    auto made = std::make_unique<context>(device);
    constexpr std::uint64_t own_bytes = std::uint64_t{512} << 20;
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    const cudaError_t status = made->run([&] { return memory_info(free_bytes, total_bytes); });
    if (status == cudaSuccess && total_bytes / 20 >= own_bytes && free_bytes >= 2 * own_bytes) {
        CUcontext own = nullptr;
        if (create_context(own, device) == cudaSuccess) {
            made->handle_ = own;
            made->primary_ = false;
        }
    }
    known = std::move(made);
    return *known;
}

context::scope::scope(CUcontext handle) noexcept {
    CUcontext current = nullptr;
    status_ = current_context(current);
    if (status_ != cudaSuccess) return;
    exchange_capture_mode(mode_);
    exchanged_ = true;
    if (current == handle) return;
    status_ = push_context(handle);
    pushed_ = status_ == cudaSuccess;
}

context::scope::~scope() {
    if (pushed_) static_cast<void>(pop_context());
    if (exchanged_) exchange_capture_mode(mode_);
}

}  // namespace pinflow::detail::cuda
