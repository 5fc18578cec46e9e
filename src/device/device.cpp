#include "pinflow/device.hpp"

#include <fmt/format.h>

#include <charconv>

#include "pinflow/error.hpp"
#include "src/device/backend.hpp"

namespace pinflow {

device device::host() {
    return device(detail::host_backend());
}

#ifdef PINFLOW_HAVE_CUDA

device device::cuda(int index) {
    return device(detail::cuda_backend(index));
}

int device::cuda_count() noexcept {
    return detail::cuda_device_count(nullptr);
}

std::string device::no_cuda_reason() {
    std::string reason;
    return detail::cuda_device_count(&reason) > 0 ? std::string() : reason;
}

#else

device device::cuda(int index) {
    throw unsupported(fmt::format("cannot use the device cuda:{}: this build of pinflow has no CUDA", index));
}

int device::cuda_count() noexcept {
    return 0;
}

std::string device::no_cuda_reason() {
    return "this build of pinflow has no CUDA";
}

#endif

device device::best() {
    return cuda_count() > 0 ? cuda(0) : host();
}

device device::parse(std::string_view name) {
    if (name == "auto") return best();
    if (name == "host") return host();
    if (name == "cuda") return cuda(0);
    if (name.starts_with("cuda:")) {
        const std::string_view digits = name.substr(5);
        int index = 0;
        const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
        if (error == std::errc() && end == digits.data() + digits.size() && digits[0] != '-')
            return cuda(index);
    }
    throw invalid_argument(fmt::format("'{}' is not the name of a device: auto, host, cuda or cuda:N", name));
}

std::vector<device> device::all() {
    std::vector<device> devices{host()};
    for (int index = 0; index < cuda_count(); ++index) {
        devices.push_back(cuda(index));
    }
    return devices;
}

device_kind device::kind() const noexcept {
    return backend_->kind();
}

int device::index() const noexcept {
    return backend_->index();
}

std::string device::name() const {
    return kind() == device_kind::host ? "host" : fmt::format("cuda:{}", index());
}

std::string device::model() const {
    return backend_->model();
}

device::memory_sizes device::memory() const {
    return backend_->memory();
}

}  // namespace pinflow
