#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "pinflow/buffer.hpp"
#include "pinflow/dlpack.hpp"
#include "pinflow/stream.hpp"

/// The bytes of a tensor in C order, brought to the host once `stream` has passed the work enqueued so far.
inline std::vector<std::byte> bytes_of_tensor(const pinflow::dlpack::tensor& tensor,
                                              pinflow::stream_view stream) {
    std::size_t size_bytes = tensor.dtype.bits / 8;
    for (std::int32_t axis = 0; axis < tensor.ndim; ++axis)
        size_bytes *= static_cast<std::size_t>(tensor.shape[axis]);
    std::vector<std::byte> bytes(size_bytes);
    pinflow::copy_to_host_async(bytes, static_cast<const std::byte*>(tensor.data), stream);
    stream.synchronize();
    return bytes;
}

/// A tensor of another library, which counts how often it is deleted.
template <typename Managed = pinflow::dlpack::managed_tensor_versioned>
class counted_tensor {
 public:
    counted_tensor(void* data, pinflow::dlpack::device device, pinflow::dlpack::data_type type,
                   std::vector<std::int64_t> shape, std::vector<std::int64_t> strides = {})
        : shape_(std::move(shape)), strides_(std::move(strides)) {
        managed.dl_tensor = {.data = data,
                             .device = device,
                             .ndim = static_cast<std::int32_t>(shape_.size()),
                             .dtype = type,
                             .shape = shape_.data(),
                             .strides = strides_.empty() ? nullptr : strides_.data(),
                             .byte_offset = 0};
        managed.manager_ctx = this;
        managed.deleter = [](Managed* self) { ++static_cast<counted_tensor*>(self->manager_ctx)->deletions; };
        if constexpr (requires { managed.version; }) managed.version = {1, 1};
    }
    counted_tensor(const counted_tensor&) = delete;
    counted_tensor& operator=(const counted_tensor&) = delete;
    ~counted_tensor() = default;

    Managed managed{};
    int deletions = 0;

 private:
    std::vector<std::int64_t> shape_;
    std::vector<std::int64_t> strides_;
};
