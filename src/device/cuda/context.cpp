#include "src/device/cuda/context.hpp"

namespace pinflow::detail::cuda {

context::context(int device) : device_(device) {
    check(retain_primary_context(handle_, device), "cannot use the device cuda:{}", device);
}

context::scope::scope(CUcontext handle) noexcept {
    CUcontext current = nullptr;
    status_ = current_context(current);
    if (status_ != cudaSuccess || current == handle) return;
    status_ = push_context(handle);
    pushed_ = status_ == cudaSuccess;
}

context::scope::~scope() {
    if (pushed_) static_cast<void>(pop_context());
}

}  // namespace pinflow::detail::cuda
