#include <fmt/format.h>

#include <limits>
#include <utility>

#include "pinflow/dlpack.hpp"
#include "pinflow/error.hpp"
#include "src/dlpack/element_type.hpp"

namespace pinflow {

namespace {

/// Owns a tensor of another library.
template <typename Managed>
std::shared_ptr<const void> owner_of(Managed* tensor) {
    if (tensor == nullptr) throw invalid_argument("there is no tensor: the pointer is null");
    return {tensor, dlpack::call_deleter()};
}

const dlpack::tensor& checked(const dlpack::managed_tensor_versioned& tensor) {
    if (tensor.version.major != dlpack::current_version.major)
        throw unsupported(fmt::format("the tensor has version {} of DLPack; pinflow reads version {}",
                                      tensor.version.major, dlpack::current_version.major));
    return tensor.dl_tensor;
}

device device_of(const dlpack::device& place) {
    switch (place.device_type) {
        case dlpack::device_type::cpu:
        case dlpack::device_type::cuda_host:
            return device::host();
        case dlpack::device_type::cuda:
            return device::cuda(place.device_id);
    }
    throw unsupported(fmt::format("DLPack's device type {} is neither host memory nor a CUDA device",
                                  static_cast<std::int32_t>(place.device_type)));
}

array_view view_of(const dlpack::tensor& tensor) {
    const dtype type = detail::element_type(tensor.dtype);
    constexpr std::int32_t max_axes = 64;
    if (tensor.ndim < 0 || tensor.ndim > max_axes)
        throw invalid_argument(
            fmt::format("a tensor has 0 to {} axes, and this one has {}", max_axes, tensor.ndim));
    if (tensor.ndim > 0 && tensor.shape == nullptr)
        throw invalid_argument(fmt::format("a tensor of {} axes has no shape", tensor.ndim));
    const auto ndim = static_cast<std::size_t>(tensor.ndim);
    shape_vector shape;
    shape.reserve(ndim);
    for (std::size_t axis = 0; axis < ndim; ++axis) {
        if (tensor.shape[axis] < 0)
            throw invalid_argument(
                fmt::format("axis {} of a tensor cannot have length {}", axis, tensor.shape[axis]));
        shape.push_back(static_cast<std::uint64_t>(tensor.shape[axis]));
    }
    const std::byte* const data =
        tensor.data == nullptr ? nullptr : static_cast<const std::byte*>(tensor.data) + tensor.byte_offset;
    if (data == nullptr && element_count(shape) > 0)
        throw invalid_argument(fmt::format("a tensor of shape {} has no data", to_string(shape)));
    if (tensor.strides == nullptr) return {data, type, std::move(shape)};
    std::vector<std::int64_t> strides_bytes;
    strides_bytes.reserve(ndim);
    for (std::size_t axis = 0; axis < ndim; ++axis) {
        std::int64_t bytes = 0;
        if (__builtin_mul_overflow(tensor.strides[axis], static_cast<std::int64_t>(type.size_bytes()),
                                   &bytes))
            throw invalid_argument(
                fmt::format("the stride of axis {} of a tensor, {} elements, is 2^63 bytes or more", axis,
                            tensor.strides[axis]));
        strides_bytes.push_back(bytes);
    }
    return {data, type, std::move(shape), std::move(strides_bytes)};
}

}  // namespace

foreign_tensor::foreign_tensor(std::shared_ptr<const void> owner, const dlpack::tensor& tensor,
                               bool read_only)
    : owner_(std::move(owner)),
      device_(device_of(tensor.device)),
      view_(view_of(tensor)),
      read_only_(read_only) {}

// In braces, arguments are evaluated in their order: the owner comes first, so that the tensor is deleted if
// anything throws.
foreign_tensor::foreign_tensor(dlpack::managed_tensor_versioned* tensor)
    : foreign_tensor{owner_of(tensor), checked(*tensor), (tensor->flags & dlpack::flag_read_only) != 0} {}

foreign_tensor::foreign_tensor(dlpack::managed_tensor* tensor)
    : foreign_tensor{owner_of(tensor), tensor->dl_tensor, false} {}

const std::byte* foreign_tensor::contiguous_data() const {
    if (!view_.c_contiguous())
        throw invalid_argument(fmt::format(
            "the tensor of shape {} is not in C order: make it contiguous first", to_string(view_.shape())));
    return view_.data();
}

std::byte* foreign_tensor::writable_data() const {
    if (read_only_) throw invalid_argument("the tensor is read-only");
    return const_cast<std::byte*>(contiguous_data());  // NOLINT: its owner allows writing
}

parameter_spec to_parameter(std::string name, const foreign_tensor& tensor, std::size_t group) {
    if (tensor.view().is_moved_from())
        throw invalid_argument(fmt::format("the tensor of parameter '{}' was moved from", name));
    return {std::move(name), tensor.view().dtype(), tensor.view().shape(), group, tensor.contiguous_data()};
}

}  // namespace pinflow
